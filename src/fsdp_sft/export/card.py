"""The model card of an export, which the Hub shows: where the model comes from and how to load it."""

import re
from pathlib import Path
from typing import Any

import torch

from fsdp_sft._model.record import kept_of
from fsdp_sft._quantised.settings import Quantised

_AUTO_CLASSES = {
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForConditionalGeneration": ("AutoModelForSeq2SeqLM", None),
}


def model_card(model: Any, name: str, architecture: str, dtype: torch.dtype) -> str:
    """A model card in Markdown, with the Hub's metadata at its head.

    Args:
        model: A transformers model.
        name: Title of the card, and the name in its example of loading the model.
        architecture: Name of the model's class.
        dtype: Dtype of the exported tensors.
    """
    from fsdp_sft import __version__

    auto, task, reader = _classes(getattr(model.config, "model_type", ""), architecture)
    base = _hub_id(model.name_or_path)
    metadata = ["library_name: transformers"]
    metadata += [f"pipeline_tag: {task}"] if task else []
    metadata += [f"base_model: {base}"] if base else []
    origin = f", fine-tuned from [{base}](https://huggingface.co/{base})" if base else ", fine-tuned"
    quantised = kept_of(model, Quantised)
    if quantised is not None:
        origin += f", of which the checkpoint is published quantised ({quantised.method}),"
    lines = [
        "---",
        *metadata,
        "tags:",
        "- sft",
        "---",
        "",
        f"# {name}",
        "",
        f"`{architecture}` of {model.num_parameters():,} parameters in {str(dtype).removeprefix('torch.')}"
        f"{origin} and exported with fsdp_sft {__version__}.",
        "",
        "```python",
        f"from transformers import {auto}, {reader}",
        "",
        f'model = {auto}.from_pretrained("{name}")',
        f'{reader.removeprefix("Auto").lower()} = {reader}.from_pretrained("{name}")',
        "```",
        "",
    ]
    return "\n".join(lines)


def _classes(model_type: str, architecture: str) -> tuple[str, str | None, str]:
    """The classes that load a model and what makes its inputs, and the Hub's name of its task."""
    from transformers.models.auto import modeling_auto

    if modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type) == architecture:
        return "AutoModelForImageTextToText", "image-text-to-text", "AutoProcessor"
    auto, task = next((v for k, v in _AUTO_CLASSES.items() if architecture.endswith(k)), ("AutoModel", None))
    return auto, task, "AutoTokenizer"


def _hub_id(name_or_path: str) -> str | None:
    """The name if it looks like a Hub id and is no existing path, else None."""
    looks_like = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name_or_path or "")
    return name_or_path if looks_like and not Path(name_or_path).exists() else None
