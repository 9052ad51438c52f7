"""A configuration of any architecture, made small: few layers, narrow, a tiny vocabulary and tiny images, nested configurations too.

The rules go by the names of the fields, which transformers uses the same way nearly everywhere. Where one way of shrinking breaks a relation between
fields, the next one in `WAYS` keeps it; what no rule can know stands in `particulars`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

Way: TypeAlias = Literal["fixed", "scaled", "layers"]
# All widths to one number (so that what must agree agrees), all widths by one factor (so that multiples stay multiples), or only fewer layers.
WAYS: tuple[Way, ...] = ("fixed", "scaled", "layers")

VOCABULARY = 128
ORDINARY = range(6, 96)  # what random text is drawn from; special tokens lie outside
WIDTH, INNER, HEADS, KEY_VALUE_HEADS, HEAD_WIDTH = 32, 64, 4, 2, 8
POSITIONS = 64
FACTOR = 8
_LOW = {"pad": 0, "bos": 1, "eos": 2, "sep": 3, "mask": 4, "cls": 5}

_VOCABULARY = re.compile(
    r"(^|_)vocab_size$|^codebook_size$|^vocab_size_per_layer_input$|^num_embeddings$|vocab$|^n_vocab$|^num_hash_buckets$"
)
_TOKEN = re.compile(r"_(token_id|token_index|start_id|end_id|bos_id|eos_id|pad_id)$|^(unk|mask|pad|eos|bos)_index$")
_LAYERS = re.compile(
    r"(^|_)(num_layers|n_layers?|n_layer|num_hidden_layers|encoder_layers|decoder_layers|num_encoder_layers|num_decoder_layers|layers|depth"
    r"|num_blocks|n_blocks|num_self_attends_per_block|num_attention_layers|num_temporal_layers|num_spatial_layers|num_global_layers|num_auxiliary_layers)$"
    r"|^[lxr]_layers$|^num_hidden_groups$"
)
_KEY_VALUE_HEADS = re.compile(
    r"(num_key_value_heads|num_kv_heads|n_kv_heads?|num_key_value_attention_heads|num_key_heads)$"
)
_HEADS = re.compile(
    r"(num_attention_heads|attention_heads|num_heads|n_heads?|num_value_heads|linear_num_heads|mamba_num_heads|_heads)$"
)
_HEAD_WIDTH = re.compile(
    r"(head_dim|d_kv|mamba_d_head|head_size|rotary_dim|d_head|dim_head|kv_channels|rope_head_dim|mamba_headdim)$"
)
_INNER = re.compile(
    r"(intermediate_size|ffn_dim|mlp_dim|d_ff|dff|dim_ff|d_inner|n_inner|feed_forward_size|dim_feedforward|feedforward_dim|linear_units|ffn_hidden_size"
    r"|intermediate_dim|mlp_hidden_size|intermediate_size_mlp)$"
)
_WIDTH = re.compile(
    r"(hidden_size|hidden_dim|d_model|embed_dim|embeds_hidden_size|n_embd|emb_dim|embedding_size|embedding_dim|projection_dim|proj_size|project_dim"
    r"|output_dim|out_dim|input_dim|in_dim|_width|^width|_dim|^dim|d_latents|hidden_channels|output_channels|conv_channels|latent_channels"
    r"|fpn_hidden_size|feature_size|pooler_output_size|projection_size|units|lora_rank|codevector_dim|base_channels|out_channels|d_model"
    r"|lru_width|filter_channels|predictor_channels|_rank|state_dim|projection_hidden_size|classifier_proj_size|upsample_initial_channel"
    r"|hidden_sizes|embed_dims|_dims|channels|conv_dim|neck_hidden_sizes|fusion_hidden_sizes|hidden_size_per_layer_input|hidden_dimension|embed_size)$"
)
_NO_WIDTH = re.compile(
    r"num_channels|audio_channels|head|rope|kernel|action|num_|state_dim|act_dim|n_mel|input_dim$|temporal_dim|window|time_|mamba_d_conv|conv_L"
)
_EXPERTS = re.compile(r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$")
_CHOSEN = re.compile(r"(num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_selected_experts)$")
_IMAGE = re.compile(r"(^|_)(image_size|img_size|input_size|crop_size)$")
_POSITIONS = re.compile(
    r"(max_position_embeddings|n_positions|max_source_positions|max_target_positions|n_ctx|max_seq_len|max_speech_positions|max_text_positions"
    r"|_max_position_embeddings|max_(en|de)coder_position_embeddings)$"
)
_QUERIES = re.compile(
    r"(num_queries|num_query_tokens|num_latents|resampler_n_latents|num_proposals|num_denoising|train_num_points)$"
)
_INDICES = re.compile(
    r"(indexes|indices|_idx|_idxs|_layers|extract_layers|_hook_ids|out_indices|_layer_ids|spatial_target_layers)$"
)
_OFF = re.compile(r"(layerdrop|mask_time_prob|mask_feature_prob|layer_drop|jitter_noise|router_jitter_noise)$")
_OFF_SWITCH = re.compile(r"(apply_spec_augment|use_cache|use_timm_backbone|use_pretrained_backbone)$")


def shrunk(config: Any, way: Way, given: Mapping[str, Any]) -> Any:
    """The same kind of configuration, small.

    Args:
        config: an instance with the defaults of its class.
        way: how to treat widths.
        given: fields to set as they are, after the rules; "text_config.vocab_size" reaches into a nested configuration.
    """
    specials = sorted({name for name, value in _all_fields(config) if _special(name, value)})
    numbers = {name: VOCABULARY - 1 - rank % 30 for rank, name in enumerate(specials)}
    return _made(config, way, given, numbers)


def _all_fields(config: Any) -> list[tuple[str, Any]]:
    found = []
    for name, value in vars(config).items():
        found.append((name, value))
        if _is_config(value):
            found += _all_fields(value)
    return found


def _is_config(value: Any) -> bool:
    return hasattr(value, "sub_configs_defaults") and hasattr(value, "model_type")


def _special(name: str, value: Any) -> bool:
    return bool(
        _TOKEN.search(name)
        and isinstance(value, int)
        and value >= ORDINARY.start
        and name.partition("_")[0] not in _LOW
    )


def _made(config: Any, way: Way, given: Mapping[str, Any], numbers: Mapping[str, int]) -> Any:
    fields = vars(config)
    layers = _layers(fields)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        name = field.name
        if name not in fields or name in given:
            continue
        value = fields[name]
        inside = {key.removeprefix(f"{name}."): v for key, v in given.items() if key.startswith(f"{name}.")}
        if name in {"_out_indices", "_out_features"}:
            continue
        if getattr(value, "model_type", None) == "timm_backbone":
            arguments[name] = _convolutional(value)
            continue
        if _is_config(value):
            arguments[name] = _made(value, way, inside, numbers)
            continue
        declared = (
            field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        )  # None: derived from the others
        small = _small(name, value, way, (layers, _total(fields)), numbers)
        if inside and isinstance(small, dict):
            small = {**small, **inside}
        if small == value and type(small) is type(value) and value == declared:
            continue
        if declared is None and not _always(name, value):
            if small == value:
                arguments.pop(name, None)
            continue
        arguments[name] = small
    # One head of keys for each of queries is a kind of attention of its own.
    heads = fields.get("num_attention_heads")
    if heads is not None and heads == fields.get("num_key_value_heads") and "num_key_value_heads" in arguments:
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    if fields.get("_out_indices"):
        arguments["out_indices"] = _stages(fields, layers)
    arguments.update({k: v for k, v in given.items() if "." not in k})
    made = type(config)(**arguments)
    if isinstance(vars(made).get("rope_parameters"), dict) and "mrope_section" in _source(type(config)):
        _fit_sections(made)
    return made


def _convolutional(asked: Any) -> Any:
    """A small ResNet of transformers in the place of a network of timm, which is not installed here."""
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=4,  # its maps are the largest, and when they are rebuilt nothing else is left to drop
        hidden_sizes=[16, 24, 32, 40],
        depths=[2, 2, 1, 1],
        out_indices=list(vars(asked).get("_out_indices") or [1, 2, 3, 4]),
    )


def _total(fields: Mapping[str, Any]) -> int:
    """Number of layers, 0 where a configuration counts in another way (stages)."""
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"):
        if isinstance(fields.get(name), int):
            return int(fields[name])
    return 0


def _stages(fields: Mapping[str, Any], layers: int) -> list[int]:
    """Which layers or stages a backbone gives out: as many as before, the last ones where there are fewer now."""
    wanted = [int(v) for v in fields["_out_indices"]]
    if not _total(fields) or fields.get("depths") or max(wanted) <= layers:
        return wanted
    return list(range(1, layers + 1))[-len(wanted) :]


def _source(configuration: type[Any]) -> str:
    """Text of the module that models this configuration."""
    path = Path(inspect.getfile(configuration).replace("configuration_", "modeling_"))
    return path.read_text() if path.exists() else ""


def _fit_sections(config: Any) -> None:
    """Rotary positions in three directions share the width of a head: 16, 24 and 24 of 128 when nothing is said."""
    fields = vars(config)
    if "num_attention_heads" not in fields:
        return
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    half = round(width * config.rope_parameters.get("partial_rotary_factor", 1.0)) // 2
    config.rope_parameters["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]


def _always(name: str, value: Any) -> bool:
    """Whether a field that is derived when left out is set all the same: what chooses kinds of layers, tokens, nested backbones."""
    if name in {"rope_parameters", "rope_scaling", "image_grid_pinpoints"} or _TOKEN.search(name):
        return True
    return isinstance(value, list) and bool(value) and isinstance(value[0], str) and "out_features" not in name


def _kinds(value: Any) -> list[Any]:
    return list(dict.fromkeys(value))


def _layers(fields: Mapping[str, Any]) -> int:
    """Layers that the small configuration has: two, or as many as there are kinds of layers."""
    total = _total(fields)
    wanted = 2 if fields.get("depths") else max(2, len(fields.get("_out_indices") or ()))
    for value in fields.values():
        if isinstance(value, (list, tuple)) and value and len(value) == total and isinstance(value[0], str):
            wanted = max(wanted, len(_kinds(value)))
    for name, value in fields.items():
        if (
            _INDICES.search(name)
            and isinstance(value, (list, tuple))
            and 2 < len(value) <= 4
            and all(isinstance(v, int) for v in value)
            and max(value) <= total
        ):
            wanted = max(wanted, len(value))
    return wanted


def _small(name: str, value: Any, way: Way, depth: tuple[int, int], numbers: Mapping[str, int]) -> Any:
    layers = depth[0]
    if isinstance(value, bool):
        return False if _OFF_SWITCH.search(name) else value
    if isinstance(value, float):
        return 0.0 if _OFF.search(name) else value
    if name in {"rope_parameters", "rope_scaling"}:
        return _rope(value, way)
    if isinstance(value, dict) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return _small_number(name, value, way, layers, numbers)
    if isinstance(value, (list, tuple)):
        return type(value)(_small_list(name, list(value), way, *depth))
    return value


def _rope(value: Any, way: Way) -> Any:
    if way == "layers" or not isinstance(value, dict):
        return value
    if all(isinstance(v, dict) for v in value.values()) and value:
        return {k: _rope(v, way) for k, v in value.items()}
    small = dict(value)
    if "mrope_section" in small:
        small["mrope_section"] = [2, 1, 1]
    return small


def _small_number(name: str, value: int, way: Way, layers: int, numbers: Mapping[str, int]) -> int:
    if name in numbers and value >= ORDINARY.start:
        return numbers[name]
    if _TOKEN.search(name):
        return _LOW.get(name.partition("_")[0], value if value < VOCABULARY else VOCABULARY - 1)
    if _VOCABULARY.search(name):
        return min(value, VOCABULARY)
    if _LAYERS.search(name) and not name.startswith("num_kv_shared"):
        return min(value, layers if "hidden_layers" in name or name in {"num_layers", "depth", "n_layer"} else 2)
    if name == "chunk_size_feed_forward" or way == "layers":
        return value
    if _POSITIONS.search(name):
        return min(value, POSITIONS)
    if _EXPERTS.search(name):
        return min(value, 4)
    if _CHOSEN.search(name):
        return min(value, 2)
    if _IMAGE.search(name):
        return min(value, 32) if value >= 32 else value
    if name in {"patch_size", "encoder_stride"} and value > 8:
        return 8
    if name in {"num_position_embeddings", "position_embedding_size"}:
        return 64
    if name in {"num_frames", "frames_per_clip"}:
        return min(value, 4)
    if name == "context_length":
        return min(value, 128)
    if name == "num_pos_feats":  # half of a width
        return min(value, WIDTH // 2)
    if name == "index_kpool":
        return min(value, 4)
    if name == "num_filters":
        return min(value, 8)
    if name == "window_size" and value > 64:  # in pixels
        return 32
    if name in {"sliding_window", "window_size", "attention_chunk_size", "attention_window", "local_attention"}:
        return min(value, 8)
    if name in {"image_seq_length", "num_image_tokens", "mm_tokens_per_image"}:
        return 16
    if name in {"first_k_dense_replace", "num_dense_layers"}:
        return min(value, 1)
    if name == "upsample_groups":  # one for each channel
        return min(value, WIDTH)
    if name in {"n_group", "topk_group"}:
        return 1
    if name in {"mamba_d_state", "state_size", "mamba_state_size", "ssm_state_size"}:
        return min(value, 16)
    if name in {"chunk_size", "mamba_chunk_size", "index_topk", "context_size"} and value > 8:
        return 8
    if name == "max_text_length":  # steps of a recurrent decoder, each of them a dozen operations
        return min(value, 8)
    if name == "max_length" and value > 128:  # frames of a spectrogram
        return 64
    if _QUERIES.search(name):
        return min(value, 8)
    return _small_width(name, value, way)


def _small_width(name: str, value: int, way: Way) -> int:
    if way == "scaled":
        scaled = _HEAD_WIDTH.search(name) or _INNER.search(name) or (_WIDTH.search(name) and not _NO_WIDTH.search(name))
        return max(8, value // FACTOR // 8 * 8) if scaled and value >= 32 else value
    if name.startswith("mamba") and _HEADS.search(name):
        return min(value, 2 * WIDTH // HEAD_WIDTH)  # of the expanded width
    if _KEY_VALUE_HEADS.search(name):
        return min(value, KEY_VALUE_HEADS)
    if _HEADS.search(name):
        return min(value, HEADS)
    if _HEAD_WIDTH.search(name):
        return min(value, HEAD_WIDTH)
    if _INNER.search(name):
        return min(value, INNER)
    if _WIDTH.search(name) and not _NO_WIDTH.search(name):
        return min(value, WIDTH) if value >= WIDTH else value
    return value


def _small_list(name: str, value: list[Any], way: Way, layers: int, total: int) -> list[Any]:
    if not value:
        return value
    if name == "image_grid_pinpoints":
        return [[32, 32]]
    if name == "eos_token_id":
        return value if all(v < VOCABULARY for v in value) else [2]
    if isinstance(value[0], str):
        kinds = _kinds(value)
        return (kinds + [kinds[-1]] * layers)[:layers] if len(value) == total and "stage" not in value[0] else value
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return value[:layers] if len(value) == total else value
    if name in {"depths", "depth", "stage_num_blocks", "blocks_per_stage", "block_sizes", "n_attn_blocks"}:
        return [min(v, 1) for v in value]
    if _INDICES.search(name) and layers <= max(value) <= total:
        return list(range(layers))[-len(value) :]
    if way == "layers":
        return value
    if len(value) == total and total > layers:  # one entry a layer
        return [_small_width(name, v, way) for v in value[:layers]]
    if _IMAGE.search(name):
        return [min(v, 32) for v in value]
    if name in {"num_heads", "num_attention_heads", "num_attention_heads_per_stage"}:
        return [2**i for i in range(len(value))] if way == "fixed" else value
    if _WIDTH.search(name) and not _NO_WIDTH.search(name) and max(value) >= 32:
        return [max(8, v // FACTOR // 8 * 8) if v >= 32 else v for v in value]
    return value
