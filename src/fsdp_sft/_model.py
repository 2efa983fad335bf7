"""A model seen from outside: its tensors by name, its twin without memory, and leaving it as it was."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat import build_like_from_pretrained, original_class
from fsdp_sft._random import unmoved
from fsdp_sft._wrappers import unwrapped
from fsdp_sft.distributed import compute_device, reshard

# torch.compile(model) and checkpoint_wrapper put these into every name below them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class ModelTensors:
    """What of a model belongs in a file.

    Attributes:
        tensors: FQN to parameter or persistent buffer; of tied ones the first name only.
        names: Every name to the first name of its tensor, in the order of the model's state dict.
        frozen: FQNs of parameters that require no gradient.
    """

    tensors: dict[str, torch.Tensor]
    names: dict[str, str]
    frozen: list[str]

    @property
    def ties(self) -> dict[str, str]:
        """Every other name of a tied tensor, to its first."""
        return {name: first for name, first in self.names.items() if name != first}


def model_tensors(model: nn.Module) -> ModelTensors:
    """Name every parameter and persistent buffer of ``model``, which must be resharded.

    Raises:
        ValueError: If something is still on the meta device.
        TypeError: If a module has extra state that is not a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for key, value in unwrapped(model).state_dict(keep_vars=True).items():
        name = clean_name(key)
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} of {type(model).__name__} is a {type(value).__name__}, not a tensor: extra state of "
                "modules cannot be stored without pickle; keep it in train_state or rank_state"
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
    frozen = [n for n, t in tensors.items() if isinstance(t, nn.Parameter) and not t.requires_grad]
    return ModelTensors(tensors, names, frozen)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter to its first FQN."""
    return {parameter: clean_name(name) for name, parameter in unwrapped(model).named_parameters()}


def clean_name(name: str) -> str:
    """An FQN without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under each of its names, persistent or not."""
    named = dict(unwrapped(model).named_parameters(remove_duplicate=False))
    return {**named, **dict(unwrapped(model).named_buffers(remove_duplicate=False))}


def meta_twin(model: nn.Module) -> Any:
    """A second model of the same class and config: unsharded, untied, on the meta device.

    It answers what a sharded model cannot: conversions are found by class name, which FSDP2 replaces, and
    computed buffers come from running the model's own initialisation, which sharded parameters would not
    survive.
    """
    config: Any = copy.deepcopy(model.config)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return build_like_from_pretrained(original_class(model), config, dtype)


def tied_meta_twin(model: Any) -> nn.Module:
    """Another model of the same class and config on the meta device, tied as its config asks for."""
    with torch.device("meta"):
        return original_class(model)(copy.deepcopy(model.config))


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave a model as it was, whatever forwards are run in the block.

    Kept are the mode of each module, buffers (which, and what is in them), attributes that are plain values
    or tensors, and all random number generators of the model's devices and the host. Attributes of these
    kinds that are new are removed: dynamic RoPE notes the longest row that it has seen, as a 0-dim tensor,
    and computes later rows accordingly. A sharded model is resharded. Gradients are the caller's business:
    use ``no_grad``.
    """
    modules = list(model.modules())
    before = [_Attributes(module) for module in modules]
    devices = {tensor.device for tensor in named_tensors(model).values()} | {compute_device(model)}
    try:
        with unmoved(devices):
            yield
    finally:
        for attributes in before:
            attributes.restore()
        reshard(model)


class _Attributes:
    """What a forward may change of one module, beside its parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._plain = {name: value for name, value in vars(module).items() if _is_plain(value)}
        self._buffers = dict(module._buffers)
        self._contents = [
            (tensor, tensor.detach().clone())
            for tensor in (*self._plain.values(), *self._buffers.values())
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta
        ]

    def restore(self) -> None:
        own = vars(self._module)
        for name in [name for name, value in own.items() if _is_plain(value) and name not in self._plain]:
            del own[name]
        own.update(self._plain)
        self._module._buffers.clear()
        self._module._buffers.update(self._buffers)
        with torch.no_grad():
            for tensor, content in self._contents:
                if not _same(tensor, content):
                    tensor.copy_(content)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.Tensor))


def _same(tensor: torch.Tensor, content: torch.Tensor) -> bool:
    return tensor.shape == content.shape and torch.equal(tensor, content)
