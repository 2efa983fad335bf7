"""The parts of a model that belong in a file (tensors, ties), matched with stored ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_sft._compat.modules import is_wrapper_subclass
from fsdp_sft._model.view import clean_name, named_tensors, unwrapped
from fsdp_sft._tensors.boxes import memory_of
from fsdp_sft.errors import UnstorableStateError, abridged


@dataclass(frozen=True)
class ModelTensors:
    """Everything of a model that belongs in a file.

    Attributes:
        tensors: Parameters and persistent buffers by FQN; tied ones under their first name only.
        names: Each name to the first name of its tensor, in the order of the model's state dict.
    """

    tensors: dict[str, torch.Tensor]
    names: dict[str, str]

    @property
    def ties(self) -> dict[str, str]:
        """Every further name of a tied tensor, to its first name."""
        return {name: first for name, first in self.names.items() if name != first}


def match_tensors(
    live: ModelTensors,
    stored: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    *,
    casts: bool,
) -> tuple[dict[str, list[str]], list[str]]:
    """Find the stored tensor for each tensor of a model.

    Args:
        live: The model's tensors; for a tied one, one stored name is enough.
        stored: Dtype and shape of each stored tensor, by its name.
        casts: Whether numbers of another floating-point dtype may be read into the model's.

    Returns:
        (the stored names of each tensor, by its first name; how the two differ, in words).
    """
    found: dict[str, list[str]] = {first: [] for first in live.tensors}
    unexpected, apart = [], []
    for name, (dtype, shape) in stored.items():
        if name not in live.names:
            unexpected.append(name)
            continue
        found[live.names[name]].append(name)
        own = live.tensors[live.names[name]]
        if tuple(shape) != tuple(own.shape) or not (
            dtype == own.dtype or (casts and dtype.is_floating_point and own.dtype.is_floating_point)
        ):
            apart.append(f"{name} is {dtype} {tuple(shape)}, the model's is {own.dtype} {tuple(own.shape)}")
    missing = [first for first, names in found.items() if not names]
    problems = [
        f"{len(names)} {what} ({abridged(names, ', ', 4)})"
        for what, names in (("of the model's are not in it", missing), ("are not the model's", unexpected))
        if names
    ]
    return found, problems + apart


def model_tensors(model: nn.Module) -> ModelTensors:
    """Collect every parameter and persistent buffer of a model, which is resharded, by name.

    Raises:
        ValueError: If a tensor is still on the meta device.
        UnstorableStateError: If a module has state that a file cannot hold, or the state dict has copies in
            place of parameters and buffers, or lacks trained parameters: what is read into its tensors would
            not change the model.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    first_names: dict[int, str] = {}
    model = unwrapped(model)
    for key, value in model.state_dict(keep_vars=True).items():
        name = clean_name(key)
        if not isinstance(value, torch.Tensor) or is_wrapper_subclass(memory_of(value)):
            raise UnstorableStateError(
                f"{name} of {type(model).__name__} is a {type(value).__name__}, and a file holds plain "
                "tensors: keep it in train_state or rank_state"
            )
        names[name] = first_names.setdefault(id(value), name)
        tensors.setdefault(names[name], value)
    on_meta = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
    if on_meta:
        raise ValueError(
            f"{len(on_meta)} tensors of {type(model).__name__} are on the meta device ({on_meta[0]}, ...): "
            "give them memory with model.to_empty(device=...) and compute the non-persistent buffers "
            "again, or load the base model with load_weights, which does both"
        )
    own = {_memory(tensor) for tensor in named_tensors(model).values()}
    saved = {_memory(tensor) for tensor in tensors.values()}
    made = [name for name, tensor in tensors.items() if _memory(tensor) not in own]
    lost = [
        clean_name(name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and _memory(parameter) not in saved
    ]
    if made or lost:
        raise UnstorableStateError(
            f"the state_dict() of {type(model).__name__} does not have the model's own tensors, which would "
            f"not come back: copies ({abridged(made)}), trained parameters left out ({abridged(lost)})"
        )
    return ModelTensors(tensors, names)


def _memory(tensor: torch.Tensor) -> int:
    """A key for the memory of a tensor; an empty shard has none, so its ``id`` is used."""
    local = memory_of(tensor)
    return local.untyped_storage().data_ptr() if local.numel() else id(tensor)
