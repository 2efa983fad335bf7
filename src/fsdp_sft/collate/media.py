"""Refuse rows with images, videos or sounds, whose text would be trained without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_sft.errors import RowError

# Keys of rows and messages, as LLaVA, LLaMA-Factory, ms-swift, TRL and the docs of datasets name them.
_KEYS = ("image", "images", "video", "videos", "audio", "audios")
# Types of content parts, in OpenAI's and transformers' formats.
PARTS = (*_KEYS, "image_url", "video_url", "audio_url", "input_image", "input_audio")
# Keys that a processor adds to a tokenised row, for the vision or audio encoder of a model.
KEYS_OF_TOWERS = (
    "pixel_values",
    "pixel_values_videos",
    "pixel_values_images",
    "image_grid_thw",
    "video_grid_thw",
    "image_sizes",
    "input_features",
    "input_values",
    "audio_values",
)


def refuse_media(row: Mapping[Any, Any], where: str = "the row") -> None:
    """Refuse a row or message with an image, a video or a sound.

    Raises:
        RowError: If it has one that is not empty.
    """
    found = [key for key in (*_KEYS, *KEYS_OF_TOWERS) if key in row and not _is_empty(row[key])]
    if found:
        raise RowError(
            f"{where} has {' and '.join(map(repr, found))}: only text is encoded here, and the row would be "
            "trained without it. Leave the column out of the data set if the model is not to see it, or "
            "give train_step batches of the model's own processor",
            reason="media",
        )


def _is_empty(value: Any) -> bool:
    """Whether a value is null, False or blank, or holds nothing else, as in a row from an Arrow table."""
    if value is None or value is False:
        return True
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_empty, value))
    return isinstance(value, str | bytes) and not value.strip()
