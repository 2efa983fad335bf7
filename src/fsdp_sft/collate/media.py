"""Images, videos and sounds in rows: refused by name, since the rest would be trained as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_sft.errors import MediaError

# As LLaVA, LLaMA-Factory, ms-swift, TRL and the docs of datasets name them; in rows and in messages.
_KEYS = ("image", "images", "video", "videos", "audio", "audios")
# Of content parts, in OpenAI's and transformers' forms.
PARTS = (*_KEYS, "image_url", "video_url", "audio_url", "input_image", "input_audio")
# What a processor adds to a tokenised row for the towers of a model.
_OF_TOWERS = (
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
    """Raise for a row or a message that has an image, a video or a sound; empty ones are let pass.

    Raises:
        MediaError: If it has one.
    """
    found = [key for key in (*_KEYS, *_OF_TOWERS) if key in row and not _is_empty(row[key])]
    if found:
        raise MediaError(
            f"{where} has {' and '.join(map(repr, found))}: only text is encoded here, and the row would be "
            "trained without it. Leave the column out of the data set if the model is not to see it, or "
            "give train_step batches of the model's own processor"
        )


def _is_empty(value: Any) -> bool:
    """Whether a value says that there is nothing, as each null of an Arrow table does."""
    if value is None or value is False:
        return True
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_empty, value))
    return isinstance(value, str | bytes) and not value.strip()
