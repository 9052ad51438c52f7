"""What no rule can know about single architectures: relations between fields of a configuration, inputs of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from .inputs import ROWS, TARGETS, TOKENS, image_size, random_tokens

_SERIES: Final = {"prediction_length": 4, "context_length": 16, "lags_sequence": [1, 2, 3], "num_time_features": 1}
_IMAGE_WORDS: Final = {  # chameleon reads the number of an image token from the letters of its name
    "<image>": 100,
    **{f"IMGIMG{''.join(chr(ord('A') + int(c)) for c in str(i))}Z": 200 + i for i in range(128)},
}

_QUERIES: Final = {"image_token_index": 127, "num_query_tokens": 8}

# Architecture -> fields to set after shrinking; a dot reaches into a nested configuration.
FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "align": {
        "vision_config.width_coefficient": 0.25,
        "vision_config.depth_coefficient": 0.3,
        "vision_config.hidden_dim": 320,
    },
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    "autoformer": _SERIES,
    "blip-2": _QUERIES,
    "chameleon": {"vocab_size": 512, "vocabulary_map": _IMAGE_WORDS},
    "clap": {"audio_config.spec_size": 64, "audio_config.num_mel_bins": 16},
    "cvt": {"depth": (1, 2, 3)},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "emu3": {"vocab_size": 512, "vocabulary_map": _IMAGE_WORDS, "vq_config.hidden_size": 128},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 4},
    "esmc": {"vocab_size": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl": {"text_config.head_dim": 8},
    "informer": _SERIES,
    "instructblip": _QUERIES,
    "instructblipvideo": {"video_token_index": 127, "num_query_tokens": 8},
    "kosmos-2": {"latent_query_num": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "input_size": 32, "patch_size": 8},
    "llama4": {
        "vision_config.intermediate_size": 128,
        "vision_config.pixel_shuffle_ratio": 0.5,
        "vision_config.projector_input_dim": 32,
        "vision_config.projector_output_dim": 32,
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "neomme": {"head_dim": 16, "hidden_size": 64},
    "owlv2": {"text_config.max_position_embeddings": 24},
    "owlvit": {"text_config.max_position_embeddings": 24},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "lw_detr": {"backbone_config.num_windows": 4},
    "nemotron_h_omni": {"vision_config.video_temporal_patch_size": 2},
    "seggpt": {"merge_index": 0},
    "step3p7": {"text_config.sliding_window": 8},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (4, TOKENS // 4),
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "is_decoder": True,
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "vitmatte": {"convstream_hidden_sizes": [8, 8, 24], "fusion_hidden_sizes": [32, 16, 8, 8]},
    "xmod": {"default_language": "en_XX"},
    "time_series_transformer": _SERIES,
}

_MUSIC: Final = {
    "input_ids": lambda at: random_tokens(ROWS, TOKENS),
    "input_values": None,
    "input_features": None,
    "decoder_input_ids": lambda at: random_tokens(ROWS * at.config.decoder.num_codebooks, TARGETS),
}

# Architecture -> inputs by name, as in `inputs.MAKERS`.
INPUTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "clap": {"input_features": lambda at: torch.randn(ROWS, 1, 200, 16)},
    "decision_transformer": {
        "states": lambda at: torch.randn(ROWS, TOKENS, at.config.state_dim),
        "actions": lambda at: torch.randn(ROWS, TOKENS, at.config.act_dim),
        "rewards": lambda at: torch.randn(ROWS, TOKENS, 1),
        "returns_to_go": lambda at: torch.randn(ROWS, TOKENS, 1),
        "timesteps": lambda at: torch.randint(0, 64, (ROWS, TOKENS)),
        "attention_mask": lambda at: torch.ones(ROWS, TOKENS),
    },
    "deepseek_vl_hybrid": {"high_res_pixel_values": lambda at: torch.randn(ROWS, 3, *image_size(at))},
    "embedding_gemma2": {"pixel_values": None},
    "seggpt": {
        "prompt_pixel_values": lambda at: torch.randn(ROWS, 3, *image_size(at)),
        "prompt_masks": lambda at: torch.randn(ROWS, 3, *image_size(at)),
    },
    "speech-encoder-decoder": {"input_features": None},
    "timesfm": {"future_values": lambda at: torch.randn(ROWS, at.config.horizon_length)},
    "video_llama_3": {"image_merge_sizes": lambda at: torch.ones(ROWS, dtype=torch.long)},
    "kimi_k25": {"pixel_values": lambda at: torch.randn(ROWS * 16, 3, 8, 8)},
    "kosmos-2": {"image_embeds_position_mask": lambda at: torch.arange(TOKENS).expand(ROWS, -1) < 8},
    "layoutlmv3": {"pixel_values": lambda at: torch.randn(ROWS, 3, 32, 32)},
    "musicgen": _MUSIC,
    "musicgen_melody": _MUSIC,
    "oneformer": {"task_inputs": lambda at: random_tokens(ROWS, at.config.task_seq_len)},
    "paddleocr_vl": {"pixel_values": lambda at: torch.randn(1, ROWS * 16, 3, 8, 8)},
    "pix2struct": {
        "flattened_patches": lambda at: torch.cat(
            [torch.arange(32).view(1, 16, 2).expand(ROWS, -1, -1) % 8, torch.randn(ROWS, 16, 192)], dim=-1
        )
    },
    "lxmert": {
        "visual_feats": lambda at: torch.randn(ROWS, 8, at.config.visual_feat_dim),
        "visual_pos": lambda at: torch.rand(ROWS, 8, at.config.visual_pos_dim),
    },
    "dia": {
        "decoder_input_ids": lambda at: torch.randint(1, 64, (ROWS, TARGETS, at.config.decoder_config.num_channels))
    },
}

# Architecture -> the class to build, where the first one is not the one that can be trained.
CLASSES: Final[Mapping[str, str]] = {
    "bark": "BarkSemanticModel",
    "mask2former": "Mask2FormerModel",  # the heads need scipy for their loss
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
    "oneformer": "OneFormerModel",
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}

# Architecture -> the configuration of that class, where it is one of the parts: the whole has no forward.
CONFIGURATIONS: Final[Mapping[str, str]] = {
    "bark": "BarkSemanticConfig",
    "qwen2_5_omni": "Qwen2_5OmniThinkerConfig",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerConfig",
}
