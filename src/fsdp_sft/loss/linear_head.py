"""A head as one product, ``hidden @ weight.T + bias``: a linear layer, or one with peft's adapters.

The adapters of a language model's head change its weight (DoRA, trained tokens), replace it
(``modules_to_save``) or add a product of low rank (LoRA). Each is again one product: that of LoRA has a few
more columns, ``[h, s A h] @ [W, B].T = h W.T + s A h B.T``.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.compile import is_compiled
from fsdp_sft._compat.models import original_class


@dataclass(frozen=True)
class HeadProduct:
    """The operands of a head's computation, ``hidden @ weight.T + bias``.

    Attributes:
        hidden: Hidden states ``(B, S, H)``; with LoRA of rank r ``(B, S, H + r)``.
        weight: ``(V, H)`` or ``(V, H + r)``, connected to the trained parameters.
        bias: ``(V,)`` or None.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


def why_not_linear(head: nn.Module) -> str:
    """Why ``head_product`` cannot express a head as one product; empty if it can."""
    own = _inside(head)
    for module in (head, own):
        if "forward" in vars(module) or is_compiled(module):
            return f"its head is not a plain nn.Linear: the forward of {_name(module)} is replaced"
    if _is_kind(own, "lora"):
        reason = _why_not_lora(own)
    elif _is_kind(own, "tokens"):
        reason = _why_not_plain(own.base_layer)
    else:
        reason = _why_not_plain(own)
    return reason and f"its head is not a plain nn.Linear: {reason}"


def head_product(head: nn.Module, hidden: torch.Tensor) -> HeadProduct:
    """The product that ``head`` computes for ``hidden``; call it while the head's parameters are gathered.

    Args:
        head: Head for which ``why_not_linear`` gives no reason.
        hidden: Hidden states ``(B, S, H)``.
    """
    own: Any = _inside(head)
    if _is_kind(own, "lora"):
        return _lora_product(own, hidden)
    if _is_kind(own, "tokens"):
        base = own.base_layer
        if own.disable_adapters or own.merged or not own.active_adapters:
            return HeadProduct(hidden, base.weight, base.bias)
        # peft's layer for trained tokens leaves the bias out too.
        return HeadProduct(hidden, own.get_merged_weights(own.active_adapters), None)
    return HeadProduct(hidden, own.weight, own.bias)


def num_logits(head: nn.Module) -> int:
    """Number of logits of a token, which is the number of rows of the head's weight."""
    own: Any = _inside(head)
    return int(getattr(own, "base_layer", own).weight.shape[0])


def _inside(head: nn.Module) -> Any:
    """The layer that computes: the one that peft's wrapper calls now, or the head itself."""
    if not _is_kind(head, "wrapper"):
        return head
    wrapper: Any = head
    if hasattr(wrapper, "token_adapter"):
        return wrapper.token_adapter
    known = getattr(wrapper, "modules_to_save", None)
    if known is None:
        return wrapper
    active = wrapper.active_adapters
    if wrapper.disable_adapters or not active or any(name not in known for name in active):
        return wrapper.original_module
    return known[active[0]]


def _is_kind(module: nn.Module, kind: str) -> bool:
    """Whether ``module`` is one of peft's ``"lora"``, ``"tokens"`` or ``"wrapper"`` classes.

    If peft has not been imported it cannot be, and peft is not imported to find out.
    """
    if "peft" not in sys.modules:
        return False
    from peft.tuners.lora import Linear
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds: dict[str, Any] = {"lora": Linear, "tokens": TrainableTokensLayer}
    cls = original_class(module)
    return issubclass(cls, AuxiliaryTrainingWrapper) if kind == "wrapper" else cls is kinds[kind]


def _why_not_plain(module: nn.Module) -> str:
    """Why a module is not a plain ``nn.Linear``; empty if it is."""
    cls = original_class(module)
    if cls.forward is not nn.Linear.forward or "forward" in vars(module):
        return f"it computes something else ({_name(module)})"
    others = {name for name, _ in module.named_parameters()} - {"weight", "bias"}
    return f"it has parameters of its own: {', '.join(sorted(others))}" if others else ""


def _why_not_lora(layer: Any) -> str:
    """Why a LoRA layer of peft cannot be expressed as one product; empty if it can."""
    if layer.disable_adapters and layer.merged:
        return "its adapters are merged and disabled at once"
    if layer.fan_in_fan_out:
        return "its weight is stored transposed"
    active = _active(layer)
    for name in active:
        variant = layer.lora_variant.get(name)
        if variant is None:
            continue
        if type(variant).__name__ != "DoraLinearVariant":
            return f"its adapter {name!r} is a {type(variant).__name__}"
        if len(active) > 1:
            return "it has DoRA beside other adapters"
        if layer.lora_B[name].bias is not None:
            return "it has DoRA with a bias"
        if layer.training and not isinstance(layer.lora_dropout[name], nn.Identity):
            return "it has DoRA with dropout"
    return _why_not_plain(layer.base_layer)


def _lora_product(layer: Any, hidden: torch.Tensor) -> HeadProduct:
    """The product of a linear layer with its active LoRA or DoRA adapters."""
    weight, bias = layer.base_layer.weight, layer.base_layer.bias
    hiddens, weights = [hidden], [weight]
    for name in _active(layer):
        low, high, scaling = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
        reduced = low(layer.lora_dropout[name](hidden.to(low.weight.dtype))) * scaling
        hiddens.append(reduced.to(hidden.dtype))
        weights.append(high.weight.to(weight.dtype))
        if high.bias is not None:
            added = (high.bias * scaling).to(weight.dtype)
            bias = added if bias is None else bias + added
    joined = HeadProduct(torch.cat(hiddens, -1), torch.cat(weights, 1), bias)
    dora = [name for name in _active(layer) if name in layer.lora_variant]
    return _with_magnitude(layer, dora[0], joined) if dora else joined


def _with_magnitude(layer: Any, name: str, product: HeadProduct) -> HeadProduct:
    """The product with each row of its weight scaled to the norm that DoRA has learned for it."""
    low, high = layer.lora_A[name].weight, layer.lora_B[name].weight
    dora, base = layer.lora_magnitude_vector[name], layer.base_layer
    with torch.no_grad():  # DoRA treats the current norms as constants (section 4.3 of arXiv:2402.09353)
        lengths = dora.get_weight_norm(base.weight, high @ low, layer.scaling[name])
    factor = (dora.weight / lengths).to(product.weight.dtype)
    return HeadProduct(product.hidden, product.weight * factor[:, None], product.bias)


def _active(layer: Any) -> list[str]:
    """Names of the adapters that the layer applies now."""
    if layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _name(module: nn.Module) -> str:
    """Class name of a module, as it was before it was sharded."""
    return original_class(module).__name__
