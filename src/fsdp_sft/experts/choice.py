"""Choose the implementation of a mixture's experts: once, with a logged reason, and the same on all ranks."""

import logging
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat import (
    compute_dtypes,
    experts_forward,
    experts_implementation_of,
    original_class,
    switchable_experts,
)
from fsdp_sft._wrappers import unwrapped
from fsdp_sft.distributed import compute_device, mesh_of, sum_over_mesh
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.experts.trial import MOST_BYTES, Kind, Stopwatch, copied_bytes, errors, kinds_of

IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
_LARGEST_ERROR = 2.0  # largest error of an implementation, divided by that of eager experts
_ROUNDS = 5  # timed forwards and backwards of each implementation
# Another implementation must take at most this share of the present one's time. A smaller difference is
# noise, by which each run would choose another.
_CLEARLY = 0.95
_logger = logging.getLogger("fsdp_sft.experts")


def prepare_experts(model: nn.Module, *, impl: str = "auto", tokens: int = 4096) -> str:
    """Compute a mixture's experts by the fastest implementation that is as exact as plain matrix products.

    transformers has several implementations: ``"eager"``, one product per expert; ``"grouped_mm"``, torch's
    product of all groups at once; ``"batched_mm"``, which copies an expert's weights for each token. The
    fastest depends on widths, number of experts and device, and some do not run at all for a dtype or a
    width. Each is tried, forward and backward, on random experts of the model's widths and compute dtype.
    First its output and gradients must be within twice the error of eager experts in that dtype; the error is
    measured against eager experts in a wider dtype. Then it is timed. The present implementation stays unless
    another is at least 5 % faster.

    Call it once, after the model is loaded and sharded and before the first step. Times are those of eager
    code. To make a resumed run repeat the bits, pass the name that the first run has logged as ``impl``.

    Args:
        model: Mixture of transformers with its weights, sharded or not. Only its config changes.
        impl: ``"auto"``, one of the names above, or another that is registered in transformers'
            ``ExpertsInterface`` (its ``"sonicmoe"`` and ``"deepgemm"`` need kernels of their own, and are
            chosen only by name).
        tokens: Number of tokens in a micro-batch of one rank, filler included, for which times are taken.

    Returns:
        The implementation that the model now runs. The reason, with times and errors, is logged on the first
        rank.

    Raises:
        ValueError: If the model has no experts or is on the meta device, if ``impl`` is unknown, or if
            ``tokens`` is below 1.
        UnsupportedModelError: If ``impl`` names an implementation that fails here, is not exact enough, or
            would copy more than 0.5 GiB of weights in each layer; or if transformers computes the model's
            experts in one way only.

    Collective: all ranks of the model's mesh.
    Memory: On the compute device, while it runs, up to about 6 GiB for experts as large as Mixtral's (two of
        them in float32, with their gradients); some MiB for narrow ones.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> tiny = MixtralConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2)
        >>> mixture = MixtralForCausalLM(tiny)
        >>> fs.prepare_experts(mixture, tokens=64) in ("eager", "grouped_mm", "batched_mm")
        True
        >>> fs.prepare_experts(mixture, impl="grouped_mm")
        'grouped_mm'
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens must be an integer of at least 1, got {tokens!r}")
    inner = unwrapped(model)
    name = original_class(inner).__name__
    modules = _experts_of(inner, name)
    if any(p.is_meta for p in inner.parameters()):
        raise ValueError(f"{name} has parameters on the meta device: load its weights first")
    present = experts_implementation_of(modules[0])
    dtype = min(compute_dtypes(inner), key=lambda dtype: dtype.itemsize)
    if dtype.itemsize < 2:
        raise UnsupportedModelError(f"the experts of {name} compute in {dtype}, which is not compared here")
    kinds = kinds_of(modules, _top_k(inner))
    mesh = mesh_of(inner)
    trials = _Trials(kinds, dtype, compute_device(inner), tokens, lambda v: sum_over_mesh(v, mesh))
    if impl == "auto":
        chosen = trials.fastest([present, *(i for i in IMPLEMENTATIONS if i != present)])
    else:
        reason = trials.why_not(impl)
        if reason:
            raise UnsupportedModelError(
                f"the experts of {name} cannot be computed by impl={impl!r}: {reason}"
            )
        chosen = impl
    _set(inner, modules, chosen, name)
    if mesh is None or mesh.get_rank() == 0:
        _logger.info("experts of %s: %s in %s on %s; %s", name, chosen, dtype, trials.device, trials)
    return chosen


def _experts_of(model: nn.Module, name: str) -> list[Any]:
    """The modules whose experts transformers can compute in several ways; raises if there are none."""
    modules = list(switchable_experts(model).values())
    if modules and callable(getattr(model, "set_experts_implementation", None)):
        return modules
    if modules or any(hasattr(module, "num_experts") for module in model.modules()):
        raise UnsupportedModelError(
            f"transformers has one way only to compute the experts of {name}; leave prepare_experts out"
        )
    raise ValueError(f"prepare_experts needs a mixture of experts, {name} has none")


def _top_k(model: nn.Module) -> int:
    """Number of experts that a token is sent to, by the config or an attribute of a router; 2 if neither."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    said = [text, *model.modules()]
    found = (getattr(one, key, None) for one in said for key in ("num_experts_per_tok", "top_k"))
    return next((value for value in found if isinstance(value, int)), 2)


