"""The parts of a model that belong in a file (tensors, ties, extra state), matched with stored ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.modules import is_wrapper_subclass
from fsdp_sft._model.named import clean_name, named_tensors
from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft._tensors.boxes import local_of
from fsdp_sft._tensors.packed_shard import PackedShard, bits_of
from fsdp_sft._tensors.safetensors import bytes_of
from fsdp_sft.errors import CheckpointMismatchError, UnstorableStateError, abridged

_EXTRA_STATE = "_extra_state"  # nn.Module's name for what get_extra_state returns


@dataclass(frozen=True)
class ModelTensors:
    """Everything of a model that belongs in a file.

    Attributes:
        tensors: Parameters and persistent buffers by FQN; tied ones under their first name only.
        names: Each name to the first name of its tensor, in the order of the model's state dict.
        frozen: FQNs of parameters that require no gradient.
        made: Names among ``tensors`` that a module's own code has made for its state dict. Writing into such
            a tensor does not change the module; it has to be loaded by ``load_state_dict``.
        extra: Values of modules' ``get_extra_state``, by name; they are not in ``tensors``.
    """

    tensors: dict[str, torch.Tensor]
    names: dict[str, str]
    frozen: list[str]
    made: frozenset[str] = frozenset()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def ties(self) -> dict[str, str]:
        """Every further name of a tied tensor, to its first name."""
        return {name: first for name, first in self.names.items() if name != first}


def match_tensors(
    live: ModelTensors,
    stored: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    fits: Callable[[torch.dtype, torch.dtype], bool],
) -> tuple[dict[str, list[str]], list[str]]:
    """Find the stored tensor for each tensor of a model.

    Args:
        live: The model's tensors; for a tied one, one stored name is enough.
        stored: Dtype and shape of each stored tensor, by its name.
        fits: Whether a stored dtype may be read into one of the model.

    Returns:
        (the stored names of each tensor, by its first name; how the two differ, in words).
    """
    found: dict[str, list[str]] = {first: [] for first in live.tensors}
    unexpected, problems = [], []
    for name in stored:
        if name in live.names:
            found[live.names[name]].append(name)
        else:
            unexpected.append(name)
    missing = [first for first, own in found.items() if not own]
    if missing:
        problems.append(f"{len(missing)} of the model's are not in it ({abridged(missing, ', ', 4)})")
    if unexpected:
        problems.append(f"{len(unexpected)} are not the model's ({abridged(unexpected, ', ', 4)})")
    for first, own in found.items():
        tensor = live.tensors[first]
        for theirs in own if first not in live.made else ():  # the form of what is made may change
            dtype, shape = stored[theirs]
            if tuple(shape) != tuple(tensor.shape) or not fits(dtype, tensor.dtype):
                problems.append(
                    f"{theirs} is {dtype} {tuple(shape)}, the model's is {tensor.dtype} {tuple(tensor.shape)}"
                )
    return found, problems


def room_for(live: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Memory for a stored tensor, sharded like the live one if it has the same shape."""
    if tuple(live.shape) == shape:
        return torch.empty_like(live.detach(), dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=live.device)


