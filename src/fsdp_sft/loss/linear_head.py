"""A head as one product, ``hidden @ weight.T + bias``: a linear layer, or what peft trains in its place.

peft trains a copy of a head (``modules_to_save``) or some of its rows (``trainable_token_indices``), which is
one product again. A head with LoRA gets full logits.
"""

from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.compile import is_compiled
from fsdp_sft._compat.models import original_class


def why_not_linear(head: nn.Module) -> str:
    """Why ``head_operands`` cannot express a head as one product; empty if it can."""
    own = _inside(head)
    for module in (head, own):
        if "forward" in vars(module) or is_compiled(module):
            return f"its head is not a plain nn.Linear: the forward of {_name(module)} is replaced"
    reason = _why_not_plain(own.base_layer if _trains_tokens(own) else own)
    return reason and f"its head is not a plain nn.Linear: {reason}"


def head_operands(head: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight ``(V, H)``, bias ``(V,)`` or None), connected to the trained parameters of a linear ``head``.

    Call it while the head's parameters are gathered.
    """
    own: Any = _inside(head)
    if _trains_tokens(own):
        base = own.base_layer
        if own.disable_adapters or own.merged or not own.active_adapters:
            return base.weight, base.bias
        # peft's layer for trained tokens leaves the bias out too.
        return own.get_merged_weights(own.active_adapters), None
    return own.weight, own.bias


def num_logits(head: nn.Module) -> int:
    """Number of logits of a token, which is the number of rows of the head's weight."""
    own: Any = _inside(head)
    return int(getattr(own, "base_layer", own).weight.shape[0])


def _inside(head: nn.Module) -> Any:
    """The layer that computes: the one that peft's wrapper calls now, or the head itself."""
    if not _is_of_peft(head, "AuxiliaryTrainingWrapper"):
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


def _trains_tokens(module: nn.Module) -> bool:
    """Whether a module is peft's layer of which some rows are trained."""
    return _is_of_peft(module, "TrainableTokensLayer")


def _is_of_peft(module: nn.Module, name: str) -> bool:
    """Whether ``module`` is of peft's class ``name``; peft is not imported to find out."""
    return any(cls.__name__ == name and cls.__module__.startswith("peft.") for cls in type(module).__mro__)


def _why_not_plain(module: nn.Module) -> str:
    """Why a module is not a plain ``nn.Linear``; empty if it is."""
    cls = original_class(module)
    if cls.forward is not nn.Linear.forward or "forward" in vars(module):
        return f"it computes something else ({cls.__module__}.{cls.__name__})"
    others = {name for name, _ in module.named_parameters()} - {"weight", "bias"}
    return f"it has parameters of its own: {', '.join(sorted(others))}" if others else ""


def _name(module: nn.Module) -> str:
    """Class name of a module, as it was before it was sharded."""
    return original_class(module).__name__