def _set(model: Any, modules: list[Any], chosen: str, name: str) -> None:
    """Let all experts run the chosen implementation; raises if transformers does not allow it."""
    if any(experts_implementation_of(module) != chosen for module in modules):
        model.set_experts_implementation(chosen)
    if any(experts_implementation_of(module) != chosen for module in modules):
        raise UnsupportedModelError(
            f"transformers does not let {name} compute its experts by {chosen!r}; leave prepare_experts out"
        )


class _Trials:
    """Errors, times and reasons found for each implementation; ``str`` of it is for the log.

    Each public method is collective: a failure on one rank counts for all, and times are summed over ranks.
    """

    def __init__(
        self,
        kinds: list[Kind],
        dtype: torch.dtype,
        device: torch.device,
        tokens: int,
        over_ranks: Callable[[list[float]], list[float]],
    ) -> None:
        self.kinds, self.dtype, self.device, self.tokens = kinds, dtype, device, tokens
        self.over_ranks = over_ranks
        self.error: dict[str, float] = {}
        self.reasons: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def why_not(self, implementation: str) -> str:
        """Why an implementation cannot be chosen; empty if it can.

        Raises:
            ValueError: If no implementation has that name.
        """
        experts_forward(self.kinds[0].module, implementation)
        reason = self._try(implementation)
        failed = sum(self.over_ranks([float(bool(reason))]))
        if failed and not reason:
            reason = f"{int(failed)} other ranks of the mesh could not"
        if reason:
            self.reasons[implementation] = reason
        return reason

    def _try(self, implementation: str) -> str:
        """Why an implementation cannot be chosen on this rank; empty if it can."""
        if implementation == "batched_mm":
            copied = max(copied_bytes(kind, self.tokens, self.dtype) for kind in self.kinds)
            if copied > MOST_BYTES:
                return (
                    f"it would copy {copied / 2**30:,.1f} GiB of weights in a layer at {self.tokens:,} tokens"
                )
        try:
            error = max(
                errors(kind, implementation, self.dtype, self.device, self.tokens) for kind in self.kinds
            )
        except Exception as raised:  # any library's kernels may fail; what does not run is not chosen
            return f"{type(raised).__name__}: {str(raised).splitlines()[0] if str(raised) else ''}"[:200]
        self.error[implementation] = error
        if error > _LARGEST_ERROR:
            return f"its error is {error:.1f} times that of eager experts in {self.dtype}"
        return ""

    def fastest(self, implementations: list[str]) -> str:
        """The fastest implementation that works; the first that does unless another is clearly faster."""
        running = [one for one in implementations if not self.why_not(one)]
        if not running:
            raise UnsupportedModelError(f"no way to compute the experts works here: {self}")
        watches = [Stopwatch(kind, self.tokens, self.dtype, self.device) for kind in self.kinds]
        taken: dict[str, list[float]] = {one: [] for one in running}
        for _ in range(_ROUNDS + 1):
            for one in running:
                by_kind = zip(self.kinds, watches, strict=True)
                taken[one].append(sum(kind.layers * watch.seconds(one) for kind, watch in by_kind))
        medians = [statistics.median(times[1:]) for times in taken.values()]  # the first round warms up
        self.seconds = dict(zip(running, self.over_ranks(medians), strict=True))
        best = min(running, key=self.seconds.__getitem__)
        first = running[0]
        return best if self.seconds[best] < _CLEARLY * self.seconds[first] else first

    def __str__(self) -> str:
        told = []
        for one in dict.fromkeys([*self.error, *self.reasons]):
            parts = [f"{self.error[one]:.2f} x eager's error"] if one in self.error else []
            if one in self.seconds:
                parts.insert(0, f"{self.seconds[one] / min(self.seconds.values()):.2f} x the least time")
            if one in self.reasons:
                parts = [f"left out: {self.reasons[one]}"]
            told.append(f"{one} ({', '.join(parts)})")
        return ", ".join(told)
