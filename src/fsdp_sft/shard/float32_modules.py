"""Parameters that plain transformers keeps in float32 in a 16-bit model, and FSDP2 groups that honour it.

FSDP2 casts a whole group of parameters to one compute dtype. Modules whose parameters have to compute in
float32 therefore get their own groups.
"""

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.fsdp import keep_trained_flags
from fsdp_sft._compat.models import keep_in_float32_patterns
from fsdp_sft._model.blocks import is_never_called
from fsdp_sft._model.named import clean_name, named_tensors
from fsdp_sft._model.twin import meta_twin
from fsdp_sft._model.wrappers import transformers_models
from fsdp_sft.shard.names import all_names

_ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")


@dataclass
class Float32Unit:
    """A module that computes in float32, and the parts of it that do not.

    Attributes:
        module: Module that gets a group with float32 compute.
        others: Modules inside it that share a group with the usual compute dtype.
        casts: Modules (inside it, or itself) with the names of their own parameters that are gathered with
            the float32 ones and cast to the usual dtype where they are used.
        user: Module whose forward may use the weights of ``module``, a leaf, without calling it.
    """

    module: nn.Module
    others: list[nn.Module] = field(default_factory=list)
    casts: list[tuple[nn.Module, list[str]]] = field(default_factory=list)
    user: nn.Module | None = None


def plain_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Dtypes in which ``from_pretrained(dtype=dtype)`` leaves floating-point tensors, by name.

    Tensors of a model that cannot be built a second time are left out.
    """
    dtypes: dict[str, torch.dtype] = {}
    for prefix, inner in transformers_models(model):
        try:
            twin = named_tensors(meta_twin(inner, dtype))
        except Exception:  # a class that changes its config, or needs more than the config
            continue
        for name, tensor in named_tensors(inner).items():
            other = twin.get(_ADAPTED.sub("", clean_name(name)))
            if other is not None and other.is_floating_point() and tensor.is_floating_point():
                dtypes[prefix + name] = other.dtype
    return dtypes


def kept_parameters(model: nn.Module, dtype: torch.dtype, dtypes: dict[str, torch.dtype]) -> set[str]:
    """Names of parameters that transformers keeps in float32 in a model of ``dtype``.

    The class lists some; others it makes float32 when it is built, which ``dtypes`` (from ``plain_dtypes``)
    shows.
    """
    patterns = _patterns(model, dtype)
    return {
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if dtypes.get(name) == torch.float32 or matches(name, patterns)
    }


def _patterns(model: nn.Module, dtype: torch.dtype) -> set[str]:
    float16_only, always = keep_in_float32_patterns(model)
    return always | float16_only if dtype == torch.float16 else always


def matches(parameter_name: str, patterns: Collection[str]) -> bool:
    """Whether a name contains one of transformers' patterns as whole components."""
    return any(re.search(rf"(?:^|\.){re.escape(p)}(?:\.|$)", parameter_name) for p in patterns)


def lower_buffers(model: nn.Module, dtype: torch.dtype, dtypes: dict[str, torch.dtype]) -> None:
    """Cast buffers to ``dtype`` that have that dtype in a plain model. FSDP2 casts parameters only."""
    patterns = _patterns(model, dtype)
    for name, tensor in named_tensors(model).items():
        if isinstance(tensor, nn.Parameter) or dtypes.get(name) != dtype or tensor.dtype == dtype:
            continue
        # ``dtypes`` comes from a model that was built. from_pretrained applies the patterns to buffers that
        # it reads too: DeepSeek-V3's e_score_correction_bias is float32 in a plain bfloat16 model.
        if matches(name, patterns):
            continue
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, tensor.to(dtype))


def float32_units(
    model: nn.Module, blocks: Collection[nn.Module], names: set[str]
) -> tuple[list[Float32Unit], set[str]]:
    """Modules to group so that the parameters ``names`` compute in float32, outer modules before inner ones.

    The outermost module that holds nothing else becomes a unit. That way a module whose weights are used
    without calling it (a convolution, for instance) is gathered with the module that uses them. A module that
    owns both such parameters and others is a unit too: the modules of the usual dtype inside it get a group
    of their own, and its own parameters of the usual dtype are cast where they are used.

    Args:
        model: The model, before it is sharded.
        blocks: Its transformer blocks.
        names: Names of the parameters that are to compute in float32.

    Returns:
        (units, names of parameters that no group can keep in float32).
    """
    search = _Search(model, blocks, names)
    search.visit(model, None)
    return search.units, search.missed


class _Search:
    """The search of ``float32_units`` through the modules of one model."""

    def __init__(self, model: nn.Module, blocks: Collection[nn.Module], names: set[str]) -> None:
        self.model = model
        self.blocks = {id(block) for block in blocks}
        self.names = all_names(model)
        # A tied parameter is kept in float32 only if all of its names are to be.
        self.kept = {key for key, where in self.names.items() if all(name in names for name in where)}
        self.missed = {name for name in names if not any(name in self.names[key] for key in self.kept)}
        self.units: list[Float32Unit] = []

    def visit(self, module: nn.Module, user: nn.Module | None) -> None:
        """Find units in ``module``; ``user`` is the innermost called module around it, within a block."""
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
        """Note which parts of ``module``, a unit's module or one inside it, have the usual dtype."""
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
        """Whether the module's forward can be replaced, or need not be.

        It cannot in a block, or where it is replaced already, as activation checkpointing may have done.
        """
        usual = any(id(p) not in self.kept for p in module.parameters(recurse=False))
        return not usual or ("forward" not in module.__dict__ and id(module) not in self.blocks)


def cast_at_use(module: nn.Module, names: list[str], dtype: torch.dtype) -> None:
    """Let the forward of ``module`` see its own parameters ``names`` in ``dtype``."""
    module.__dict__["forward"] = functools.partial(_forward_with_casts, module, tuple(names), dtype)


def _forward_with_casts(
    self: nn.Module, names: tuple[str, ...], dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Any:
    # An attribute in __dict__ is found before the parameter of that name, which nn.Module.__getattr__ finds.
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
    # Not compiled, like FSDP2's own hooks.
    gather: Any = torch.compiler.disable(functools.partial(_gather, module))
    free: Any = torch.compiler.disable(functools.partial(_free, module))
    user.register_forward_pre_hook(gather)
    user.register_forward_hook(free, always_call=True)


def _gather(module: Any, *_: Any) -> None:
    module.unshard()


def _free(module: Any, *_: Any) -> None:
    if not torch.is_grad_enabled():
        keep_trained_flags(module)
        module.reshard()
