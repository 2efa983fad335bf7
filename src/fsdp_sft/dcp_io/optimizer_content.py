"""Reading the state of optimizers by parameter name, without a step and without changing anything."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_sft._compat.modules import is_wrapper_subclass, local_tensor
from fsdp_sft._process.codec import encode
from fsdp_sft._tensors.safetensors import dtype_name
from fsdp_sft._tensors.sharding import own_part
from fsdp_sft.errors import UnstorableStateError, abridged

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]
Content: TypeAlias = tuple[dict[str, Any], dict[str, torch.Tensor]]


def as_list(optimizer: Optimizers) -> list[Optimizer]:
    """One optimizer or several, as a list.

    Raises:
        TypeError: If an entry is not an optimizer.
        ValueError: If the list is empty.
    """
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not given:
        raise ValueError("optimizer must be an optimizer or a list of them, got an empty list")
    for one in given:
        if not hasattr(one, "param_groups") or not hasattr(one, "state"):
            raise TypeError(
                f"optimizer must be an optimizer or a list of them, got {type(one).__name__}; train_step "
                "takes model, micro_batches, optimizer in this order"
            )
    return given  # type: ignore[return-value]


def optimizer_content(optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str]) -> Content:
    """Read the state of any number of optimizers by name, changing nothing.

    Args:
        optimizers: The optimizers; none have no content.
        names: The model's name of each parameter.

    Returns:
        (class, parameters, groups and state other than tensors as JSON, see ``Manifest``; the live tensors of
        the state by ``<fqn>/<state name>``, of several optimizers with the optimizer's number in front).

    Raises:
        ValueError: If a parameter is not the model's.
        UnstorableStateError: If there is state that could not be loaded again.
    """
    each = [content_of_one(one, names, optimizers) for one in optimizers]
    if len(each) < 2:
        return each[0] if each else ({}, {})
    tensors = {f"{i}/{key}": t for i, (_, own) in enumerate(each) for key, t in own.items()}
    return {"optimizers": [info for info, _ in each]}, tensors


# State in tensor subclasses, such as 8-bit moments, is stored as the tensors inside them.
#
# torch's protocol for such classes takes them apart (``__tensor_flatten__``) and rebuilds them
# (``__tensor_unflatten__``). Each rank's part lies as it is beside the rank's own state, so the same shards
# are restored bitwise and no others: a class quantises elements in blocks of its own.

PLAIN = "values"  # name of the one inner tensor of a part that is a plain tensor


def parts_inside(
    states: Mapping[str, torch.Tensor], names: Sequence[str], *, numbered: bool
) -> dict[str, list[Any]]:
    """Take apart this rank's parts of the states that are in a subclass on some rank; one replica has each.

    Args:
        states: The live tensors, see ``optimizer_content``.
        names: Names of these states, the same on all ranks.
        numbered: Whether names begin with the number of one of several optimizers.

    Returns:
        [class, context, tensors inside] by ``<fqn>/<state name>``.
    """
    owned = [name for name in names if own_part(states[name]) is not None]
    return {
        name.partition("/")[2] if numbered else name: [*_take_apart(name, states[name])] for name in owned
    }


def _take_apart(name: str, tensor: torch.Tensor) -> tuple[str | None, Any, dict[str, torch.Tensor]]:
    """Class, context and inner tensors of this rank's part of a state; no class for a plain tensor.

    Raises:
        UnstorableStateError: If it is of a subclass that does not say what is inside it, or whose inner
            tensors or context cannot be stored.
    """
    local: Any = local_tensor(tensor)
    if not is_wrapper_subclass(local):
        return None, None, {PLAIN: local.detach()}
    kind = type(local)
    if not hasattr(local, "__tensor_flatten__"):
        raise UnstorableStateError(
            f"{name} is a {kind.__name__}, which does not say what is inside it (__tensor_flatten__), so no "
            "checkpoint could hold it: use an optimizer with other state"
        )
    names, context = local.__tensor_flatten__()
    inner = {str(n): getattr(local, n) for n in names}
    nested = [n for n, t in inner.items() if type(t) not in (torch.Tensor, torch.nn.Parameter)]
    if nested:
        raise UnstorableStateError(f"{name} is a {kind.__name__} with subclasses inside it ({nested})")
    _encode(context, f"what {kind.__name__} says of {name}")  # raises if that is not possible
    return f"{kind.__module__}.{kind.__qualname__}", context, inner


def content_of_one(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], together: Sequence[Optimizer]
) -> Content:
    """The state of one optimizer; see ``optimizer_content``.

    Args:
        optimizer: The optimizer.
        names: The model's name of each parameter.
        together: All optimizers that are saved with it.
    """
    _check_storable(optimizer, together)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    parameters: dict[str, list[Any]] = {}
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the "
                    "model's; make the optimizer from model.parameters() after the model has been sharded"
                )
            fqn = names[parameter]
            parameters[fqn] = [dtype_name(parameter.dtype), list(parameter.shape)]
            for name, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(name, str) or "/" in name:
                    raise UnstorableStateError(
                        f"the state of {fqn} has an entry named {name!r}; expected a string without a slash"
                    )
                if isinstance(value, torch.Tensor):
                    _check_state(value, parameter, f"{fqn}/{name}")
                    tensors[f"{fqn}/{name}"] = value
                else:
                    values.setdefault(fqn, {})[name] = _encode(value, f"optimizer state {name!r} of {fqn}")
        # A tensor, such as a learning rate, is exact as a number: a float64 holds every float32.
        numbers = {
            key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key != "params"
        }
        options = {key: _encode(value, f"param_groups[{index}][{key!r}]") for key, value in numbers.items()}
        groups.append({"params": [names[parameter] for parameter in group["params"]], "options": options})
    info = {"class": type(optimizer).__name__, "parameters": parameters, "groups": groups, "values": values}
    return info, tensors


def _check_storable(optimizer: Optimizer, together: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that has state anywhere but in ``optimizer.state``, by parameter.

    Raises:
        UnstorableStateError: If part of its state would be lost.
    """
    lost: list[str] = []
    if optimizer.state is not optimizer.state:
        lost.append("a state that is made anew each time it is asked for")
    for name, value in vars(optimizer).items():
        held = value.values() if isinstance(value, dict) else value if type(value) is list else [value]
        others = [one for one in held if isinstance(one, Optimizer) and one not in together]
        if any(one.state is not optimizer.state for one in others):
            lost.append(f"another optimizer inside ({name})")
    foreign = optimizer.state.keys() - {p for group in optimizer.param_groups for p in group["params"]}
    if foreign:
        lost.append(f"state of what is no parameter of its groups ({abridged(map(repr, foreign))})")
    if getattr(type(optimizer), "state_dict", Optimizer.state_dict) is not Optimizer.state_dict:
        more = optimizer.state_dict().keys() - {"state", "param_groups"}
        lost += [f"more than state and param_groups ({abridged(more)})"] if more else []
    if lost:
        raise UnstorableStateError(
            f"{type(optimizer).__name__} has {'; '.join(lost)}, which would be lost: pass the optimizers "
            "inside as a list, optimizer=[...], and save the rest in train_state"
        )


def _check_state(value: torch.Tensor, parameter: nn.Parameter, name: str) -> None:
    """Refuse what cannot be stored and sharded again: 0-dim, or shaped and sharded as its parameter, can."""
    kind = type(local_tensor(value))
    if is_wrapper_subclass(value):
        _take_apart(name, value)  # raises for a subclass that does not say what is inside it
    elif kind not in (torch.Tensor, nn.Parameter):
        raise UnstorableStateError(
            f"{name} is a {kind.__name__}: only plain tensors can be stored and sharded again"
        )
    elif value.ndim == 0 and not isinstance(value, DTensor):
        return
    if value.shape != parameter.shape or isinstance(value, DTensor) != isinstance(parameter, DTensor):
        raise UnstorableStateError(
            f"{name} is a {type(value).__name__} {tuple(value.shape)}, its parameter a "
            f"{type(parameter).__name__} {tuple(parameter.shape)}: only 0-dim tensors and tensors like the "
            "parameter can be sharded again"
        )


def _encode(value: Any, where: str) -> Any:
    """A value as JSON; ``UnstorableStateError`` if JSON cannot hold it."""
    try:
        return encode(value, where)
    except TypeError as error:
        raise UnstorableStateError(str(error)) from error
