"""Parameters that plain transformers keeps in float32 in a 16-bit model, and FSDP2 groups that honour it.

FSDP2 casts a whole group of parameters to one compute dtype. Modules whose parameters have to compute in
float32 therefore get their own groups.
"""

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_sft._compat.fsdp import keep_trained_flags
from fsdp_sft._compat.models import keep_in_float32_patterns
from fsdp_sft._model.blocks import is_never_called
from fsdp_sft._model.twin import meta_twin
from fsdp_sft._model.view import clean_name, named_tensors, transformers_models
from fsdp_sft._process.callers import warn_caller
from fsdp_sft.shard.names import all_names, without_indices

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


def kept_parameters(
    names: Iterable[str], patterns: Collection[str], dtypes: Mapping[str, torch.dtype]
) -> set[str]:
    """Those of the names of parameters that transformers keeps in float32 in a 16-bit model.

    The class lists some; others it makes float32 when it is built, which ``dtypes`` (from ``plain_dtypes``)
    shows.
    """
    return {name for name in names if dtypes.get(name) == torch.float32 or matches(name, patterns)}


def float32_patterns(model: nn.Module, dtype: torch.dtype) -> tuple[set[str], set[str]]:
    """Patterns of names that transformers keeps in float32: (under this dtype, under float16 alone)."""
    float16_only, always = keep_in_float32_patterns(model)
    return (always | float16_only if dtype == torch.float16 else always), float16_only


def matches(parameter_name: str, patterns: Collection[str]) -> bool:
    """Whether a name contains one of transformers' patterns as whole components."""
    return any(re.search(rf"(?:^|\.){re.escape(p)}(?:\.|$)", parameter_name) for p in patterns)


def _lower_buffers(
    model: nn.Module, dtype: torch.dtype, dtypes: Mapping[str, torch.dtype], patterns: Collection[str]
) -> None:
    """Cast buffers to ``dtype`` that have that dtype in a plain model. FSDP2 casts parameters only."""
    for name, tensor in named_tensors(model).items():
        # ``dtypes`` comes from a model that was built. from_pretrained applies the patterns to buffers that
        # it reads too: DeepSeek-V3's e_score_correction_bias is float32 in a plain bfloat16 model.
        is_buffer = not isinstance(tensor, nn.Parameter)
        if is_buffer and dtypes.get(name) == dtype != tensor.dtype and not matches(name, patterns):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, tensor.to(dtype))


class _Search:
    """Modules to group so that the parameters ``names`` compute in float32, outer modules before inner ones.

    The outermost module that holds nothing else becomes a unit. That way a module whose weights are used
    without calling it (a convolution, for instance) is gathered with the module that uses them. A module that
    owns both such parameters and others is a unit too: the modules of the usual dtype inside it get a group
    of their own, and its own parameters of the usual dtype are cast where they are used.

    Attributes:
        units: What was found.
        missed: Names of parameters that no group can keep in float32.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module], names: set[str]) -> None:
        self.model = model
        self.blocks = {id(block) for block in blocks}
        self.called = {id(module) for module in model.modules() if not is_never_called(module)}
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
        callable_inside = module is not self.model and id(module) in self.called
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
                if parameters and id(child) in self.called:
                    unit.others.append(child)
                elif parameters:
                    self.fill(unit, child)
            elif not all(id(p) in self.kept for p in parameters):
                owns = any(id(p) in self.kept for p in child.parameters(recurse=False))
                if owns and id(child) in self.called and self.can_cast(child):
                    self.visit(child, module)
                else:
                    self.fill(unit, child)

    def can_cast(self, module: nn.Module) -> bool:
        """Whether the module's forward can be replaced, or need not be.

        It cannot in a block, or where it is replaced already, as activation checkpointing may have done.
        """
        usual = any(id(p) not in self.kept for p in module.parameters(recurse=False))
        return not usual or ("forward" not in module.__dict__ and id(module) not in self.blocks)


@dataclass
class Float32Plan:
    """The parts of a model that compute in float32 under a 16-bit policy.

    Attributes:
        units: Groups that compute in float32, by the id of their module.
        kept: Ids of the parameters in them.
        casts_inputs: Whether FSDP2 casts the inputs of blocks to the compute dtype.
    """

    units: dict[int, Float32Unit] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    casts_inputs: bool = True


def plan_float32(
    model: nn.Module, policy: MixedPrecisionPolicy, blocks: Mapping[str, nn.Module], *, warn: bool
) -> Float32Plan:
    """Plan float32 compute by transformers' own rule for loading a model in a 16-bit dtype.

    A warning names the modules for which the rule cannot be followed.
    """
    dtype = policy.param_dtype
    if dtype not in (torch.float16, torch.bfloat16):
        return Float32Plan()
    dtypes, (patterns, float16_only) = plain_dtypes(model, dtype), float32_patterns(model, dtype)
    _lower_buffers(model, dtype, dtypes, patterns)
    named = dict(model.named_parameters(remove_duplicate=False))
    names = kept_parameters(named, patterns, dtypes)
    search = _Search(model, blocks.values(), names)
    search.visit(model, None)
    units, missed = search.units, search.missed
    missed |= {n for n, _ in model.named_parameters() if n not in names and matches(n, float16_only)}
    if missed and warn:
        warn_caller(
            f"these modules compute in {dtype}, although transformers lists them in _keep_in_fp32_modules: "
            f"{', '.join(sorted(set(map(without_indices, missed))))} (transformers itself keeps such "
            "modules in float32 under float16 only, or they cannot be grouped apart from other parameters)"
        )
    # transformers' models cast by themselves, and some need float32 tensors passed between blocks (OLMo's
    # rotary embedding, T5's residual).
    theirs = bool(units) or next(transformers_models(model), None) is not None
    kept = {id(named[name]) for name in names - missed}
    return Float32Plan({id(unit.module): unit for unit in units}, kept, casts_inputs=not theirs)


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
