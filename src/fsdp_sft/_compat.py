"""Every private name of torch and transformers that the library touches, each with its reason."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def is_gradient_checkpointing_layer(module: nn.Module) -> bool:
    """Whether transformers can checkpoint this block by the block's own flag.

    ``GradientCheckpointingLayer`` is documented but not exported from the package root. It is looked up by
    name among the bases, so that a model from elsewhere does not make us import transformers.
    """
    return any(
        base.__name__ == "GradientCheckpointingLayer" and base.__module__ == "transformers.modeling_layers"
        for base in type(module).__mro__
    )


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer below ``module`` by ``function`` of it.

    ``nn.Module._apply`` is what ``.to()`` runs on; there is no public form that takes a function. FSDP2
    overrides it to take up the new shards, which makes it the supported way to change a shard's dtype.
    """
    module._apply(function)


def keep_in_float32_patterns(model: nn.Module) -> tuple[set[str], set[str]]:
    """Name patterns that transformers keeps in float32: under float16 only, and under bfloat16 too.

    ``_keep_in_fp32_modules`` and ``_keep_in_fp32_modules_strict`` are class attributes with no public
    reader; see ``PreTrainedModel`` in transformers' ``modeling_utils.py``.
    """

    def collected(attribute: str) -> set[str]:
        names: set[str] = set()
        for module in model.modules():
            value: Any = getattr(module, attribute, None)
            names.update([value] if isinstance(value, str) else value or ())
        return names

    return collected("_keep_in_fp32_modules"), collected("_keep_in_fp32_modules_strict")


# --- chat templates ---------------------------------------------------------------------------------------


def render_chat(
    template: str,
    messages: list[dict[str, Any]],
    *,
    special_tokens: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Render one conversation in transformers' sandbox.

    ``render_jinja_template`` is what ``apply_chat_template`` calls, but only the former hands out the
    character spans of ``{% generation %}`` blocks.

    Returns:
        (text, character spans of the generation blocks; empty for a template without them).
    """
    import re

    from transformers.utils.chat_template_utils import render_jinja_template

    # Asking for spans of a template without the tag logs a warning.
    tagged = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
    render: Any = render_jinja_template  # its annotation says that a str comes back; a pair does, up to 5.23
    texts, spans = render(
        [messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=tagged,
        add_generation_prompt=add_generation_prompt,
        **special_tokens,
    )
    return texts[0], [(int(start), int(end)) for start, end in (spans[0] if tagged else ())]


# --- export -----------------------------------------------------------------------------------------------


def revert_weight_conversion(
    model: nn.Module, state_dict: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Names and tensors as a checkpoint on the Hub has them, from those that the model has.

    ``save_pretrained`` does this between gathering and writing, and offers no way to do it for a part of
    the model. Returns ``state_dict`` itself if the architecture has no conversions.

    Args:
        model: An unsharded model: conversions are looked up by its class, which FSDP2 replaces.
        state_dict: Model names to tensors, which may be on the meta device.
    """
    from transformers.core_model_loading import revert_weight_conversion as revert

    reverted: dict[str, torch.Tensor] = revert(model, state_dict)  # type: ignore[arg-type]
    return reverted


def copy_weight_conversions(source: nn.Module, target: nn.Module) -> None:
    """Let ``target`` be saved in the format that ``source`` was loaded from.

    ``from_pretrained`` leaves what it converted in ``_weight_conversions``, which only saving reads.
    """
    conversions = getattr(source, "_weight_conversions", None)
    if conversions is not None:
        target._weight_conversions = conversions


def names_left_out_on_save(model: nn.Module) -> tuple[set[str], set[str]]:
    """(names that ``save_pretrained`` never writes, patterns of tied names that it leaves out).

    ``_keys_to_ignore_on_save`` and ``_tied_weights_keys`` are class attributes with no public reader; see
    ``remove_tied_weights_from_state_dict`` in transformers' ``modeling_utils.py``.
    """
    ignored: Any = getattr(model, "_keys_to_ignore_on_save", None) or ()
    tied: set[str] = set()
    for prefix, module in model.named_modules():
        keys: Any = getattr(module, "_tied_weights_keys", None) or ()
        tied.update(f"{prefix}.{key}" if prefix else key for key in keys)
    return set(ignored), tied
