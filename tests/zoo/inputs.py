"""A small training batch for any architecture, from the names that its forward takes, and a loss where it has none of its own."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .shrinking import ORDINARY

ROWS, TOKENS, TARGETS = 8, 24, 12
FRAMES = 2  # of a video
SAMPLES = 2000  # of a sound
IGNORED = -100
VARIANTS = 5  # in how many forms the same input is offered: what an image or a spectrogram is differs between families
TEXT_ONLY = 4  # the last form: where we do not know how a model wants its images, its text part is trained alone

Batch: TypeAlias = dict[str, Any]
Maker: TypeAlias = Callable[["Setting"], Any]


@dataclasses.dataclass(slots=True)
class Setting:
    """What the makers of inputs go by.

    Attributes:
        config: of the model.
        asked: parameters of forward.
        variant: which form of the inputs.
        placeholders: tokens a row holds in the place of an image (or sound).
        made: the inputs made so far.
    """

    config: Any
    asked: Mapping[str, inspect.Parameter]
    variant: int
    placeholders: int
    made: Batch = dataclasses.field(default_factory=dict)

    def first(self, *names: str, default: Any = None) -> Any:
        """The first field of one of these names in the configuration or those nested in it, the vision one before the text one."""
        for each in nested(self.config):
            for name in names:
                value = vars(each).get(name)
                if value is not None:
                    return value
        return default

    @property
    def text(self) -> Any:
        """The configuration of the text part."""
        return self.config.get_text_config()

    @property
    def vocabulary(self) -> int:
        """Number of tokens there are, also where that is less than we draw from elsewhere."""
        return int(getattr(self.text, "vocab_size", None) or ORDINARY.stop)

    @property
    def image_token(self) -> int | None:
        """The token that stands for an image, a sound where there are no images."""
        for name in ("image_token_id", "image_token_index", "media_token_id", "audio_token_id", "audio_token_index"):
            value = vars(self.config).get(name)
            if isinstance(value, int):
                return value
        return None


def nested(config: Any) -> Iterator[Any]:
    """A configuration and those in it, the ones that see or hear before the text ones."""
    yield config
    inner = [(name, each) for name, each in vars(config).items() if hasattr(each, "sub_configs_defaults")]
    for _, each in sorted(inner, key=lambda pair: ("text" in pair[0], "vision" not in pair[0])):
        yield from nested(each)


def random_tokens(rows: int, tokens: int, vocabulary: int = ORDINARY.stop) -> Tensor:
    """Ordinary tokens, none of them special."""
    return torch.randint(ORDINARY.start, min(ORDINARY.stop, vocabulary), (rows, tokens))


def _input_ids(at: Setting) -> Tensor:
    ids = random_tokens(ROWS, TOKENS, at.vocabulary)
    sees = {
        "pixel_values",
        "pixel_values_images",
        "input_features",
        "input_values",
        "audio_values",
        "images",
        "image_grid_thw",
    }
    if at.image_token is not None and sees & set(at.asked) and at.variant != TEXT_ONLY:
        marks = torch.full((ROWS, at.placeholders), at.image_token)
        ids = torch.cat([ids[:, :1], marks, ids[:, 1:]], dim=1)
    return ids


def _attention_mask(at: Setting) -> Tensor | None:
    """Padding at the end of the last row; only where tokens are the only input and the model takes it."""
    ids = at.made.get("input_ids")
    if ids is None or at.variant > 0 or ids.dim() > 2:
        return None
    mask = torch.ones_like(ids)
    if not {"pixel_values", "input_features"} & set(at.made):
        mask[-1, -ids.shape[1] // 4 :] = 0
    return mask


def image_size(at: Setting) -> tuple[int, int]:
    """Height and width."""
    size = at.first("image_size", "img_size", default=None) or at.first("crop_size", default=64)
    if isinstance(size, (list, tuple)):
        return int(size[-2]), int(size[-1])
    if isinstance(size, dict):
        return int(size["height"]), int(size["width"])
    return int(size), int(size)


def _channels(at: Setting) -> int:
    found = at.first("num_channels", "in_channels", "in_chans", default=3)
    return found if isinstance(found, int) else 3


def _pixel_values(at: Setting) -> Tensor:
    if {"image_grid_thw", "grid_thw"} & set(at.asked) or "spatial_shapes" in at.asked:
        patch = at.first("patch_size", default=8)
        patch = patch if isinstance(patch, int) else patch[0]
        depth = at.first("temporal_patch_size", default=1) if "spatial_shapes" not in at.asked else 1
        rows = (ROWS, 16) if "spatial_shapes" in at.asked else (ROWS * 16,)
        return torch.randn(*rows, _channels(at) * depth * patch * patch)
    height, width = image_size(at)
    if at.variant == 2 and height < 64 and "image_sizes" not in at.asked:
        height, width = 64, 64
    shape: tuple[int, ...] = (ROWS, _channels(at), height, width)
    if (at.variant in {1, 3}) != bool(at.first("num_frames")):
        count = at.first("num_frames", default=1 if at.variant == 1 else FRAMES)
        shape = (ROWS, int(count), *shape[1:])
    return torch.randn(shape)


def _videos(at: Setting) -> Tensor | None:
    if "pixel_values" in at.asked:
        return None
    height, width = image_size(at)
    return torch.randn(
        ROWS, int(at.first("num_frames", "frames_per_clip", default=FRAMES)), _channels(at), height, width
    )


def _frames(at: Setting) -> int:
    return 2 * int(at.first("max_source_positions", default=32))


def _features(at: Setting) -> Tensor:
    bins = at.first(
        "num_mel_bins",
        "n_mels",
        "n_mel_bins",
        "mel_dim",
        "input_feat_size",
        "input_feat_per_channel",
        "feature_size",
        "feature_projection_input_dim",
        "input_dim",
        default=80,
    )
    frames = _frames(at)
    if "feature_projection_input_dim" in vars(at.config):
        bins = at.config.feature_projection_input_dim
    return torch.randn((ROWS, frames, bins) if at.variant % 2 else (ROWS, bins, frames))


def _sound(at: Setting) -> Tensor:
    if at.variant == 1:
        return torch.randn(ROWS, 1, SAMPLES)
    if at.variant == 2:
        return torch.randn(
            ROWS, int(at.first("max_length", default=64)), int(at.first("num_mel_bins", "feature_size", default=80))
        )
    return torch.randn(ROWS, SAMPLES)


def _boxes(at: Setting) -> Tensor:
    rows, tokens = at.made["input_ids"].shape[:2] if "input_ids" in at.made else (ROWS, TOKENS)
    corner = torch.randint(0, 400, (rows, tokens, 2))
    return torch.cat([corner, corner + torch.randint(1, 100, (rows, tokens, 2))], dim=-1)


def _grid(at: Setting) -> Tensor:
    return torch.tensor([[1, 4, 4]] * ROWS)


def _kinds(at: Setting) -> Tensor | None:
    ids = at.made.get("input_ids")
    return None if ids is None else (ids == at.image_token).long()


def _decoder_ids(at: Setting) -> Tensor:
    return random_tokens(ROWS, TARGETS, at.vocabulary)


def _past_values(at: Setting) -> Tensor:
    length = int(at.first("context_length", "history_length", default=32))
    lags = at.first("lags_sequence")
    channels = int(at.first("num_input_channels", default=0))
    length += max(lags) if lags else 0
    return torch.randn((ROWS, length, channels) if channels else (ROWS, length))


# Inputs by name. Those that forward asks for without a default, and those of `_OFFERED`, are given.
MAKERS: dict[str, Maker] = {
    "input_ids": _input_ids,
    "pixel_values": _pixel_values,
    "pixel_values_images": _pixel_values,
    "pixel_values_videos": _videos,
    "input_features": _features,
    "input_features_mask": lambda at: torch.ones(ROWS, _frames(at), dtype=torch.long),
    "feature_attention_mask": lambda at: torch.ones(ROWS, _frames(at), dtype=torch.long),
    "input_values": _sound,
    "audio_values": _sound,
    "image_grid_thw": _grid,
    "grid_thw": _grid,
    "mm_token_type_ids": _kinds,
    "attention_mask": _attention_mask,
    "bbox": _boxes,
    "decoder_input_ids": _decoder_ids,
    "past_values": _past_values,
    "past_time_features": lambda at: torch.randn(*at.made["past_values"].shape[:2], int(at.first("num_time_features", default=1))),
    "past_observed_mask": lambda at: torch.ones_like(at.made["past_values"]),
    "future_values": lambda at: torch.randn(ROWS, int(at.first("prediction_length", default=8))),
    "future_time_features": lambda at: torch.randn(ROWS, int(at.first("prediction_length", default=8)), int(at.first("num_time_features", default=1))),
    "spatial_shapes": lambda at: torch.tensor([[4, 4]] * ROWS),
    "pixel_attention_mask": lambda at: torch.ones(ROWS, 16, dtype=torch.long) if "spatial_shapes" in at.asked else None,
    "image_sizes": lambda at: torch.tensor([image_size(at)] * ROWS) if at.variant else None,
    "pixel_mask": lambda at: None,
    "qformer_input_ids": lambda at: random_tokens(ROWS, 8),
    "spectrogram": _features,
}  # fmt: skip
_OFFERED = frozenset(MAKERS) - {"decoder_input_ids", "pixel_mask"}


_TEXT = frozenset({"input_ids", "attention_mask", "decoder_input_ids"})


def _labels(at: Setting, head: str) -> Batch:
    """Labels as the head of this class name takes them; none where that is a structure of its own."""
    ids = at.made.get("input_ids")
    classes = int(getattr(at.config, "num_labels", 2) or 2)
    if "start_positions" in at.asked:
        return {"start_positions": torch.tensor([1] * ROWS), "end_positions": torch.tensor([3] * ROWS)}
    if "labels" not in at.asked:
        return {}
    if "CTC" in head:
        return {"labels": random_tokens(ROWS, 3, at.vocabulary)}
    if "Segmentation" in head and "Semantic" in head:
        return {"labels": torch.randint(0, classes, (ROWS, *at.made["pixel_values"].shape[-2:]))}
    if any(word in head for word in ("ImageClassification", "SequenceClassification", "AudioClassification", "VideoClassification")):  # fmt: skip
        return {"labels": torch.randint(0, classes, (ROWS,))}
    if "TokenClassification" in head and ids is not None:
        return {"labels": torch.randint(0, classes, ids.shape[:2])}
    if any(word in head for word in ("Detection", "Segmentation", "Depth", "XVector", "Pretraining", "PreTraining", "MultipleChoice")):  # fmt: skip
        return {}
    if getattr(at.config, "is_encoder_decoder", False) or ids is None:
        return {"labels": random_tokens(ROWS, TARGETS, at.vocabulary)}
    labels = ids.clone()
    labels[labels == at.image_token] = IGNORED
    if "attention_mask" in at.made:
        labels[at.made["attention_mask"] == 0] = IGNORED
    return {"labels": labels}


def batch_of(
    model: nn.Module, given: Mapping[str, Any], *, variant: int, placeholders: int, with_labels: bool
) -> Batch:
    """One batch.

    Args:
        model: whose forward says what it takes.
        given: makers by name that this architecture needs instead of the general ones; None leaves an input out.
        variant: 0 to VARIANTS - 1, the form of images and sounds.
        placeholders: tokens for an image in each row.
        with_labels: whether to give labels, where the head takes any.
    """
    config: Any = model.config
    asked = inspect.signature(model.forward).parameters
    at = Setting(config, asked, variant, placeholders)
    makers = {**MAKERS, **given}
    for name, maker in makers.items():
        if maker is None or name not in asked or (name not in _OFFERED and name not in given):
            continue
        if variant == TEXT_ONLY and "input_ids" in asked and name not in _TEXT and name not in given:
            continue
        if name == "input_values" and "input_features" in at.made:
            continue
        hears = {"input_values", "input_features"} & set(asked) and at.image_token is None
        if name == "input_ids" and hears and "decoder_input_ids" in asked and name not in given:
            continue  # speech models offer it for other uses
        value = maker(at)
        if value is not None:
            at.made[name] = value
    if with_labels:
        at.made |= _labels(at, type(model).__name__)
    if "labels" not in at.made and "decoder_input_ids" in asked and "decoder_input_ids" not in at.made:
        at.made["decoder_input_ids"] = _decoder_ids(at)
    return at.made


def floats(output: Any) -> list[Tensor]:
    """Tensors of an output through which gradients can flow, in its order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() and output.requires_grad else []
    if isinstance(output, Mapping):
        return [t for each in output.values() for t in floats(each)]
    if isinstance(output, (list, tuple)):
        return [t for each in output for t in floats(each)]
    return []


def mean_square(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squares of all outputs, for models without labels; what is masked out (infinite, or nearly) does not count."""
    found = floats(model(**batch))
    if not found:
        message = "no output through which gradients flow"
        raise TypeError(message)
    return torch.stack([torch.nan_to_num(t.float()).clamp(-100, 100).square().mean() for t in found]).sum()
