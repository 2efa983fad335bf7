"""A model's forward: what it takes, its ids too, how exact it is, and forwards that leave no trace."""

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.fsdp import compute_dtypes
from fsdp_sft._model.sharded import compute_device
from fsdp_sft._model.twin import text_config
from fsdp_sft._model.view import base_of, named_tensors, reshard, unwrapped
from fsdp_sft._process.generators import unmoved
from fsdp_sft.errors import BatchError


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Parameters of a model's forward; with adapters those of the inner model, which peft passes on."""
    return inspect.signature(base_of(unwrapped(model)).forward).parameters


def no_cache(model: nn.Module) -> dict[str, Any]:
    """Arguments that turn the cache of a model's forward off, if it has one.

    Training needs none, and with a cache transformers does not separate the rows of a pack. Models of text
    and images pass the argument on to their text model without naming it.
    """
    taken = forward_parameters(model)
    if "use_cache" not in taken and any(p.kind == p.VAR_KEYWORD for p in taken.values()):
        inner = text_model(model)
        taken = {} if inner is None else forward_parameters(inner)
    return {"use_cache": False} if "use_cache" in taken else {}


def spread_positions(model: nn.Module) -> None:
    """Let a text model with rotary positions of several axes (time, height, width) take those of text.

    It finds the rows of a pack by a further row before those of the axes: ``position_ids`` (4, B, S). Given
    (B, S), Qwen2.5-VL, GLM-4V and others of transformers 5.23 rotate as they should and join the rows;
    Qwen3-VL spreads them so itself. A second call adds nothing.
    """
    inner, rotary = text_model(model), getattr(text_config(model), "rope_parameters", None)
    axes = len(rotary.get("mrope_section") or ()) if isinstance(rotary, dict) else 0
    if inner is not None and axes:
        inner.register_forward_pre_hook(partial(_spread, axes + 1), with_kwargs=True)


def text_model(model: nn.Module) -> nn.Module | None:
    """The text model inside a transformers model; None if it says none."""
    find = getattr(base_of(unwrapped(model)), "get_decoder", None)
    found = find() if callable(find) else None
    return found if isinstance(found, nn.Module) else None


