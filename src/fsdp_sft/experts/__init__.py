"""The experts of a mixture: what computes them, and how many tokens each is given (``counter``)."""

import logging
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.experts import experts_forward, experts_implementation_of, switchable_experts
from fsdp_sft._compat.fsdp import compute_dtypes
from fsdp_sft._model.sharded import compute_device
from fsdp_sft._model.view import original_class, unwrapped
from fsdp_sft._ranks.agree import tell
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.experts.counter import (
    ExpertCounter as ExpertCounter,
    ExpertLoad as ExpertLoad,
    counter_of as counter_of,
    watch_experts as watch_experts,
)

_ALIGNED = 16  # a row of grouped_mm's operands must be a multiple of so many bytes
_logger = logging.getLogger("fsdp_sft.experts")


def prepare_experts(model: nn.Module, *, impl: str = "auto") -> str:
    """Compute a mixture's experts by an implementation that runs here and is as exact as plain products.

    transformers has several: ``"grouped_mm"``, its default, torch's product of all groups at once;
    ``"eager"``, one product per expert; ``"batched_mm"``, which copies an expert's weights for each token.
    The default is the fastest in most models, and does not suit all. ``"auto"`` leaves what transformers is
    set to, unless that is ``"grouped_mm"`` and one of these holds, in which case it takes ``"eager"``: the
    experts compute in float64, a width is not a multiple of 16 bytes in the compute dtype (torch raises for
    both), or experts have a bias each and compute on a CPU, where the bias's gradient is added up token by
    token in the compute dtype: with GPT-OSS's experts and 512 tokens its error is 8 times that of eager
    experts in bfloat16, and 2.4 times in float32. On a GPU that was not measured.

    Call it once, after the model is made and before the first step, with the same ``impl`` on all ranks.

    Args:
        model: Mixture of transformers, sharded or not. Only its config changes.
        impl: ``"auto"``, one of the names above, or another that is registered in transformers'
            ``ExpertsInterface``, such as ``"sonicmoe"`` or ``"deepgemm"``, which need their own kernels.

    Returns:
        The implementation that the model now runs; the reason is logged on the first rank.

    Raises:
        ValueError: If ``impl`` is unknown.
        UnsupportedModelError: If it has no experts, or some that transformers computes in one way only.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> tiny = MixtralConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2)
        >>> mixture = MixtralForCausalLM(tiny)
        >>> fs.prepare_experts(mixture)
        'grouped_mm'
        >>> fs.prepare_experts(mixture.double())
        'eager'
    """
    inner = unwrapped(model)
    name = original_class(inner).__name__
    modules: list[Any] = list(switchable_experts(inner).values())
    if not modules or not callable(getattr(inner, "set_experts_implementation", None)):
        raise UnsupportedModelError(
            f"{name} has no experts that transformers computes in several ways; leave prepare_experts out"
        )
    chosen = experts_implementation_of(modules[0]) if impl == "auto" else impl
    experts_forward(modules[0], chosen)  # raises for a name that transformers does not know
    unfit = _why_not_grouped(modules, inner) if impl == "auto" and chosen == "grouped_mm" else ""
    if unfit:
        chosen = "eager"
    if any(experts_implementation_of(module) != chosen for module in modules):
        inner.set_experts_implementation(chosen)  # type: ignore[operator]
    if any(experts_implementation_of(module) != chosen for module in modules):
        raise UnsupportedModelError(
            f"transformers does not let {name} compute its experts by {chosen!r}; leave prepare_experts out"
        )
    why = unfit or ("transformers is set to it" if impl == "auto" else "as was asked")
    tell(_logger, "experts of %s: %s; %s", name, chosen, why)
    return chosen


def _why_not_grouped(modules: list[Any], model: nn.Module) -> str:
    """Why ``grouped_mm`` does not suit the experts; empty if it does."""
    dtypes = compute_dtypes(model)
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    if torch.float64 in dtypes:
        return "grouped_mm takes no float64"
    parameters = [p for module in modules for p in module.parameters(recurse=False)]
    widths = sorted({width for p in parameters if p.ndim == 3 for width in p.shape[-2:]})
    odd = [width for width in widths if width * narrow.itemsize % _ALIGNED]
    if odd:
        return f"grouped_mm takes widths of multiples of {_ALIGNED} bytes, and {odd} in {narrow} are none"
    if any(p.ndim == 2 for p in parameters) and compute_device(model).type == "cpu":
        return f"grouped_mm adds up the gradients of the experts' biases token by token in {narrow} on a CPU"
    return ""