def model_tensors(model: nn.Module, *, values: bool = True) -> ModelTensors:
    """Collect every parameter, persistent buffer and extra state of a model by name.

    Args:
        model: The model, resharded.
        values: Whether values are needed too. False takes only names and shapes, also of a model on the meta
            device.

    Raises:
        ValueError: If values are wanted and a tensor is still on the meta device.
        UnstorableStateError: If a module has state that a file cannot hold or that could not be loaded again.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    extra: dict[str, Any] = {}
    first_names: dict[int, str] = {}
    model = unwrapped(model)
    for key, value in model.state_dict(keep_vars=True).items():
        name = clean_name(key)
        if name.rpartition(".")[2] == _EXTRA_STATE:
            extra[name] = value
            continue
        is_packed = isinstance(value, torch.Tensor) and isinstance(local_of(value), PackedShard)
        if not isinstance(value, torch.Tensor) or (is_wrapper_subclass(value) and not is_packed):
            raise UnstorableStateError(
                f"{name} of {type(model).__name__} is a {type(value).__name__}, and a file holds plain "
                "tensors: keep it in train_state or rank_state, or return it from get_extra_state"
            )
        names[name] = first_names.setdefault(id(value), name)
        tensors.setdefault(names[name], value)
    on_meta = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
    if on_meta and values:
        raise ValueError(
            f"{len(on_meta)} tensors of {type(model).__name__} are on the meta device ({on_meta[0]}, ...): "
            "give them memory with model.to_empty(device=...) and compute the non-persistent buffers "
            "again, or load the base model with load_weights, which does both"
        )
    frozen = [n for n, t in tensors.items() if isinstance(t, nn.Parameter) and not t.requires_grad]
    if not values:
        return ModelTensors(tensors, names, frozen, frozenset(), extra)
    made = _made_for_the_state_dict(model, tensors)
    _refuse_left_out(model, tensors, made)
    return ModelTensors(tensors, names, frozen, made, extra)


def with_extra_tensors(content: ModelTensors) -> ModelTensors:
    """The same content with extra state among the tensors, for files that hold tensors alone.

    Raises:
        UnstorableStateError: If some extra state is not a tensor.
    """
    for name, value in content.extra.items():
        if type(value) is not torch.Tensor:
            raise UnstorableStateError(
                f"{name} is a {type(value).__name__}, and this file holds tensors only: save_checkpoint "
                "stores extra state of modules"
            )
    return replace(
        content,
        tensors={**content.tensors, **content.extra},
        names={**content.names, **{name: name for name in content.extra}},
        made=content.made | content.extra.keys(),
        extra={},
    )


def _made_for_the_state_dict(model: nn.Module, tensors: dict[str, torch.Tensor]) -> frozenset[str]:
    """Names of tensors in a state dict that share no memory with a parameter or buffer of the model."""
    own = named_tensors(model)
    identities = {id(tensor) for tensor in own.values()}
    foreign = {name: tensor for name, tensor in tensors.items() if id(tensor) not in identities}
    if not foreign:
        return frozenset()
    memory = {_memory(tensor) for tensor in own.values()}
    return frozenset(name for name, tensor in foreign.items() if _memory(tensor) not in memory)


def _refuse_left_out(model: nn.Module, tensors: dict[str, torch.Tensor], made: frozenset[str]) -> None:
    """Refuse a model with a trained parameter that its state dict lacks, and so would not restore."""
    saved = {id(tensor) for tensor in tensors.values()}
    trained = [(clean_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    left_out = [(name, parameter) for name, parameter in trained if id(parameter) not in saved]
    if not left_out:
        return
    memory = {_memory(tensor) for tensor in tensors.values()}
    owners = {name.rpartition(".")[0] for name in made}  # modules that store their parameters in another form
    lost = [
        name
        for name, parameter in left_out
        if _memory(parameter) not in memory and name.rpartition(".")[0] not in owners
    ]
    if lost:
        raise UnstorableStateError(
            f"{len(lost)} trained parameters of {type(model).__name__} are not in its state_dict() "
            f"({abridged(lost, ', ', 4)}), so they would not come back: freeze them, or let the module's "
            "_save_to_state_dict write them"
        )


def _memory(tensor: torch.Tensor) -> int:
    """A key for the memory of a tensor; an empty shard has none, so its ``id`` is used."""
    local = bits_of(tensor)
    return local.untyped_storage().data_ptr() if local.numel() else id(tensor)


def give_back(model: nn.Module, entries: dict[str, Any]) -> None:
    """Load what modules had made for their state dict: extra state, and tensors in another form.

    Args:
        model: A resharded model whose parameters and buffers are loaded already.
        entries: Values by name.

    Raises:
        CheckpointMismatchError: If a module does not take a value, or does not return it when asked again.
    """
    if not entries:
        return
    model = unwrapped(model)
    state = model.state_dict(keep_vars=True)
    state.update({key: entries[clean_name(key)] for key in state if clean_name(key) in entries})
    try:
        model.load_state_dict(state)
    except Exception as error:
        raise CheckpointMismatchError(
            f"the model does not take back what its modules saved in a form of their own "
            f"({abridged(entries, ', ', 4)}): {error}"
        ) from error
    after = {clean_name(key): value for key, value in model.state_dict(keep_vars=True).items()}
    lost = [name for name, value in entries.items() if not _same_tensor(after.get(name), value)]
    if lost:
        raise CheckpointMismatchError(
            f"{len(lost)} of {len(entries)} values that modules had saved in a form of their own did not "
            f"come back: {abridged(lost, ', ', 4)}. set_extra_state and _load_from_state_dict must take what "
            "get_extra_state and _save_to_state_dict gave"
        )


def _same_tensor(actual: Any, expected: Any) -> bool:
    """Whether two tensors have the same bits; for other objects, whether they have the same type."""
    if not isinstance(expected, torch.Tensor):
        return type(actual) is type(expected)
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        return False
    own = local_of(actual).detach().cpu()
    return bytes_of(own.contiguous()) == bytes_of(local_of(expected).cpu().to(own.dtype).contiguous())
