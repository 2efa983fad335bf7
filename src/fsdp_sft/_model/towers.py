"""Vision and audio towers of a multimodal model: the modules that training on text does not use."""

import logging
import re
from typing import Any

from torch import nn

from fsdp_sft._model.view import base_of, record_of, unwrapped
from fsdp_sft._ranks.agree import tell

_logger = logging.getLogger(__name__)


def towers_of(model: nn.Module) -> list[str]:
    """FQNs of the outermost modules of a multimodal model that text does not pass through.

    These are the modules of its base model, such as a vision tower and the projector after it, that have no
    parameter of the text decoder or of the embeddings. Empty for a model of text alone, with an encoder or
    without.
    """
    inner: Any = base_of(unwrapped(model))
    config = getattr(inner, "config", None)
    if config is None or not hasattr(config, "get_text_config") or not hasattr(inner, "get_decoder"):
        return []
    if getattr(config, "is_encoder_decoder", False) or config.get_text_config(decoder=True) is config:
        return []
    base = getattr(inner, "base_model", inner)
    text = [inner.get_decoder(), inner.get_input_embeddings(), inner.get_output_embeddings()]
    used = {id(p) for module in text if module is not None for p in module.parameters()}
    if all(id(p) in used for p in base.parameters()):
        return []
    prefix = next(f"{name}." if name else "" for name, module in inner.named_modules() if module is base)
    return [prefix + name for name in _outermost(base, used)]


def _outermost(module: nn.Module, used: set[int]) -> list[str]:
    """Names of the outermost modules within one that have parameters, none of them among those used."""
    found = []
    for name, child in module.named_children():
        own = {id(p) for p in child.parameters()}
        if own and not own & used:
            found.append(name)
        elif own - used:
            found += [f"{name}.{inner}" for inner in _outermost(child, used)]
    return found


def freeze_towers(model: nn.Module) -> list[str]:
    """Freeze the vision and audio towers of a multimodal model, which training on text does not use.

    Call it before ``add_adapters``, which then puts no adapters into them, and before ``shard_model``, whose
    ``frozen_dtype`` their shards are stored in. A frozen tower still runs if a batch has images, and their
    loss trains the text model alone. Nothing happens to a model of text alone, and nothing to experts of
    images within the blocks (ERNIE-VL), which text gives no gradients.

    Args:
        model: A transformers model, materialised or on the meta device; not sharded.

    Returns:
        FQNs of what was frozen: towers and the projectors after them.

    Example:
        >>> model = fs.build_meta_model(path)
        >>> fs.freeze_towers(model)  # a LLaVA: ['model.vision_tower', ...]
        []
    """
    names = towers_of(model)
    if not names:
        return []
    inner = base_of(unwrapped(model))
    for name in names:
        inner.get_submodule(name).requires_grad_(False)
    record_of(inner).frozen_towers = tuple(names)
    tell(_logger, "%s: %s frozen", type(inner).__name__, " and ".join(names))
    return names


def frozen_towers(model: nn.Module) -> tuple[str, ...]:
    """FQNs of the towers that ``freeze_towers`` has frozen."""
    return record_of(base_of(unwrapped(model))).frozen_towers


def pattern_of(names: tuple[str, ...]) -> str:
    """A regular expression that the FQNs of all within these modules match as a whole, and no others."""
    if not names:
        return r"(?!)"
    return rf"(.*\.)?({'|'.join(map(re.escape, names))})(\..*)?"
