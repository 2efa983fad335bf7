"""Counts what routers choose, in eager blocks, compiled ones, and not again where they are recomputed.

A hook before a layer's experts hands their choices through an operation that counts them. To compiled code it
is an operation like others, without a side effect that it would have to know of.
"""

import inspect
import itertools
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_sft._meshes import copies_of_rows
from fsdp_sft._streams import LateTensor
from fsdp_sft._wrappers import unwrapped
from fsdp_sft.distributed import device_groups_of, mesh_of
from fsdp_sft.errors import UnsupportedModelError, abridged
from fsdp_sft.experts.biases import biases_of
from fsdp_sft.experts.load import ExpertLoad

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_COUNTER = "_fsdp_sft_expert_counter"  # on the model
_CHOICES = ("top_k_index", "router_indices")  # what transformers' experts call them
_logger = logging.getLogger("fsdp_sft.experts")
_handles = itertools.count()
_layers: "weakref.WeakValueDictionary[int, _Layer]" = weakref.WeakValueDictionary()


class _Layer:
    """The experts of one layer."""

    def __init__(self, name: str, module: nn.Module, num_experts: int) -> None:
        self.name, self.module, self.num_experts = name, weakref.ref(module), num_experts
        self.handle = next(_handles)
        self.is_counting = self.was_seen = False
        self.counted: torch.Tensor | None = None
        self.counts: torch.Tensor | None = None
        _layers[self.handle] = self

    def add(self, chosen: torch.Tensor) -> None:
        if self.counts is None or self.counts.device != chosen.device:
            # One more, for tokens that are sent to no expert of this rank.
            self.counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=chosen.device)
        self.was_seen = True
        rows = chosen.reshape(-1, chosen.shape[-1])
        each = torch.ones_like(rows[:, :1]) if self.counted is None else self.counted.reshape(-1, 1)
        self.counts.scatter_add_(0, rows.reshape(-1).long(), each.to(torch.int64).expand_as(rows).reshape(-1))


class ExpertCounter:
    """What the experts of a model are given in a window.

    Attributes:
        layers: Of the model that have experts.
        last: What they were given in the last window on all ranks, int64 ``(experts,)`` each, on the device.
    """

    def __init__(self, model: nn.Module, layers: list[_Layer]) -> None:
        self.model, self.layers = weakref.ref(model), layers
        self.last: list[torch.Tensor] = []
        self._is_open = self._has_warned = False

    def __reduce__(self) -> Any:
        """A copy of the model is not watched."""
        return type(None), ()

    @property
    def experts(self) -> list[tuple[str, int]]:
        """FQNs of the modules with experts, and how many these are."""
        return [(layer.name, layer.num_experts) for layer in self.layers]

    def start(self) -> None:
        """Begin a window: forwards count from now on."""
        self._is_open = True
        for layer in self.layers:
            layer.was_seen = False
            if layer.counts is not None:
                layer.counts.zero_()

    @contextmanager
    def counting(self, counted: torch.Tensor | None) -> Iterator[None]:
        """Count in forwards within the block, of a window that has begun, and not in what recomputes them.

        Args:
            counted: Which tokens count, bool ``(B, S)``; None takes all.
        """
        for layer in self.layers:
            layer.is_counting, layer.counted = self._is_open, counted
        try:
            yield
        finally:
            for layer in self.layers:
                layer.is_counting, layer.counted = False, None

    def finish(self, mesh: "DeviceMesh | None", device: torch.device) -> "LateLoad":
        """End the window: what all ranks have counted, on its way to the host.

        Collective: all ranks of the mesh.
        """
        self._is_open = False
        sizes = [layer.num_experts for layer in self.layers]
        counts = [
            torch.zeros(layer.num_experts, dtype=torch.int64, device=device)
            if layer.counts is None
            else layer.counts[: layer.num_experts]
            for layer in self.layers
        ]
        together = torch.cat(counts)
        for group in device_groups_of(mesh):
            dist.all_reduce(together, group=group)
        together = together // copies_of_rows(mesh)
        self.last = list(together.split(sizes))
        unseen = [layer.name for layer in self.layers if not layer.was_seen]
        if unseen and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "what the routers of %s choose was not seen: their blocks were compiled, and had run, before "
                "watch_experts(model); call it before the first forward",
                abridged(unseen),
            )
        names = tuple(layer.name for layer in self.layers)
        return LateLoad(names, sizes, set(unseen), LateTensor(together))