def _spread(rows: int, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook before the text model's forward."""
    positions = kwargs.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2:
        return None
    return args, {**kwargs, "position_ids": positions.expand(rows, *positions.shape)}


@contextmanager
def probed(model: nn.Module) -> Iterator[None]:
    """Context of forwards that leave a model as it was: in eval mode, without gradients, uncompiled.

    It restores the mode of each module, its buffers and their contents, its attributes that are plain values
    or tensors, and the random number generators of the model's devices and of the host. New attributes of
    these kinds are removed: dynamic RoPE, for instance, stores the length of the longest row so far as a
    0-dim tensor, which changes later rows. A sharded model is resharded, before and after.
    """
    reshard(model)
    devices = {tensor.device for tensor in named_tensors(model).values()} | {compute_device(model)}
    found = [(module, _plain(module), dict(module._buffers)) for module in model.modules()]
    contents = [
        (tensor, tensor.detach().clone())
        for _, plain, buffers in found
        for tensor in (*plain.values(), *buffers.values())
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta
    ]
    try:
        # Shapes of probes never come again. set_stance takes effect when it is called, so that nothing may
        # fail between it and its block; importing dynamo takes seconds, where nobody has compiled anything.
        with (
            unmoved(devices),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext(),
        ):
            model.eval()
            yield
    finally:
        for module, plain, buffers in found:
            for name in _plain(module).keys() - plain.keys():
                del vars(module)[name]
            vars(module).update(plain)
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, content in contents:
                if not torch.equal(tensor, content):
                    tensor.copy_(content)
        reshard(model)


def _plain(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are plain values or tensors."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | complex | str | torch.Tensor | None)
    }


# How far logits of two forwards may differ that would be equal in exact arithmetic.

# Relative to the size of the logits. Rounding errors grow with the square root of the depth: with three
# random blocks logits differ by 2 epsilons in bfloat16 (1.4e-2), with 80 blocks they would by 10.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
_TF32_TOLERANCE = 1e-2


def logits_tolerance(model: nn.Module, device: torch.device) -> float:
    """The tolerance for the dtypes in which a model computes on ``device``, relative to the logits' size."""
    dtypes = compute_dtypes(model)
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    tolerance = max((TOLERANCES[d] for d in dtypes if d in TOLERANCES), default=TOLERANCES[torch.bfloat16])
    # This setting makes cuBLAS compute float32 products in TF32. Other devices stay with float32.
    if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        tolerance = max(tolerance, _TF32_TOLERANCE)
    return tolerance


# The token ids for which a model has rows. Batches with others are refused: a GPU would end the process.

# Names in a config of ids for images and the like, which a multimodal model replaces before it looks up
# embeddings.
_PLACEHOLDER = re.compile(r"(image|video|audio|vision|speech)\w*token\w*(id|index)$|^(boi|eoi)_token")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def check_ids(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Refuse ``input_ids`` for which the embedding of a transformers model has no row.

    Ids of images and the like in the model's config are never looked up.

    Raises:
        BatchError: For the first such id; the message names it, its place and the ids that exist.
    """
    rows = rows_of(model, "get_input_embeddings", nn.Embedding)
    if rows is not None:
        _check("input_ids", batch.get("input_ids"), rows, model, partial(_placeholders, model))


def check_labels(model: nn.Module, batch: Mapping[str, Any], keys: Collection[str], ignored: int) -> None:
    """Refuse labels that are neither ``ignored`` nor the index of one of the rows of a model's head.

    Raises:
        BatchError: For the first such label; the message names it, its place and the ids that exist.
    """
    rows = rows_of(model, "get_output_embeddings", nn.Linear)
    if rows is not None:
        for key in keys:
            _check(key, batch.get(key), rows, model, lambda: {ignored})


def rows_of(model: nn.Module, getter: str, kind: type[nn.Module]) -> int | None:
    """Rows of the layer that ``getter`` of a transformers model returns; None if it has none.

    Nothing is computed: layers with adapters would merge their weights when asked for them, so only the
    layers inside are read.
    """
    inner: Any = unwrapped(model)
    try:
        layer = getattr(inner, getter)()
    except (NotImplementedError, AttributeError):
        return None
    while isinstance(layer, nn.Module) and not isinstance(layer, kind):
        names = ("original_module", "token_adapter", "base_layer")
        layer = next((layer._modules[name] for name in names if layer._modules.get(name) is not None), None)
    return int(layer.weight.shape[0]) if layer is not None else None


def _placeholders(model: nn.Module) -> set[int]:
    """Ids of images and the like in a model's config."""
    config: Any = getattr(unwrapped(model), "config", None)
    fields = config.to_dict() if hasattr(config, "to_dict") else {}
    return {value for key, value in fields.items() if isinstance(value, int) and _PLACEHOLDER.search(key)}


def _check(name: str, ids: Any, rows: int, model: nn.Module, allowed: Callable[[], Collection[int]]) -> None:
    """Raise BatchError for the first id that is neither a row nor allowed."""
    if not isinstance(ids, torch.Tensor) or ids.dtype not in _INTEGERS or not ids.numel():
        return
    outside = (ids < 0) | (ids >= rows)
    for value in allowed() if bool(outside.any()) else ():
        outside &= ids != value
    if not bool(outside.any()):
        return
    place = [int(index) for index in outside.nonzero()[0]]
    axes = ["row", *["index"] * (len(place) - 2), "position"][-len(place) :]
    where = ", ".join(f"{axis} {index}" for axis, index in zip(axes, place, strict=True))
    raise BatchError(
        f"{name} has {int(ids[tuple(place)])} ({where}), and "
        f"{type(unwrapped(model)).__name__.removeprefix('FSDP')} has rows for the ids 0 to {rows - 1}: "
        + (
            "is the tokenizer that of this model? For tokens added to it load with "
            "new_vocab_size=len(tokenizer)"
            if name == "input_ids"
            else "a label is an id, or -100 where nothing is trained; for another one pass loss_fn and "
            "count_fn"
        )
    )
