"""Loading and saving of a vision-language model's processor: its tokenizer and what turns pictures into tensors.

Pictures are resized by pillow in all runs: torchvision, which transformers prefers where it is installed, gives other
pixels. The part of a processor for videos is not loaded, because it needs torchvision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils.hub import cached_file

from rl4lms_like.core.model_weights import cannot_load, place_of
from rl4lms_like.system.errors import ModelError, require_extra

_PROCESSOR = "processor_config.json"
_VIDEO = "video_processor"
_VIDEO_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")
"""Files that have the settings for videos in checkpoints of earlier releases of transformers."""


def processor_class(model_config: PretrainedConfig) -> Any:
    """Return the class of a model's processor, as a subclass without the part for videos.

    Raises:
        ModelError: transformers has no processor for this family.
    """
    try:
        complete: Any = PROCESSOR_MAPPING[type(model_config)]
    except KeyError:
        raise ModelError(f"transformers has no processor for models of type {model_config.model_type!r}") from None
    return without_video_part(complete)


def without_video_part(complete: Any) -> Any:
    """Return a subclass of a processor's class that has no part for videos.

    Its `video_settings` are those of this part, which are saved with the processor; None without settings.
    """

    def get_attributes(cls: Any) -> list[str]:
        return [name for name in complete.get_attributes() if name != _VIDEO]

    # With the name of the class, which is saved with the processor.
    body = {"get_attributes": classmethod(get_attributes), "__module__": complete.__module__, "video_settings": None}
    return type(complete.__name__, (complete,), body)


def load_processor(model_name: str, model_config: PretrainedConfig, *, local_files_only: bool = False) -> Any:
    """Load the processor of a vision-language model.

    Raises:
        MissingExtraError: pillow is not installed.
        ModelError: it cannot be loaded.
    """
    require_extra("PIL", extra="vision", needed_by="a vision-language model")
    kind = processor_class(model_config)
    try:
        if _VIDEO in kind.__base__.get_attributes():
            kind.video_settings = _video_settings(model_name, local_files_only=local_files_only)
        return kind.from_pretrained(place_of(model_name), backend="pil", local_files_only=local_files_only)
    except Exception as error:
        raise ModelError(cannot_load("processor", model_name, error)) from error


def save_processor(processor: Any, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save a processor with a tokenizer, so that `AutoProcessor.from_pretrained(folder)` loads both.

    Args:
        processor: as `load_processor` returns it.
        folder: target folder.
        tokenizer: its tokenizer.
    """
    processor.tokenizer = tokenizer
    processor.save_pretrained(folder)

    # Where torchvision is installed, AutoProcessor loads all parts of a family's processor.
    video = processor.video_settings
    if video is not None:
        file = folder / _PROCESSOR
        settings = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**settings, _VIDEO: video}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _video_settings(model_name: str, *, local_files_only: bool) -> dict[str, Any] | None:
    """Return the settings of a checkpoint's part for videos; None if it has none."""
    options = {"local_files_only": local_files_only, "_raise_exceptions_for_missing_entries": False}
    for name in (_PROCESSOR, *_VIDEO_FILES):
        file = cached_file(place_of(model_name), name, **options)
        if file is None:
            continue
        settings = json.loads(Path(file).read_text(encoding="utf-8"))
        video = settings.get(_VIDEO) if name == _PROCESSOR else settings
        if video is not None:
            return dict(video)
    return None
