"""Experts of a layer's widths, with numbers of their own, computed in one way and in another.

The model's experts may be sharded, on the host, or shared out, and a trial must not touch them. So it runs
the same functions on a stand-in: the module's settings, its activation, and random parameters of its shapes,
of no more experts than fit into a bound, with as many tokens for each as it would have.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat import experts_forward, original_class
from fsdp_sft._devices import synchronize

MOST_BYTES = 1 << 29  # of a stand-in's weights, and of weights that an implementation may copy for a layer
_MOST_FLOPS_ON_CPU = 1e9  # of a forward: a CPU is no place to wait for the experts of a large model
_ERROR_TOKENS = 512  # enough for what adds up over tokens in 16 bits
_SEED = 31


@dataclass(frozen=True)
class Kind:
    """Experts that are made alike.

    Attributes:
        module: One layer's of them.
        layers: How many layers have such.
        experts: In each; of those that ranks have shared out, this rank's.
        top_k: Experts that a token is sent to.
        elements: Of the parameters of one expert.
    """

    module: nn.Module
    layers: int
    experts: int
    top_k: int
    elements: int


def kinds_of(modules: Iterable[nn.Module], top_k: int) -> list[Kind]:
    """The different experts among ``modules``, each kind once."""
    found: dict[Any, list[nn.Module]] = {}
    for module in modules:
        shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
        found.setdefault((type(module), shapes), []).append(module)
    kinds = []
    for alike in found.values():
        stacks = _stacks(alike[0])
        elements = sum(stack.shape[1:].numel() for stack in stacks)
        experts = int(alike[0].num_experts)  # type: ignore[arg-type]
        kinds.append(Kind(alike[0], len(alike), experts, min(top_k, experts), elements))
    return kinds


def _stacks(module: nn.Module) -> list[torch.Tensor]:
    """Parameters with an entry for each expert."""
    own = [p for p in module.parameters(recurse=False) if p.ndim > 1]
    longest = max(len(p) for p in own)
    return [p for p in own if len(p) == longest]


def copied_bytes(kind: Kind, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of weights that are copied for a layer where each choice of a token gets its expert's."""
    return tokens * kind.top_k * kind.elements * dtype.itemsize


def errors(kind: Kind, implementation: str, dtype: torch.dtype, device: torch.device, tokens: int) -> float:
    """How far an implementation is from exact results, over how far eager experts of ``dtype`` are.

    Of the output and of each gradient, by its root mean square; the largest. Eager experts of a wider dtype,
    with the same values, are what is exact; what is within rounding of that is 1.
    """
    wide = torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
    bound = MOST_BYTES // (wide.itemsize * kind.elements)
    experts = min(kind.experts, max(2, bound, kind.top_k))
    tokens = min(tokens, _ERROR_TOKENS)
    if device.type == "cpu":
        tokens = min(tokens, max(16, round(_MOST_FLOPS_ON_CPU / (2 * kind.top_k * kind.elements))))
    trial = _Trial(kind, experts, tokens, dtype, device)
    exact = trial.results("eager", wide)
    eager = [_distance(a, b) for a, b in zip(trial.results("eager", dtype), exact, strict=True)]
    other = [_distance(a, b) for a, b in zip(trial.results(implementation, dtype), exact, strict=True)]
    # Nothing is wider than float64, whose eager results are taken for exact; small errors are none.
    least = torch.finfo(dtype).eps / (1 if dtype == wide else 64)
    return max(a / max(b, least) for a, b in zip(other, eager, strict=True))


class Stopwatch:
    """Forwards and backwards of one kind of experts, timed."""

    def __init__(self, kind: Kind, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        experts = max(kind.top_k, min(kind.experts, MOST_BYTES // (dtype.itemsize * kind.elements)), 2)
        self.experts = min(kind.experts, experts)
        share = self.experts / kind.experts
        if device.type == "cpu":
            flops = 2.0 * tokens * share * kind.top_k * kind.elements
            share *= min(1.0, _MOST_FLOPS_ON_CPU / flops)
        self.tokens = max(1, round(tokens * share))
        self.scale = tokens / self.tokens
        self.device, self.dtype = device, dtype
        self._trial = _Trial(kind, self.experts, self.tokens, dtype, device)

    def seconds(self, implementation: str) -> float:
        """One forward and backward, of all tokens."""
        synchronize(self.device)
        started = time.perf_counter()
        self._trial.results(implementation, self.dtype)
        synchronize(self.device)
        return (time.perf_counter() - started) * self.scale


class _Trial:
    """A stand-in and what goes into it."""

    def __init__(
        self, kind: Kind, experts: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.generator = torch.Generator().manual_seed(_SEED)
        self.draw: Callable[..., torch.Tensor] = lambda shape, scale: (
            torch.randn(shape, generator=self.generator) * scale
        ).to(device, dtype)
        self.kind, self.dtype = kind, dtype
        longest = {id(stack) for stack in _stacks(kind.module)}

        def draw_like(p: nn.Parameter) -> torch.Tensor:
            shape = (experts, *p.shape[1:]) if id(p) in longest else tuple(p.shape)
            return self.draw(shape, max(p.shape[-2:]) ** -0.5 if p.ndim > 2 else 0.1)

        made: Any = _bare_copy(kind.module, draw_like)
        made.num_experts = experts
        if hasattr(made, "_is_expert_parallel"):
            made._is_expert_parallel = False
        self.experts = made
        width = _width(kind)
        self.hidden = self.draw((tokens, width), 1.0)
        self.upstream = self.draw((tokens, width), 1.0)
        scores = torch.rand(tokens, experts, generator=self.generator)
        top = scores.softmax(-1).topk(min(kind.top_k, experts), dim=-1)
        self.index = top.indices.to(device)
        self.weights = (top.values / top.values.sum(-1, keepdim=True)).to(device, dtype)

    def results(self, implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """Output and gradients, computed in ``dtype`` from the same values."""
        experts = _bare_copy(self.experts, lambda p: p.detach().to(dtype))
        leaves = [t.to(dtype).detach().requires_grad_() for t in (self.hidden, self.weights)]
        with torch.enable_grad():
            forward = experts_forward(experts, implementation)
            output = forward(experts, leaves[0], self.index, leaves[1])
            trained = [*leaves, *experts.parameters()]
            gradients = torch.autograd.grad(output, trained, self.upstream.to(output.dtype))
        return [output.detach(), *gradients]


def _width(kind: Kind) -> int:
    """Of the hidden states: what the projection down returns."""
    down: Any = kind.module.down_proj
    return int(down.shape[-1] if kind.module.is_transposed else down.shape[-2])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root mean square of the difference, relative to ``b``'s."""
    difference = (a.double() - b.double()).norm()
    result = float(difference / b.double().norm().clamp_min(torch.finfo(torch.float32).tiny))
    return result if result == result else float("inf")


def _bare_copy(module: nn.Module, make: Callable[[nn.Parameter], torch.Tensor]) -> nn.Module:
    """A module with another's settings and other parameters, without its hooks and what shards it.

    ``copy.deepcopy`` would copy the parameters, and FSDP2 forbids it.
    """
    cls: Any = original_class(module)
    made: nn.Module = cls.__new__(cls)
    vars(made).update(vars(module))
    vars(made).update({key: OrderedDict() for key in vars(made) if key.endswith("_hooks")})
    made.__dict__.pop("forward", None)
    parameters, children = module._parameters.items(), module._modules.items()
    made._parameters = {n: None if p is None else nn.Parameter(make(p)) for n, p in parameters}
    made._modules = {n: None if child is None else _bare_copy(child, make) for n, child in children}
    return made
