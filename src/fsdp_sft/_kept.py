"""What plain transformers keeps in float32 in a 16-bit model, and how FSDP2 groups honour it."""

import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat import keep_in_float32_patterns
from fsdp_sft._model import clean_name, meta_twin, named_tensors
from fsdp_sft.blocks import is_never_called

_ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")


@dataclass
class Float32Unit:
    """A module that computes in float32, and what below it does not.

    Attributes:
        module: Gets a group with float32 compute.
        others: Modules inside of it that share a group with the usual compute dtype.
        user: The module whose forward may use the weights of ``module``, a leaf, without calling it.
        casts: Modules inside of it, or itself, with the names of their own parameters that are gathered with
            the float32 ones and cast where they are used.
    """

    module: nn.Module
    others: list[nn.Module] = field(default_factory=list)
    casts: list[tuple[nn.Module, list[str]]] = field(default_factory=list)
    user: nn.Module | None = None


def transformers_models(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Prefix and module of each outermost model of transformers in ``model``, itself included."""
    found: list[str] = []
    for fqn, module in model.named_modules():
        # By name: a model from elsewhere must not import transformers.
        is_one = any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)
        if is_one and not any(fqn.startswith(prefix) for prefix in found):
            found.append(f"{fqn}." if fqn else "")
            yield found[-1], module


def plain_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Name to dtype of floating tensors as ``from_pretrained(dtype=dtype)`` leaves them, where it is known.

    Without those whose model cannot be built a second time.
    """
    dtypes: dict[str, torch.dtype] = {}
    for prefix, inner in transformers_models(model):
        try:
            twin = named_tensors(meta_twin(inner, dtype))
        except Exception:  # a class that changes its config, or takes more than that
            continue
        for name, tensor in named_tensors(inner).items():
            other = twin.get(_ADAPTED.sub("", clean_name(name)))
            if other is not None and other.is_floating_point() and tensor.is_floating_point():
                dtypes[prefix + name] = other.dtype
    return dtypes


def kept_parameters(model: nn.Module, dtype: torch.dtype, dtypes: dict[str, torch.dtype]) -> set[str]:
    """Names of parameters that transformers keeps in float32 under ``dtype``: listed, or made so."""
    float16_only, always = keep_in_float32_patterns(model)
    patterns = always | float16_only if dtype == torch.float16 else always
    return {
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if dtypes.get(name) == torch.float32 or matches(name, patterns)
    }


def matches(parameter_name: str, patterns: Collection[str]) -> bool:
    """Whether a name has one of transformers' patterns in it, as whole components."""
    return any(re.search(rf"(?:^|\.){re.escape(p)}(?:\.|$)", parameter_name) for p in patterns)


def lower_buffers(model: nn.Module, dtype: torch.dtype, dtypes: dict[str, torch.dtype]) -> None:
    """Give buffers that are ``dtype`` in a plain model of that dtype the same here; FSDP2 casts none."""
    for name, tensor in named_tensors(model).items():
        if isinstance(tensor, nn.Parameter) or dtypes.get(name) != dtype or tensor.dtype == dtype:
            continue
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, tensor.to(dtype))


def float32_units(
    model: nn.Module, blocks: Collection[nn.Module], names: set[str]
) -> tuple[list[Float32Unit], set[str]]:
    """Modules to group so that the parameters ``names`` compute in float32, outer before inner.

    The outermost module that holds nothing else becomes a unit, so that one whose weights are used without
    calling it (a convolution) is gathered with the module that uses them. A module that owns such parameters
    beside others is a unit too: what it contains of the usual dtype gets a group of its own, and what it owns
    of the usual dtype is cast at use.

    Returns:
        (units, names that cannot be honoured).
    """
    return _Search(model, blocks, names).run()


class _Search:
    def __init__(self, model: nn.Module, blocks: Collection[nn.Module], names: set[str]) -> None:
        self.model = model
        self.blocks = {id(block) for block in blocks}
        places: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), []).append(name)
        self.names = places
        # One of several names of a tied parameter does not decide for the others.
        self.kept = {key for key, where in places.items() if all(name in names for name in where)}
        self.missed = {name for name in names if not any(name in places[key] for key in self.kept)}
        self.units: list[Float32Unit] = []

    def run(self) -> tuple[list[Float32Unit], set[str]]:
        self.visit(self.model, None)
        return self.units, self.missed

    def visit(self, module: nn.Module, user: nn.Module | None) -> None:
        """Find units; ``user`` is the innermost module around it that is called, within a block."""
        parameters = list(module.parameters())
        if not any(id(p) in self.kept for p in parameters):
            return
        in_block = user is not None or id(module) in self.blocks
        callable_inside = module is not self.model and not is_never_called(module)
        if callable_inside and all(id(p) in self.kept for p in parameters):
            is_leaf = next(module.children(), None) is None
            self.units.append(Float32Unit(module, user=user if is_leaf else None))
            return
        own = [p for p in module.parameters(recurse=False) if id(p) in self.kept]
        if own and callable_inside and in_block and self.can_cast(module):
            unit = Float32Unit(module)
            self.units.append(unit)
            self.fill(unit, module)
            return
        self.missed.update(name for p in own for name in self.names[id(p)])
        for child in module.children():
            self.visit(child, user if not callable_inside else module if in_block else None)

    def fill(self, unit: Float32Unit, module: nn.Module) -> None:
        usual = [name for name, p in module.named_parameters(recurse=False) if id(p) not in self.kept]
        if usual:
            unit.casts.append((module, usual))
        for child in module.children():
            parameters = list(child.parameters())
            if not any(id(p) in self.kept for p in parameters):
                if parameters and not is_never_called(child):
                    unit.others.append(child)
                elif parameters:
                    self.fill(unit, child)
            elif not all(id(p) in self.kept for p in parameters):
                owns = any(id(p) in self.kept for p in child.parameters(recurse=False))
                if owns and not is_never_called(child) and self.can_cast(child):
                    self.visit(child, module)
                else:
                    self.fill(unit, child)

    def can_cast(self, module: nn.Module) -> bool:
        """Whether the module's own forward can be replaced: no checkpoint would run around it or below it."""
        usual = any(id(p) not in self.kept for p in module.parameters(recurse=False))
        return not usual or ("forward" not in module.__dict__ and id(module) not in self.blocks)


def cast_at_use(module: nn.Module, names: list[str], dtype: torch.dtype) -> None:
    """Let ``module``'s forward see some of its own parameters in ``dtype``."""
    module.__dict__["forward"] = functools.partial(_forward_with_casts, module, tuple(names), dtype)


def _forward_with_casts(
    self: nn.Module, names: tuple[str, ...], dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Any:
    # An instance attribute is found before a parameter of that name.
    for name in names:
        self.__dict__[name] = getattr(self, name).to(dtype)
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        for name in names:
            self.__dict__.pop(name, None)


def gather_with(user: nn.Module, module: Any) -> None:
    """Gather ``module``, an FSDP2 module, before the forward of ``user``, which may not call it.

    A module that is never called stays gathered until its gradients have been reduced; without gradients it
    is freed after the forward of ``user``.
    """
    # FSDP2's own hooks are left out of compiled code too.
    gather: Any = torch.compiler.disable(functools.partial(_gather, module))
    free: Any = torch.compiler.disable(functools.partial(_free, module))
    user.register_forward_pre_hook(gather)
    user.register_forward_hook(free, always_call=True)


def _gather(module: Any, *_: Any) -> None:
    module.unshard()


def _free(module: Any, *_: Any) -> None:
    if not torch.is_grad_enabled():
        module.reshard()
