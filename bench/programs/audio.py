"""Speech, and models of Hugging Face's transformers as they train."""

from __future__ import annotations

from typing import Any

import torch
from programs.program import own_loss, program
from torch.nn import functional


@program("transformers", "Whisper: layer dropout and SpecAugment", changing=True)
def whisper() -> tuple[Any, Any, Any]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=200,
        num_mel_bins=16,
        encoder_layers=3,
        decoder_layers=3,
        d_model=48,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=50,
        max_target_positions=40,
        encoder_layerdrop=0.1,
        decoder_layerdrop=0.1,
        dropout=0.1,
        apply_spec_augment=True,
        mask_time_length=4,
        mask_time_prob=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    batch = {"input_features": torch.randn(4, 16, 100), "labels": torch.randint(3, 200, (4, 20))}
    return WhisperForConditionalGeneration(config).train(), batch, None


@program("transformers", "wav2vec 2.0, pretraining: Gumbel quantiser, negatives, layer dropout", changing=True)
def wav2vec2() -> tuple[Any, Any, Any]:
    from transformers import Wav2Vec2Config, Wav2Vec2ForPreTraining
    from transformers.models.wav2vec2.modeling_wav2vec2 import _compute_mask_indices, _sample_negative_indices

    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=96,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.1,
        mask_time_length=2,
        codevector_dim=32,
        num_codevectors_per_group=16,
        proj_codevector_dim=32,
        num_negatives=10,
    )
    model = Wav2Vec2ForPreTraining(config)
    length = int(model._get_feat_extract_output_lengths(2000))
    mask = _compute_mask_indices((4, length), 0.3, 2, min_masks=2)
    negatives = _sample_negative_indices((4, length), 10, mask)
    batch = {
        "input_values": torch.randn(4, 2000),
        "mask_time_indices": torch.tensor(mask),
        "sampled_negative_indices": torch.tensor(negatives),
    }
    return model.train(), batch, None


@program("transformers", "SpeechT5, text to speech", changing=True)
def speech_t5() -> tuple[Any, Any, Any]:
    from transformers import SpeechT5Config, SpeechT5ForTextToSpeech

    config = SpeechT5Config(
        vocab_size=60,
        hidden_size=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=16,
        speech_decoder_prenet_units=32,
        speech_decoder_postnet_units=32,
        speaker_embedding_dim=16,
        encoder_layerdrop=0.1,
        decoder_layerdrop=0.1,
        max_speech_positions=100,
        max_text_positions=60,
        use_guided_attention_loss=False,
        encoder_max_relative_position=16,
        use_cache=False,
    )
    batch = {
        "input_ids": torch.randint(4, 60, (4, 20)),
        "labels": torch.randn(4, 40, 16),
        "speaker_embeddings": torch.randn(4, 16),
    }
    return SpeechT5ForTextToSpeech(config).train(), batch, None


@program("conformer", "Conformer with a CTC loss")
def conformer() -> tuple[Any, Any, Any]:
    from conformer import ConformerBlock

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(20, 48)
            self.body = torch.nn.Sequential(
                *(
                    ConformerBlock(
                        dim=48,
                        dim_head=12,
                        heads=4,
                        attn_dropout=0.1,
                        ff_dropout=0.1,
                        conv_dropout=0.1,
                        conv_kernel_size=7,
                    )
                    for _ in range(3)
                )
            )
            self.head = torch.nn.Linear(48, 30)

        def forward(self, x: Any, said: Any) -> Any:
            y = self.head(self.body(self.first(x))).log_softmax(-1).transpose(0, 1)
            lengths = torch.full((len(x),), x.shape[1])
            return functional.ctc_loss(y, said, lengths, torch.full_like(lengths, said.shape[1]))

    return Net().train(), (torch.randn(4, 64, 20), torch.randint(1, 30, (4, 10))), own_loss


@program("transformers", "Switch Transformer: routed experts")
def switch() -> tuple[Any, Any, Any]:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=200,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
        use_cache=False,
    )
    batch = {"input_ids": torch.randint(2, 200, (8, 32)), "labels": torch.randint(2, 200, (8, 16))}
    return SwitchTransformersForConditionalGeneration(config).train(), batch, None


