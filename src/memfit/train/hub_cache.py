"""Models of the Hugging Face Hub that have been downloaded to this computer. Nothing is asked of the network."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FILES: Final = ("config.json", "tokenizer_config.json", "tokenizer.json")  # of which a model or a tokenizer has one


def in_cache(name: str) -> Path | None:
    """The folder that `hf download` or `from_pretrained` has left of a model in the Hub's cache, by its name there; None where there is none."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = [try_to_load_from_cache(name, file) for file in _FILES]
    except HFValidationError:  # a path, which is no such name
        return None
    return next((Path(file).parent for file in found if isinstance(file, str)), None)
