"""Reading the state of optimizers by parameter name, without a step and without changing anything."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_sft._compat.modules import is_wrapper_subclass, local_tensor
from fsdp_sft._model.named import parameter_names
from fsdp_sft._process.codec import encode
from fsdp_sft._tensors.safetensors import dtype_name
from fsdp_sft.dcp_io.content import OptimizerContent
from fsdp_sft.dcp_io.inner_tensors import flatten_state, take_apart
from fsdp_sft.errors import UnstorableStateError, abridged

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]


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


def optimizer_content(model: nn.Module, optimizer: Optimizers) -> OptimizerContent:
    """Read the state of one optimizer or several by name, changing nothing.

    Raises:
        ValueError: If a parameter is not the model's.
        UnstorableStateError: If there is state that could not be loaded again.
    """
    optimizers = as_list(optimizer)
    names = parameter_names(model)
    each = []
    for one in optimizers:
        check_storable(one, optimizers)
        each.append(_content_of_one(one, names))
    if len(each) == 1:
        return each[0]
    tensors = {f"{i}/{key}": t for i, content in enumerate(each) for key, t in content.tensors.items()}
    return OptimizerContent(tensors, {"optimizers": [content.info for content in each]})


def with_inner_tensors(content: OptimizerContent, names: Sequence[str]) -> OptimizerContent:
    """The same content with the states ``names``, which are in tensor subclasses, taken apart.

    Collective: all ranks, with the same names.
    """
    if not names:
        return content
    tensors, parts = flatten_state(content.tensors, names)
    if "optimizers" not in content.info:
        return OptimizerContent(tensors, {**content.info, "parts": parts})
    infos = [dict(info, parts={}) for info in content.info["optimizers"]]
    for key, entries in parts.items():
        number, _, name = key.partition("/")
        infos[int(number)]["parts"][name] = entries
    return OptimizerContent(tensors, {"optimizers": infos})


def check_storable(optimizer: Optimizer, together: Sequence[Optimizer] = ()) -> None:
    """Refuse an optimizer that has state anywhere but in ``optimizer.state``, by parameter.

    Args:
        optimizer: Optimizer to check.
        together: All optimizers that are saved with it.

    Raises:
        UnstorableStateError: If part of its state would be lost.
    """
    kind = type(optimizer).__name__
    if optimizer.state is not optimizer.state or not hasattr(optimizer.state, "pop"):
        raise UnstorableStateError(
            f"{kind}.state is made anew each time it is asked for, so nothing could be put back into it: "
            "pass the optimizers inside as a list, optimizer=[...]"
        )
    hidden = [
        name
        for name, inner in _inner_optimizers(optimizer)
        if inner.state is not optimizer.state and not any(inner is one for one in together)
    ]
    if hidden:
        raise UnstorableStateError(
            f"{kind} has another optimizer inside ({abridged(hidden)}), whose state would be lost: pass the "
            "optimizers inside as a list, optimizer=[...]"
        )
    parameters = {p for group in optimizer.param_groups for p in group["params"]}
    foreign = [key for key in optimizer.state if key not in parameters]
    if foreign:
        raise UnstorableStateError(
            f"{kind} has state of {len(foreign)} things that are no parameter of its groups (such as "
            f"{_described_key(foreign[0])}), which would be lost"
        )
    if getattr(type(optimizer), "state_dict", Optimizer.state_dict) is not Optimizer.state_dict:
        more = optimizer.state_dict().keys() - {"state", "param_groups"}
        if more:
            raise UnstorableStateError(
                f"{kind}.state_dict() has more than state and param_groups ({abridged(more)}), which would "
                "be lost: save it in train_state, and pass the optimizers inside as a list, optimizer=[...]"
            )


def _inner_optimizers(optimizer: Optimizer) -> list[tuple[str, Optimizer]]:
    """(attribute, optimizer) for the optimizers in an optimizer's attributes, also in lists and dicts."""
    held = [(name, inner) for name, value in vars(optimizer).items() for inner in _elements(value)]
    return [(name, inner) for name, inner in held if isinstance(inner, Optimizer) and inner is not optimizer]


def _elements(value: Any) -> list[Any]:
    """The values in a dict or list; anything else as the only element of a list."""
    return list(value.values()) if isinstance(value, dict) else value if type(value) is list else [value]


def _described_key(key: Any) -> str:
    """A key of an optimizer's state in words."""
    return f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)[:80]


def _content_of_one(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> OptimizerContent:
    """The state, parameters and groups of one optimizer, by the names of its parameters."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    parameters: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            fqn = _name_of(parameter, names)
            parameters[fqn] = [dtype_name(parameter.dtype), list(parameter.shape)]
            for name, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(name, str) or "/" in name:
                    raise UnstorableStateError(
                        f"the state of {fqn} has an entry named {name!r}; expected a string without a slash"
                    )
                if isinstance(value, torch.Tensor):
                    tensors[f"{fqn}/{name}"] = _checked_state(value, parameter, f"{fqn}/{name}")
                else:
                    values.setdefault(fqn, {})[name] = _encode(value, f"optimizer state {name!r} of {fqn}")
    groups = [_encode_group(group, index, names) for index, group in enumerate(optimizer.param_groups)]
    info = {"class": type(optimizer).__name__, "parameters": parameters, "groups": groups, "values": values}
    return OptimizerContent(tensors, info)


def _name_of(parameter: nn.Parameter, names: Mapping[nn.Parameter, str]) -> str:
    """The model's name of an optimizer's parameter; refuses one that is not the model's."""
    if parameter not in names:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; make "
            "the optimizer from model.parameters() after the model has been sharded"
        )
    return names[parameter]


def _checked_state(value: torch.Tensor, parameter: nn.Parameter, name: str) -> torch.Tensor:
    """``value``, if it can be stored and sharded again: 0-dim, or shaped and sharded as its parameter."""
    kind = type(local_tensor(value))
    if is_wrapper_subclass(value):
        take_apart(name, value)  # raises for a subclass that does not say what is inside it
    elif kind not in (torch.Tensor, nn.Parameter):
        raise UnstorableStateError(
            f"{name} is a {kind.__name__}: only plain tensors can be stored and sharded again"
        )
    elif value.ndim == 0 and not isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape or isinstance(value, DTensor) != isinstance(parameter, DTensor):
        raise UnstorableStateError(
            f"{name} is a {type(value).__name__} {tuple(value.shape)}, its parameter a "
            f"{type(parameter).__name__} {tuple(parameter.shape)}: only 0-dim tensors and tensors like the "
            "parameter can be sharded again"
        )
    return value


def _encode_group(group: Mapping[str, Any], index: int, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """A parameter group as JSON: names of its parameters, and its options."""
    options = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()  # such as a learning rate; exact, since a float64 holds every float32
        options[key] = _encode(value, f"param_groups[{index}][{key!r}]")
    return {"params": [names[parameter] for parameter in group["params"]], "options": options}


def _encode(value: Any, where: str) -> Any:
    """A value as JSON; ``UnstorableStateError`` if JSON cannot hold it."""
    try:
        return encode(value, where)
    except TypeError as error:
        raise UnstorableStateError(str(error)) from error