class LateLoad:
    """An ``ExpertLoad`` on its way to the host."""

    def __init__(self, names: tuple[str, ...], sizes: list[int], unseen: set[str], late: LateTensor) -> None:
        self._names, self._sizes, self._unseen, self._late = names, sizes, unseen, late

    def read(self) -> ExpertLoad | None:
        """The load of the layers that were seen; the host waits for the device. None if none was."""
        counts = self._late.read().split(self._sizes)
        named = zip(self._names, counts, strict=True)
        seen = {name: tuple(layer.tolist()) for name, layer in named if name not in self._unseen}
        return ExpertLoad(tuple(seen), tuple(seen.values())) if seen else None


def watch_experts(model: nn.Module) -> list[str]:
    """Let ``train_step`` count how many tokens each expert is given: ``StepResult.expert_load``.

    Call it before the first forward, where blocks are compiled; before or after anything else. Counting costs
    a sum over tokens a layer, and a sum over ranks of as many numbers as there are experts, once a step; the
    host does not wait for it by itself.

    Args:
        model: A mixture of transformers, whose experts take what a router has chosen.

    Returns:
        FQNs of the modules with experts, in forward order.

    Raises:
        UnsupportedModelError: If no module takes choices of experts.

    Example:
        >>> watch_experts(model)  # doctest: +SKIP
        >>> load = train_step(model, window, optimizer).expert_load  # doctest: +SKIP
        >>> log(load.summary())  # doctest: +SKIP
    """
    inner = unwrapped(model)
    present = counter_of(model)
    if present is not None:
        return [layer.name for layer in present.layers]
    layers = []
    for name, module in inner.named_modules():
        argument = _argument_of(module)
        if argument is None:
            continue
        layer = _Layer(name, module, _num_experts(name, module))
        module.register_forward_pre_hook(partial(_before_experts, layer.handle, *argument), with_kwargs=True)
        layers.append(layer)
    if not layers:
        raise UnsupportedModelError(
            f"{type(inner).__name__} has no module that takes what a router has chosen (an argument "
            f"{' or '.join(_CHOICES)}), as experts of transformers do: what it gives to whom cannot be seen"
        )
    inner.__dict__[_COUNTER] = ExpertCounter(inner, layers)
    mesh = mesh_of(model)
    frozen = biases_of(inner, [(layer.name, layer.num_experts) for layer in layers])
    if frozen and (mesh is None or mesh.get_rank() == 0):
        _logger.info(
            "%s balances its experts by %d biases, such as %s, which stay as they are unless "
            "update_router_bias(model, rate=...) is called after each step",
            *(type(inner).__name__, len(frozen), next(iter(frozen.values()))[0]),
        )
    return [layer.name for layer in layers]


def counter_of(model: nn.Module) -> ExpertCounter | None:
    """What counts for a model; None if nobody has asked for it, or the model is a copy of one."""
    inner = unwrapped(model)
    counter = inner.__dict__.get(_COUNTER)
    return counter if isinstance(counter, ExpertCounter) and counter.model() is inner else None


def _argument_of(module: nn.Module) -> tuple[str, int] | None:
    """Name and position of the argument that says what was chosen; None if a module has none."""
    forward = inspect.unwrap(type(module).forward)
    names = list(inspect.signature(forward).parameters)[1:]
    return next(((name, names.index(name)) for name in _CHOICES if name in names), None)


def _num_experts(name: str, module: nn.Module) -> int:
    # Under expert parallelism num_experts are this rank's; the length of a stack is that of all of it.
    stacked = [len(parameter) for parameter in module.parameters() if parameter.ndim > 2]
    if not stacked:
        number = getattr(module, "num_experts", None)
        if isinstance(number, int):
            return number
        raise UnsupportedModelError(f"how many experts {name} ({type(module).__name__}) has cannot be told")
    return stacked[0]


def _before_experts(
    handle: int, name: str, position: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not torch.compiler.is_compiling():
        layer = _layers.get(handle)
        if layer is None or not layer.is_counting:
            return None
    if name in kwargs:
        return args, {**kwargs, name: count_choices(kwargs[name], handle)}
    return (*args[:position], count_choices(args[position], handle), *args[position + 1 :]), kwargs


@torch.library.custom_op("fsdp_sft::count_choices", mutates_args=())
def count_choices(chosen: torch.Tensor, handle: int) -> torch.Tensor:
    """Choices ``(tokens, top_k)`` as they are, counted if their layer counts at the moment."""
    layer = _layers.get(handle)
    if layer is not None and layer.is_counting:
        layer.add(chosen)
    return chosen.clone()


@count_choices.register_fake
def _(chosen: torch.Tensor, handle: int) -> torch.Tensor:
    return torch.empty_like(chosen)
