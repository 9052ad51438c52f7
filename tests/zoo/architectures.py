"""Every architecture of the installed transformers, and the classes in which it can be trained.

An architecture is a model type which is not only a part of another one of the same family: "clip", not "clip_text_model".
"""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from functools import cache
from typing import Any

# The head of an architecture is the first of these that it has; a head with labels tells more than a bare model, so those come first.
_TASKS = (
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "SEMANTIC_SEGMENTATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "DEPTH_ESTIMATION",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "TIME_SERIES_PREDICTION",
)


@cache
def architectures() -> dict[str, list[str]]:
    """Name of each architecture -> its classes, the one to try first in front; empty where transformers has none."""
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    families: dict[str, list[tuple[str, type[Any]]]] = defaultdict(list)
    for name, configuration in configuration_auto.CONFIG_MAPPING_NAMES.items():
        found = getattr(transformers, configuration)
        families[found.__module__.rpartition(".")[0]].append((name, found))
    tables = {n: t for n, t in vars(modeling_auto).items() if n.startswith("MODEL_") and n.endswith("_MAPPING_NAMES")}
    order = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in _TASKS]
    rest = [n for n in tables if n not in order and n != "MODEL_MAPPING_NAMES" and "BACKBONE" not in n]
    # MODEL_FOR_PRETRAINING mostly repeats the others, and the bare model and the backbone come last.
    order = [
        *order,
        *(n for n in rest if "PRETRAINING" not in n),
        "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
        "MODEL_MAPPING_NAMES",
        "MODEL_FOR_BACKBONE_MAPPING_NAMES",
    ]
    chosen: dict[str, list[str]] = {}
    for members in families.values():
        parts = {
            getattr(spec, "model_type", None)
            for _, found in members
            for spec in found.sub_configs_defaults.values()
            if getattr(spec, "model_type", None) != found.model_type
        }
        for name, _ in members:
            if name in parts:
                continue
            classes: list[str] = []
            for table in order:
                entry = tables.get(table, {}).get(name, ())
                classes += [entry] if isinstance(entry, str) else list(entry)
            chosen[name] = list(dict.fromkeys(classes))
    return {name: chosen[name] for name in sorted(chosen)}


def model_classes(name: str, known: list[str]) -> list[type[Any]]:
    """The classes of these names; where there are none, those of the module that take the architecture's configuration."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if known:
        return [getattr(transformers, each) for each in known]
    configuration = getattr(transformers, CONFIG_MAPPING_NAMES[name])
    module = importlib.import_module(configuration.__module__.replace("configuration_", "modeling_"))
    return [
        found
        for _, found in inspect.getmembers(module, inspect.isclass)
        if getattr(found, "config_class", None) is configuration and found.__module__ == module.__name__
    ]
