"""Count the tokens that routers send to each expert, in eager and compiled blocks.

A hook before a layer's experts passes the router's choices through a custom operation that counts them. To
compiled code it is an operation like any other, with no side effect that the code has to know of. It counts
only while counting is on for its layer, so a recomputation does not count again.
"""

import inspect
import itertools
import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_sft._model.named import named_tensors
from fsdp_sft._model.record import kept_of, record_of
from fsdp_sft._model.sharded import mesh_of
from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft._process.streams import LateTensor
from fsdp_sft._ranks.mesh import copies_of_rows, device_groups_of
from fsdp_sft.errors import ModelLossError, UnsupportedModelError, abridged
from fsdp_sft.experts.load import ExpertLoad

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_CHOICES = ("top_k_index", "router_indices")  # names of the argument of experts that takes the choices
_logger = logging.getLogger("fsdp_sft.experts")
_handles = itertools.count()
_layers: "weakref.WeakValueDictionary[int, _Layer]" = weakref.WeakValueDictionary()


class _Layer:
    """The experts of one layer, and how many tokens each was given."""

    def __init__(self, name: str, module: nn.Module, num_experts: int) -> None:
        self.name, self.module, self.num_experts = name, weakref.ref(module), num_experts
        self.handle = next(_handles)
        self.is_counting = self.was_seen = False
        self.counted: torch.Tensor | None = None
        self.counts: torch.Tensor | None = None
        _layers[self.handle] = self

    def add(self, chosen: torch.Tensor) -> None:
        """Count choices ``(tokens, top_k)`` of the tokens that count."""
        if self.counts is None or self.counts.device != chosen.device:
            # The last entry is for choices of no expert of this rank.
            self.counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=chosen.device)
        self.was_seen = True
        rows = chosen.reshape(-1, chosen.shape[-1])
        if self.counted is not None and self.counted.numel() != len(rows):
            raise ModelLossError(
                f"{self.name} saw {len(rows)} tokens, and the batch's attention_mask has "
                f"{self.counted.numel()}: which of them are padding is not known. Let loss_fn run what the "
                "mask is of, or give the mask in the batch another name, and all tokens count"
            )
        each = torch.ones_like(rows[:, :1]) if self.counted is None else self.counted.reshape(-1, 1)
        self.counts.scatter_add_(0, rows.reshape(-1).long(), each.to(torch.int64).expand_as(rows).reshape(-1))