@program("transformers", "Mixtral: routed experts, causal")
def mixtral() -> tuple[Any, Any, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=200,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        use_cache=False,
        max_position_embeddings=64,
    )
    tokens = torch.randint(200, (4, 48))
    return MixtralForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}, None


@program("transformers", "Segformer: stochastic depth")
def segformer() -> tuple[Any, Any, Any]:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_encoder_blocks=3,
        depths=[1, 1, 1],
        sr_ratios=[4, 2, 1],
        hidden_sizes=[16, 32, 32],
        patch_sizes=[7, 3, 3],
        strides=[4, 2, 2],
        num_attention_heads=[1, 2, 2],
        mlp_ratios=[2, 2, 2],
        decoder_hidden_size=32,
        num_labels=5,
        drop_path_rate=0.2,
    )
    return (
        SegformerForSemanticSegmentation(config).train(),
        {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(5, (2, 64, 64))},
        None,
    )


@program("transformers", "Swin: stochastic depth, shifted windows")
def swin() -> tuple[Any, Any, Any]:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.2,
        num_labels=10,
    )
    return (
        SwinForImageClassification(config).train(),
        {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(10, (4,))},
        None,
    )


@program("transformers", "Reformer: chunked, reversible, hashed")
def reformer() -> tuple[Any, Any, Any]:
    from transformers import ReformerConfig, ReformerModelWithLMHead

    config = ReformerConfig(
        vocab_size=200,
        attention_head_size=16,
        attn_layers=["local", "lsh", "local"],
        axial_pos_shape=(8, 8),
        axial_pos_embds_dim=(16, 32),
        hidden_size=48,
        num_attention_heads=3,
        feed_forward_size=96,
        is_decoder=True,
        max_position_embeddings=64,
        num_buckets=4,
        lsh_attn_chunk_length=16,
        local_attn_chunk_length=16,
        chunk_size_lm_head=16,
        use_cache=False,
        hash_seed=None,
    )
    tokens = torch.randint(200, (2, 64))
    return ReformerModelWithLMHead(config).train(), {"input_ids": tokens, "labels": tokens}, None


@program("transformers", "BigBird: blocks of sparse attention, chosen by numpy")
def big_bird() -> tuple[Any, Any, Any]:
    from transformers import BigBirdConfig, BigBirdForMaskedLM

    config = BigBirdConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        attention_type="block_sparse",
        block_size=16,
        num_random_blocks=2,
    )
    tokens = torch.randint(200, (1, 256))
    return BigBirdForMaskedLM(config).train(), {"input_ids": tokens, "labels": tokens}, None


@program("transformers", "DETR-like: Hungarian matching needs scipy")
def detr() -> tuple[Any, Any, Any]:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    config = DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        backbone_config=ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"]
        ),
        use_pretrained_backbone=False,
        num_queries=10,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_labels=4,
        auxiliary_loss=True,
    )
    model = DetrForObjectDetection(config)
    batch = {
        "pixels": torch.randn(2, 3, 64, 64),
        "classes": torch.randint(4, (2, 3)),
        "boxes": 0.25 + 0.2 * torch.rand(2, 3, 4),
    }

    def loss(m: Any, b: Any) -> Any:
        labels = [
            {"class_labels": classes, "boxes": boxes} for classes, boxes in zip(b["classes"], b["boxes"], strict=True)
        ]
        return m(pixel_values=b["pixels"], labels=labels).loss

    return model.train(), batch, loss


@program("transformers", "CLIP: two towers, contrastive")
def clip() -> tuple[Any, Any, Any]:
    from transformers import CLIPConfig, CLIPModel

    text = {
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
        "bos_token_id": 98,
        "eos_token_id": 99,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))
    batch = {"input_ids": torch.randint(1, 99, (8, 24)), "pixel_values": torch.randn(8, 3, 32, 32), "return_loss": True}
    return model.train(), batch, None
