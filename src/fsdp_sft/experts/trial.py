"""Trials of implementations on random experts of a layer's widths: their errors and their times.

The model's own experts may be sharded, on the host or shared out, and a trial must not touch them. So the
same functions run on a stand-in, which has the module's settings and activation and random parameters of its
shapes. It has no more experts than fit into a bound of memory, and as many tokens for each as in the model.
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

MOST_BYTES = 1 << 29  # most weights of a stand-in, and most that an implementation may copy for a layer
_MOST_FLOPS_ON_CPU = 1e9  # most FLOPs of a trial's forward on a CPU, so that it does not take long
_ERROR_TOKENS = 512  # enough to show errors that add up over tokens in 16 bits
_SEED = 31


@dataclass(frozen=True)
class Kind:
    """Layers of experts of the same class and shapes.

    Attributes:
        module: Module with the experts of one of these layers.
        layers: Number of these layers.
        experts: Number of experts in a layer; if ranks share them out, of this rank.
        top_k: Number of experts that a token is sent to.
        elements: Number of elements of the parameters of one expert.
    """

    module: nn.Module
    layers: int
    experts: int
    top_k: int
    elements: int


def kinds_of(modules: Iterable[nn.Module], top_k: int) -> list[Kind]:
    """The kinds of experts among ``modules``, each once."""
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
    """Bytes that a layer takes if the weights of the chosen expert are copied for every choice of a token."""
    return tokens * kind.top_k * kind.elements * dtype.itemsize


def errors(kind: Kind, implementation: str, dtype: torch.dtype, device: torch.device, tokens: int) -> float:
    """Error of an implementation divided by the error of eager experts, both computed in ``dtype``.

    Errors are root mean squares of the differences from eager experts with the same values in a wider dtype.
    They are compared for the output and for each gradient, and the largest quotient is returned.
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
    # Eager errors below this count as this much, so that small errors are not divided by nothing. For float64
    # there is no wider dtype: its eager results are taken for exact, with an error of 0.
    least = torch.finfo(dtype).eps / (1 if dtype == wide else 64)
    return max(a / max(b, least) for a, b in zip(other, eager, strict=True))


class Stopwatch:
    """Timed forwards and backwards of one kind of experts."""

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
        """Seconds of one forward and backward, scaled up to all tokens of a micro-batch."""
        synchronize(self.device)
        started = time.perf_counter()
        self._trial.results(implementation, self.dtype)
        synchronize(self.device)
        return (time.perf_counter() - started) * self.scale


class _Trial:
    """A stand-in for a layer's experts, with its inputs."""

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
        """Output and gradients, computed in ``dtype`` from the same values each time."""
        experts = _bare_copy(self.experts, lambda p: p.detach().to(dtype))
        leaves = [t.to(dtype).detach().requires_grad_() for t in (self.hidden, self.weights)]
        with torch.enable_grad():
            forward = experts_forward(experts, implementation)
            output = forward(experts, leaves[0], self.index, leaves[1])
            trained = [*leaves, *experts.parameters()]
            gradients = torch.autograd.grad(output, trained, self.upstream.to(output.dtype))
        return [output.detach(), *gradients]


def _width(kind: Kind) -> int:
    """Width of the hidden states, which is that of the down projection's output."""
    down: Any = kind.module.down_proj
    return int(down.shape[-1] if kind.module.is_transposed else down.shape[-2])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of ``b``; inf if it is NaN."""
    difference = (a.double() - b.double()).norm()
    result = float(difference / b.double().norm().clamp_min(torch.finfo(torch.float32).tiny))
    return result if result == result else float("inf")


def _bare_copy(module: nn.Module, make: Callable[[nn.Parameter], torch.Tensor]) -> nn.Module:
    """A module with the settings of another and new parameters, without its hooks and its sharding.

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
