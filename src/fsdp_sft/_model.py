"""A model seen from outside: its tensors by name, its twin without memory, and leaving it as it was."""

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fsdp_sft._boxes import local_of
from fsdp_sft._compat import build_like_from_pretrained, is_wrapper_subclass, original_class
from fsdp_sft._random import unmoved
from fsdp_sft._safetensors import bytes_of
from fsdp_sft._wrappers import unwrapped
from fsdp_sft.distributed import compute_device, reshard
from fsdp_sft.errors import CheckpointMismatchError, UnstorableStateError, abridged

# torch.compile(model) and checkpoint_wrapper put these into every name below them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_EXTRA_STATE = "_extra_state"  # as nn.Module names it


@dataclass(frozen=True)
class ModelTensors:
    """What of a model belongs in a file.

    Attributes:
        tensors: FQN to parameter or persistent buffer; of tied ones the first name only.
        names: Every name to the first name of its tensor, in the order of the model's state dict.
        frozen: FQNs of parameters that require no gradient.
        made: Those of ``tensors`` that a module's own code has made for its state dict: writing into them
            does not reach the module, ``load_state_dict`` has to take them.
        extra: Name to what ``get_extra_state`` of a module returned; not in ``tensors``.
    """

    tensors: dict[str, torch.Tensor]
    names: dict[str, str]
    frozen: list[str]
    made: frozenset[str] = frozenset()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def ties(self) -> dict[str, str]:
        """Every other name of a tied tensor, to its first."""
        return {name: first for name, first in self.names.items() if name != first}


def model_tensors(model: nn.Module, *, values: bool = True) -> ModelTensors:
    """Name every parameter, persistent buffer and extra state of ``model``, which must be resharded.

    Args:
        model: It.
        values: False if names and shapes are all that is wanted, as of a model on the meta device.

    Raises:
        ValueError: If something is still on the meta device.
        UnstorableStateError: If a module has state that no file can hold or give back.
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
        if not isinstance(value, torch.Tensor) or is_wrapper_subclass(value):
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
    """The same with extra state among the tensors, for files that hold nothing else.

    Raises:
        UnstorableStateError: If some is no tensor.
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
    """Names of what is no memory of the model's own parameters and buffers."""
    own = named_tensors(model)
    identities = {id(tensor) for tensor in own.values()}
    foreign = {name: tensor for name, tensor in tensors.items() if id(tensor) not in identities}
    if not foreign:
        return frozenset()
    memory = {_memory(tensor) for tensor in own.values()}
    return frozenset(name for name, tensor in foreign.items() if _memory(tensor) not in memory)


def _refuse_left_out(model: nn.Module, tensors: dict[str, torch.Tensor], made: frozenset[str]) -> None:
    """A trained parameter that a module keeps out of its state dict would not come back."""
    saved = {id(tensor) for tensor in tensors.values()}
    trained = [(clean_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    left_out = [(name, parameter) for name, parameter in trained if id(parameter) not in saved]
    if not left_out:
        return
    memory = {_memory(tensor) for tensor in tensors.values()}
    owners = {name.rpartition(".")[0] for name in made}  # these store it in another form
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
    local = local_of(tensor)
    return local.untyped_storage().data_ptr() if local.numel() else id(tensor)


def give_back(model: nn.Module, entries: dict[str, Any]) -> None:
    """Let the modules take what they have made for their state dict: extra state, and forms of their own.

    Args:
        model: A resharded model whose parameters and buffers are loaded already.
        entries: Name to value.

    Raises:
        CheckpointMismatchError: If a module does not take a value.
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
    """Whether a tensor came back; of other objects only whether they are of one type."""
    if not isinstance(expected, torch.Tensor):
        return type(actual) is type(expected)
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        return False
    own = local_of(actual).detach().cpu()
    return bytes_of(own.contiguous()) == bytes_of(local_of(expected).cpu().to(own.dtype).contiguous())


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


def meta_twin(model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """A second model of the same class and config: unsharded, untied, on the meta device.

    It answers what a sharded model cannot: conversions are found by class name, which FSDP2 replaces, and
    computed buffers come from running the model's own initialisation, which sharded parameters would not
    survive. Built in ``dtype``; None is that of its config.
    """
    config: Any = copy.deepcopy(model.config)
    if dtype is None:
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return build_like_from_pretrained(original_class(model), config, dtype)


def tied_meta_twin(model: Any) -> nn.Module:
    """Another model of the same class and config on the meta device, tied as its config asks for."""
    with torch.device("meta"):
        return original_class(model)(copy.deepcopy(model.config))


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors in containers, and in objects such as masks that are more than a tensor; of no module."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, nn.Module):
        inner: Iterable[Any] = ()
        if isinstance(value, (list, tuple)):
            inner = value
        elif isinstance(value, dict):
            inner = value.values()
        elif hasattr(value, "__dict__"):
            inner = vars(value).values()
        for item in inner:
            yield from tensors_in(item, depth - 1)


def text_config(model: nn.Module) -> Any:
    """The config of what reads text: of a model with other parts an inner one; None for a model without."""
    config: Any = getattr(unwrapped(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def rotations_by_length(model: nn.Module) -> dict[str, nn.Module]:
    """Rotary embeddings that change with the longest row of a batch (dynamic NTK, LongRoPE), by name."""
    found = {}
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                found[name] = module
    return found


@contextmanager
def uncompiled() -> Iterator[None]:
    """Nothing is compiled inside, nor is compiled code run: for probes, whose shapes never come again.

    ``set_stance`` counts from the moment it is called, with or without ``with``: called ahead of something
    that raises, it would leave the process without compiled code.
    """
    if "torch._dynamo" not in sys.modules:  # importing it takes seconds, and nothing can be compiled yet
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


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
