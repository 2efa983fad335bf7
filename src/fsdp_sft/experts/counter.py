"""Count the tokens that routers send to each expert, in eager and compiled blocks.

A hook before a layer's experts passes the router's choices through a custom operation that counts them. To
compiled code it is an operation like any other, with no side effect that the code has to know of. It counts
only while counting is on for its layer, so a recomputation does not count again.
"""

import inspect
import itertools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_sft._model.view import kept_of, record_of, unwrapped
from fsdp_sft._process.streams import LateValues
from fsdp_sft.errors import ModelLossError, UnsupportedModelError

_CHOICES = ("top_k_index", "router_indices")  # names of the argument of experts that takes the choices
_handles = itertools.count()
_counters: "weakref.WeakValueDictionary[int, ExpertCounter]" = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class ExpertLoad:
    """Number of tokens that each expert of each layer was given in a window, on all ranks, without padding.

    Attributes:
        layers: FQNs of the modules that hold the experts, in forward order.
        counts: Number of tokens of each expert, by layer. In a layer they add up to tokens times ``top_k``.

    Example:
        >>> load = ExpertLoad(("layers.0.experts",), ((6, 2, 0, 0),))
        >>> load.largest_over_mean, load.dead
        ((3.0,), (2,))
    """

    layers: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def largest_over_mean(self) -> tuple[float, ...]:
        """Tokens of the busiest expert divided by the mean of its layer, by layer; 1 if all have the same."""
        return tuple(max(layer) * len(layer) / max(sum(layer), 1) for layer in self.counts)

    @property
    def dead(self) -> tuple[int, ...]:
        """Number of experts that were given no token, by layer."""
        return tuple(layer.count(0) for layer in self.counts)

    def summary(self) -> dict[str, float]:
        """Numbers to log: ``largest_over_mean`` of the worst layer, and all dead experts."""
        return {
            "expert_load_largest_over_mean": max(self.largest_over_mean),
            "dead_experts": float(sum(self.dead)),
        }


class ExpertCounter:
    """Counts the tokens that a model's experts get in a window.

    Attributes:
        experts: (FQN, number of experts) of each module with experts.
        modules: These modules.
        handle: Number of the counter, for ``count_choices``.
        is_counting: Whether forwards are counted now.
    """

    def __init__(self, experts: dict[str, tuple[nn.Module, int]]) -> None:
        self.experts = [(name, number) for name, (_, number) in experts.items()]
        self.modules = [weakref.ref(module) for module, _ in experts.values()]
        self.handle = next(_handles)
        self.is_counting = self._is_open = False
        self._mask: torch.Tensor | None = None
        self._late: LateValues | None = None
        self._counts: dict[int, torch.Tensor] = {}  # of the modules that were called in this window
        _counters[self.handle] = self

    def start(self) -> None:
        """Begin a window, with all counts at 0."""
        self._is_open = True
        self._counts.clear()

    def counting(self, counted: torch.Tensor | None) -> AbstractContextManager[None]:
        """Count in forwards within the block, if a window has begun; recomputations run outside of it.

        Args:
            counted: Mask of the tokens that count, bool ``(B, S)``; None counts all.
        """
        return self._with(self._is_open, counted)

    def paused(self) -> AbstractContextManager[None]:
        """Count nothing in forwards within the block, which are not of the caller's batches."""
        return self._with(False, None)

    @contextmanager
    def _with(self, is_counting: bool, mask: torch.Tensor | None) -> Iterator[None]:
        before = self.is_counting, self._mask
        self.is_counting, self._mask = is_counting, mask
        try:
            yield
        finally:
            self.is_counting, self._mask = before

    def add(self, index: int, chosen: torch.Tensor) -> None:
        """Count choices ``(tokens, top_k)`` of the tokens that count, by a module's experts."""
        name, number = self.experts[index]
        rows = chosen.reshape(-1, chosen.shape[-1])
        if self._mask is not None and self._mask.numel() != len(rows):
            raise ModelLossError(
                f"{name} saw {len(rows)} tokens, and the batch's attention_mask has {self._mask.numel()}: "
                "which of them are padding is not known. Let loss_fn run what the mask is of, or give the "
                "mask in the batch another name, and all tokens count"
            )
        if index not in self._counts:
            # The last entry is for choices of no expert of this rank.
            self._counts[index] = torch.zeros(number + 1, dtype=torch.int64, device=chosen.device)
        each = torch.ones_like(rows[:, :1]) if self._mask is None else self._mask.reshape(-1, 1)
        weights = each.to(torch.int64).expand_as(rows).reshape(-1)
        self._counts[index].scatter_add_(0, rows.reshape(-1).long(), weights)

    def abandon(self) -> None:
        """End a window that failed, whose counts are not used."""
        self._is_open = False

    def finish(self, mesh: DeviceMesh | None, device: torch.device) -> None:
        """End the window, and start to copy the counts of all ranks to the host.

        Collective: all ranks of the mesh.
        """
        self._is_open = False
        sizes = [number for _, number in self.experts]
        none = [torch.zeros(number, dtype=torch.int64, device=device) for number in sizes]
        together = torch.cat([self._counts.get(i, none[i])[:number] for i, number in enumerate(sizes)])
        if mesh is not None:  # which holds all ranks
            dist.all_reduce(together)
        self._late = LateValues([together])

    def load(self) -> ExpertLoad | None:
        """The last window's load of the layers whose choices were seen; None without any. The host waits.

        Choices are not seen of blocks that were compiled, and had run, before ``watch_experts``.
        """
        if self._late is None or not self._counts:
            return None
        values = map(int, self._late.read())
        counts = [tuple(itertools.islice(values, number)) for _, number in self.experts]
        seen = sorted(self._counts)
        return ExpertLoad(tuple(self.experts[i][0] for i in seen), tuple(counts[i] for i in seen))