class ExpertCounter:
    """Counts the tokens that a model's experts get in a window.

    Attributes:
        layers: Layers of the model that have experts.
        last: Tokens of each expert in the last window on all ranks, for each layer int64 ``(experts,)`` on
            the device.
        is_empty: Whether there is nothing to balance by: the last window had no forward, or failed, or its
            load has been applied.
    """

    def __init__(self, layers: list[_Layer]) -> None:
        self.layers = layers
        self.last: list[torch.Tensor] = []
        self.is_empty = self._is_open = self._has_warned = False

    @property
    def experts(self) -> list[tuple[str, int]]:
        """(FQN, number of experts) of each module with experts."""
        return [(layer.name, layer.num_experts) for layer in self.layers]

    def start(self) -> None:
        """Begin a window, with all counts at 0."""
        self._is_open, self.is_empty = True, False
        for layer in self.layers:
            layer.was_seen = False
            if layer.counts is not None:
                layer.counts.zero_()

    @contextmanager
    def counting(self, counted: torch.Tensor | None) -> Iterator[None]:
        """Count in forwards within the block, if a window has begun; recomputations run outside of it.

        Args:
            counted: Mask of the tokens that count, bool ``(B, S)``; None counts all.
        """
        before = [(layer.is_counting, layer.counted) for layer in self.layers]
        for layer in self.layers:
            layer.is_counting, layer.counted = self._is_open, counted
        try:
            yield
        finally:
            for layer, (is_counting, mask) in zip(self.layers, before, strict=True):
                layer.is_counting, layer.counted = is_counting, mask

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing in forwards within the block, which are not of the caller's batches."""
        before = [layer.is_counting for layer in self.layers]
        for layer in self.layers:
            layer.is_counting = False
        try:
            yield
        finally:
            for layer, was_counting in zip(self.layers, before, strict=True):
                layer.is_counting = was_counting

    def abandon(self) -> None:
        """End a window that failed, whose counts are not used."""
        self._is_open, self.is_empty = False, True

    def finish(self, mesh: "DeviceMesh | None", device: torch.device) -> "LateLoad":
        """End the window, and start to copy the counts of all ranks to the host.

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
    """An ``ExpertLoad`` that is being copied to the host."""

    def __init__(self, names: tuple[str, ...], sizes: list[int], unseen: set[str], late: LateTensor) -> None:
        self._names, self._sizes, self._unseen, self._late = names, sizes, unseen, late

    def read(self) -> ExpertLoad | None:
        """The load of the layers whose choices were seen, None if there are none; the host waits for it."""
        counts = self._late.read().split(self._sizes)
        named = zip(self._names, counts, strict=True)
        seen = {name: tuple(layer.tolist()) for name, layer in named if name not in self._unseen}
        return ExpertLoad(tuple(seen), tuple(seen.values())) if seen else None


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
    record_of(model).keep(ExpertCounter(layers))
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
    """The counter of a model; None without ``watch_experts``, and for a copy of a watched model."""
    return kept_of(model, ExpertCounter)


def _argument_of(module: nn.Module) -> tuple[str, int] | None:
    """(name, position) of the argument that takes a router's choices; None if the module has none."""
    forward = inspect.unwrap(type(module).forward)
    names = list(inspect.signature(forward).parameters)[1:]
    return next(((name, names.index(name)) for name in _CHOICES if name in names), None)


def _num_experts(name: str, module: nn.Module) -> int:
    """Number of experts of a layer on all ranks."""
    # Under expert parallelism the attribute num_experts is that of this rank. Stacked parameters are DTensors
    # with the length of all experts.
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
    """Hook before experts: passes the router's choices through ``count_choices``."""
    if not torch.compiler.is_compiling():
        layer = _layers.get(handle)
        # A copy of the model has the hook too, with the handle of the layer that it was copied from.
        if layer is None or not layer.is_counting or layer.module() is not module:
            return None
    if name in kwargs:
        return args, {**kwargs, name: count_choices(kwargs[name], handle)}
    return (*args[:position], count_choices(args[position], handle), *args[position + 1 :]), kwargs


@torch.library.custom_op("fsdp_sft::count_choices", mutates_args=())
def count_choices(chosen: torch.Tensor, handle: int) -> torch.Tensor:
    """A copy of the choices ``(tokens, top_k)``, which are counted if counting is on for their layer."""
    layer = _layers.get(handle)
    if layer is not None and layer.is_counting:
        layer.add(chosen)
    return chosen.clone()


@count_choices.register_fake
def _(chosen: torch.Tensor, handle: int) -> torch.Tensor:
    return torch.empty_like(chosen)


def biases_of(model: nn.Module, experts: Iterable[tuple[str, int]]) -> dict[str, tuple[str, torch.Tensor]]:
    """Find the bias of each layer: the only untrained tensor next to its experts with one number per expert.

    Args:
        model: Unwrapped model.
        experts: (FQN, number of experts) of each module with experts.

    Returns:
        (name, tensor) of the bias by the FQN of the experts, for layers that have one.
    """
    found = {}
    for name, number in experts:
        placed = name.removesuffix(".base_layer")  # peft's name for the layer inside of its adapters
        beside = placed.rpartition(".")[0]
        block = model.get_submodule(beside)
        within = placed.removeprefix(f"{beside}.") + "."
        biases = [
            (f"{beside}.{key}", tensor)
            for key, tensor in named_tensors(block).items()
            if "bias" in key
            and not key.startswith(within)
            and tensor.numel() == number
            and not tensor.requires_grad
            and tensor.is_floating_point()
        ]
        if len(biases) == 1:
            found[name] = biases[0]
    return found