def watch_experts(model: nn.Module) -> list[str]:
    """Let ``train_step`` count how many tokens each expert is given: ``StepResult.expert_load``.

    Call it before the first forward if blocks are compiled, and at any time if not. Counting costs a sum over
    tokens in each layer, and once a step a sum over ranks of one number per expert. It does not make the host
    wait for the device.

    Args:
        model: Mixture of transformers, whose experts take a router's choices as an argument.

    Returns:
        FQNs of the modules with experts, in forward order.

    Raises:
        UnsupportedModelError: If no module takes choices of experts.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> sizes = {"vocab_size": 640, "hidden_size": 32, "num_hidden_layers": 2}
        >>> tiny = MixtralConfig(**sizes, num_local_experts=4)
        >>> mixture = MixtralForCausalLM(tiny)
        >>> fs.watch_experts(mixture)
        ['model.layers.0.mlp.experts', 'model.layers.1.mlp.experts']
        >>> result = fs.train_step(mixture, window, torch.optim.AdamW(mixture.parameters()))
        >>> list(result.expert_load.summary())
        ['expert_load_largest_over_mean', 'dead_experts']
    """
    inner = unwrapped(model)
    present = counter_of(model)
    if present is not None:
        return [name for name, _ in present.experts]
    asked = {name: _argument_of(module) for name, module in inner.named_modules()}
    taken = {name: argument for name, argument in asked.items() if argument is not None}
    found = {name: inner.get_submodule(name) for name in taken}
    if not found:
        raise UnsupportedModelError(
            f"{type(inner).__name__} has no module that takes what a router has chosen (an argument "
            f"{' or '.join(_CHOICES)}), as experts of transformers do: what it gives to whom cannot be seen"
        )
    counter = ExpertCounter({name: (module, _num_experts(module)) for name, module in found.items()})
    record_of(model).keep(counter)
    for index, (name, module) in enumerate(found.items()):
        hook = partial(_before_experts, counter.handle, index, *taken[name])
        module.register_forward_pre_hook(hook, with_kwargs=True)
    return list(found)


def counter_of(model: nn.Module) -> ExpertCounter | None:
    """The counter of a model; None without ``watch_experts``, and for a copy of a watched model."""
    return kept_of(model, ExpertCounter)


def _argument_of(module: nn.Module) -> tuple[str, int] | None:
    """(name, position) of the argument that takes a router's choices; None if the module has none."""
    forward = inspect.unwrap(type(module).forward)
    names = list(inspect.signature(forward).parameters)[1:]
    return next(((name, names.index(name)) for name in _CHOICES if name in names), None)


def _num_experts(module: nn.Module) -> int:
    """Number of experts of a layer on all ranks."""
    # Under expert parallelism the attribute num_experts is that of this rank. Stacked parameters are DTensors
    # with the length of all experts.
    stacked = [len(parameter) for parameter in module.parameters() if parameter.ndim > 2]
    return stacked[0] if stacked else module.num_experts  # type: ignore[return-value]


def _before_experts(
    handle: int,
    index: int,
    name: str,
    position: int,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Hook before experts: passes the router's choices through ``count_choices``."""
    if not torch.compiler.is_compiling():
        counter = _counters.get(handle)
        # A copy of the model has the hook too, with the handle of the counter of the one that was copied.
        if counter is None or not counter.is_counting or counter.modules[index]() is not module:
            return None
    if name in kwargs:
        return args, {**kwargs, name: count_choices(kwargs[name], handle, index)}
    return (*args[:position], count_choices(args[position], handle, index), *args[position + 1 :]), kwargs


@torch.library.custom_op("fsdp_sft::count_choices", mutates_args=())
def count_choices(chosen: torch.Tensor, handle: int, index: int) -> torch.Tensor:
    """A copy of the choices ``(tokens, top_k)``, which are counted if counting is on."""
    counter = _counters.get(handle)
    if counter is not None and counter.is_counting:
        counter.add(index, chosen)
    return chosen.clone()


@count_choices.register_fake
def _(chosen: torch.Tensor, handle: int, index: int) -> torch.Tensor:
    return torch.empty_like(chosen)
