"""Every private name of torch and transformers that the library touches, each with its reason."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# The documented base class of modes that see every operation; only its module's name has an underscore.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer below ``module`` by ``function`` of it.

    ``nn.Module._apply`` is what ``.to()`` runs on; there is no public form that takes a function. FSDP2
    overrides it to take up the new shards, which makes it the supported way to change a shard's dtype.
    """
    module._apply(function)


def keep_in_float32_patterns(model: nn.Module) -> tuple[set[str], set[str]]:
    """Name patterns that transformers keeps in float32: under float16 only, and under bfloat16 too.

    ``_keep_in_fp32_modules`` and ``_keep_in_fp32_modules_strict`` are class attributes with no public
    reader; see ``PreTrainedModel`` in transformers' ``modeling_utils.py``.
    """

    def collected(attribute: str) -> set[str]:
        names: set[str] = set()
        for module in model.modules():
            value: Any = getattr(module, attribute, None)
            names.update([value] if isinstance(value, str) else value or ())
        return names

    return collected("_keep_in_fp32_modules"), collected("_keep_in_fp32_modules_strict")


@contextmanager
def careful_gloo() -> Iterator[None]:
    """Around the making of gloo groups: ranks connect when they first talk, and one thread does the work.

    Without it each rank of each group connects to every other at once. Only this variable of the
    environment says so: ``lazy_init`` of a device alone changes nothing (torch 2.13).

    Of gloo's two threads each assigns the name of what it has done to one string without a lock
    (``lastCompletedWorkName`` in ``ProcessGroupGloo::runLoop``): a name too long to lie in the string itself,
    such as that of DTensor's all-gather, is then freed twice now and then, and the process dies somewhere
    else. The number of threads is an option of the class, which ``new_group`` does not hand on.
    """
    import torch.distributed.distributed_c10d as c10d

    original = getattr(c10d, "ProcessGroupGloo", None)  # a build of torch may have none
    is_chosen = _LAZY_GLOO in os.environ
    if original is not None and original.__name__ != "OneThread":  # as within another such block
        c10d.ProcessGroupGloo = _one_thread(original)  # type: ignore[misc]
    if not is_chosen:
        os.environ[_LAZY_GLOO] = "1"
    try:
        yield
    finally:
        if original is not None:
            c10d.ProcessGroupGloo = original  # type: ignore[misc]
        if not is_chosen:
            os.environ.pop(_LAZY_GLOO, None)


@functools.cache
def _one_thread(original: Any) -> Any:
    class OneThread(original):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = original._Options()
            interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            options._devices = [original.create_device(interface=name) for name in interfaces] or [
                original.create_default_device()
            ]
            options._timeout, options._threads = timeout, 1
            super().__init__(store, rank, size, options)

    return OneThread


_LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"


# --- chat templates ---------------------------------------------------------------------------------------


def render_chat(
    template: str,
    messages: list[dict[str, Any]],
    *,
    variables: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Render one conversation in transformers' sandbox.

    ``render_jinja_template`` is what ``apply_chat_template`` calls, but only the former hands out the
    character spans of ``{% generation %}`` blocks.

    Returns:
        (text, character spans of the generation blocks; empty for a template without them).
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    # Asking for spans of a template without the tag logs a warning.
    tagged = _has_generation_tag(template)
    render: Any = render_jinja_template  # its annotation says that a str comes back; a pair does, up to 5.23
    texts, spans = render(
        [messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=tagged,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    return texts[0], [(int(start), int(end)) for start, end in (spans[0] if tagged else ())]


@functools.lru_cache(maxsize=64)
def _has_generation_tag(template: str) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def backend_that_encodes(tokenizer: Any) -> Any | None:
    """The ``tokenizers.Tokenizer`` whose ``encode_batch_fast`` gives the ids that calling ``tokenizer`` does.

    None if the class has a way of its own, or if the backend must first be told not to pad, cut or split,
    which a call does. Only the backend tokenises without offsets, and whether a class encodes by itself
    shows in the private ``_encode_plus`` alone.
    """
    from transformers import PreTrainedTokenizerFast

    kind: Any = type(tokenizer)
    base: Any = PreTrainedTokenizerFast
    ways = ("__call__", "_encode_plus")
    if not isinstance(tokenizer, base) or any(getattr(kind, way) is not getattr(base, way) for way in ways):
        return None
    backend = tokenizer.backend_tokenizer
    is_ready = (
        backend.truncation is None
        and backend.padding is None
        and backend.encode_special_tokens == tokenizer.split_special_tokens
    )
    return backend if is_ready else None


# --- export -----------------------------------------------------------------------------------------------


def revert_weight_conversion(
    model: nn.Module, state_dict: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Names and tensors as a checkpoint on the Hub has them, from those that the model has.

    ``save_pretrained`` does this between gathering and writing, and offers no way to do it for a part of
    the model. Returns ``state_dict`` itself if the architecture has no conversions.

    Args:
        model: An unsharded model: conversions are looked up by its class, which FSDP2 replaces.
        state_dict: Model names to tensors, which may be on the meta device.
    """
    from transformers.core_model_loading import revert_weight_conversion as revert

    reverted: dict[str, torch.Tensor] = revert(model, state_dict)  # type: ignore[arg-type]
    return reverted


def copy_weight_conversions(source: nn.Module, target: nn.Module) -> None:
    """Let ``target`` be saved in the format that ``source`` was loaded from.

    ``from_pretrained`` leaves what it converted in ``_weight_conversions``, which only saving reads.
    """
    conversions = getattr(source, "_weight_conversions", None)
    if conversions is not None:
        target._weight_conversions = conversions


def names_left_out_on_save(model: nn.Module) -> tuple[set[str], set[str]]:
    """(names that ``save_pretrained`` never writes, patterns of tied names that it leaves out).

    ``_keys_to_ignore_on_save`` and ``_tied_weights_keys`` are class attributes with no public reader; see
    ``remove_tied_weights_from_state_dict`` in transformers' ``modeling_utils.py``.
    """
    ignored: Any = getattr(model, "_keys_to_ignore_on_save", None) or ()
    tied: set[str] = set()
    for prefix, module in model.named_modules():
        keys: Any = getattr(module, "_tied_weights_keys", None) or ()
        tied.update(f"{prefix}.{key}" if prefix else key for key in keys)
    return set(ignored), tied


# --- weights ----------------------------------------------------------------------------------------------


def original_class(model: nn.Module) -> type[nn.Module]:
    """The class that a model had before ``fully_shard`` replaced it by a subclass of its own making.

    transformers looks conversions up by class name and tells its own code by ``__module__``; FSDP2's
    dynamic class answers neither as the original does.
    """
    from torch.distributed.fsdp import FSDPModule

    bases: Any = type(model).__mro__
    original: type[nn.Module] = next(base for base in bases if not issubclass(base, FSDPModule))
    return original


def build_like_from_pretrained(cls: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model on the meta device with untied weights: what ``from_pretrained`` builds before it reads.

    ``get_init_context`` is the classmethod that decides the context of the build, ``patch_output_recorders``
    and ``_get_dtype_plan`` the two steps after it. Parameters that the class keeps in float32 under
    ``dtype`` are float32. ``config`` is changed: it takes ``dtype``, and the model refers to it.
    """
    from transformers.monkey_patching import patch_output_recorders
    from transformers.utils.generic import ContextManagers

    config.dtype = dtype
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            getattr(config, name).dtype = dtype
    with ContextManagers(cls.get_init_context(dtype, False, False, None)):
        model = cls(config)
        patch_output_recorders(model)
    kept = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    if kept:
        import re

        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.is_floating_point() and re.search("|".join(kept), name):
                parameter.data = parameter.data.to(torch.float32)
    return model


def tied_names(model: nn.Module) -> dict[str, str]:
    """Target name to source name of each tie that the model's config asks for.

    ``all_tied_weights_keys`` is what transformers itself ties by; models from elsewhere lack it.
    """
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def drop_tie(model: nn.Module, target: str) -> None:
    """Forget one tie, as ``tie_weights`` does when a checkpoint holds two different tensors for it."""
    model.all_tied_weights_keys.pop(target, None)  # type: ignore[operator,union-attr]


def tie_by_names(model: nn.Module) -> None:
    """Tie what ``tied_names`` lists, without asking the config again (``tie_weights`` alone would)."""
    model.tie_weights(recompute_mapping=False)  # type: ignore[operator]


def match_checkpoint_keys(
    twin: nn.Module, keys: list[str], conversions: list[Any]
) -> tuple[dict[str, tuple[Any, dict[str, list[str]]]], dict[str, str]]:
    """Which checkpoint keys make which targets: the first half of transformers' loading, without tensors.

    The private loop is ``convert_and_load_state_dict_in_model``; it cannot be called for its matching
    alone. Order matters: keys are visited in transformers' natural order, which is the order in which
    experts are stacked.

    Args:
        twin: The model, unsharded, on the meta device and untied.
        keys: Names in the checkpoint.
        conversions: From ``weight_conversions``; those that match are marked as used.

    Returns:
        ({first target: (WeightConverter or None for a renaming, {source pattern: keys})},
        {unexpected name: checkpoint key}).
    """
    from copy import deepcopy

    from transformers import WeightConverter
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    state: dict[str, Any] = twin.state_dict()
    prefix: Any = twin.base_model_prefix
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    matched: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    unexpected: dict[str, str] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name in state:
            fresh = deepcopy(by_pattern[pattern]) if pattern is not None and name not in matched else None
            _, sources = matched.setdefault(name, (fresh, {}))
            sources.setdefault(key if pattern is None else pattern, []).append(key)
        elif pattern is not None:
            first, *_ = targets = by_pattern[pattern].target_patterns
            unexpected.update({name.replace(first, target): key for target in targets})
        else:
            unexpected[name] = key
    return matched, unexpected


def weight_conversions(twin: nn.Module) -> list[Any]:
    """Transformers' renames and conversions for a model's class and its sub-models (a fresh copy).

    The first call makes the table of all architectures, 1,044 entries that compile a pattern each: a quarter
    of a second, and a model needs some ten of them. They are compiled when they are used.
    """
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    with _patterns_compiled_at_use(core_model_loading):
        return list(get_model_conversion_mapping(twin))  # type: ignore[arg-type]


@contextmanager
def _patterns_compiled_at_use(module: Any) -> Iterator[None]:
    """While it lasts, ``re.compile`` in a module makes patterns that are compiled when first asked."""
    known = getattr(module, "re", None)
    if known is not re:  # it has no such name any more, or another thread is in here
        yield
        return
    module.re = _LazyRe()
    try:
        yield
    finally:
        module.re = known


class _LazyRe:
    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)

    @staticmethod
    def compile(pattern: str, flags: int = 0) -> "_LazyPattern":
        return _LazyPattern(pattern, flags)


class _LazyPattern:
    def __init__(self, pattern: str, flags: int) -> None:
        self._made_of = (pattern, flags)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if "compiled" not in vars(self):
            self.compiled = re.compile(*self._made_of)
        return getattr(self.compiled, name)

    def __deepcopy__(self, memo: Any) -> "_LazyPattern":
        return self


def run_conversion(
    twin: nn.Module, first_target: str, converter: Any, tensors: dict[str, list[torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Run one ``WeightConverter`` over tensors (by source pattern) as loading does; see its ``convert``.

    Returns:
        Target name to converted tensor.
    """
    from copy import deepcopy

    fresh = deepcopy(converter)
    for pattern, collected in tensors.items():
        fresh.collected_tensors[pattern].extend(collected)
    converted = fresh.convert(first_target, model=twin, config=twin.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def keep_used_conversions(model: nn.Module, conversions: list[Any]) -> None:
    """Leave what matched where ``save_pretrained`` looks for it, as ``from_pretrained`` does."""
    model._weight_conversions = [entry for entry in conversions if entry.was_used()]  # type: ignore[assignment]


def ignored_on_load(twin: nn.Module) -> tuple[list[str], list[str]]:
    """(patterns of keys that may be missing, patterns of keys that may be unexpected).

    The class attributes have no public reader; the two extra patterns are those of
    ``_adjust_missing_and_unexpected_keys``, for buffers that older versions saved.
    """
    buffers = [name for name, _ in twin.named_buffers()]
    unexpected: list[str] = list(getattr(twin, "_keys_to_ignore_on_load_unexpected", None) or ())
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        unexpected.append(r"(^|\.)position_ids$")
    return list(getattr(twin, "_keys_to_ignore_on_load_missing", None) or ()), unexpected


def initialise_computed(twin: nn.Module, missing: set[str]) -> dict[str, torch.Tensor]:
    """Run the model's own initialisation for its computed buffers and the missing keys, on the CPU.

    transformers marks what has been loaded by ``_is_hf_initialized`` and lets ``initialize_weights`` fill
    the rest; the same marks on the meta tensors of a twin keep it from the rest here.

    Returns:
        Values of all non-persistent buffers and of ``missing``.
    """
    ties = set(tied_names(twin))
    computed = {name for name, _ in twin.named_non_persistent_buffers()}  # type: ignore[operator]
    values: dict[str, torch.Tensor] = {}
    for name in [*computed, *(missing - ties)]:
        parent, _, leaf = name.rpartition(".")
        module = twin.get_submodule(parent)
        empty = torch.empty_like(getattr(module, leaf), device="cpu")
        value = nn.Parameter(empty, empty.is_floating_point()) if leaf in module._parameters else empty
        setattr(module, leaf, value)
    for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
        if name not in computed and (name not in missing or name in ties):
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    twin.initialize_weights()  # type: ignore[operator]
    for name in [*computed, *(missing - ties)]:
        parent, _, leaf = name.rpartition(".")
        values[name] = getattr(twin.get_submodule(parent), leaf).detach()
    return values


def wrapper_tensor(cls: type[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """A tensor subclass's instance without storage (documented for dispatch, yet underscored)."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))


def keeps_shards_on_host(model: nn.Module) -> bool:
    """Whether a sharded model was given ``CPUOffloadPolicy``: FSDP2 remembers it where nobody can ask."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            if any(
                group is not None and isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups
            ):
                return True
    return False


def offset_in_checkpoint(tensor: torch.Tensor) -> int:
    """First byte, in its file, of the storage of a tensor that ``torch.load(map_location="meta")`` gave.

    ``torch.load`` leaves it on storages that it did not read, under a private name, so that others can.

    Raises:
        ValueError: If the tensor has no storage in the file.
    """
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if not isinstance(offset, int):
        raise ValueError("a tensor has no bytes of its own in the file")
    return offset


# --- packing ----------------------------------------------------------------------------------------------


def compute_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Floating dtypes of a model's parameters, and those that FSDP2 casts them to for the forward.

    ``fully_shard`` keeps its ``mp_policy`` in a state that has no public reader.
    """
    from torch.distributed.fsdp import FSDPModule

    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            policy: Any = module._get_fsdp_state()._mp_policy
            dtypes |= {policy.param_dtype} - {None}
    return dtypes


def native_mesh(model: nn.Module) -> Any | None:
    """The mesh on which transformers has sharded a model while loading it, of the axes that have ranks.

    A model without such a mesh, None. ``from_pretrained(distributed_config=...)`` keeps it in the model; the
    meshes of parameters do not show ranks along which nothing but experts is cut.
    """
    manager: Any = getattr(model, "_mesh_manager", None)
    if manager is None:
        return None
    axes = ("pp", "dp_replicate", "fsdp", "tp")
    wide = tuple(axis for axis in axes if manager.get_mesh(axis).size() > 1)
    return manager.get_mesh(wide) if wide else None


def reduction_dtype(module: nn.Module, gradient: torch.dtype) -> torch.dtype:
    """The dtype in which FSDP2 reduces gradients of a module that it has been told to shard.

    As ``compute_dtypes``: the policy has no public reader.

    Args:
        module: A group of FSDP2's.
        gradient: Dtype of its stored shards, if the policy says nothing.
    """
    policy: Any = module._get_fsdp_state()._mp_policy  # type: ignore[operator]
    return policy.reduce_dtype or policy.param_dtype or gradient


def attention_of(model: nn.Module) -> str:
    """Which attention implementation a transformers model runs: its config has it under a private name."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None) or "its own")


def varlen_attn_takes_gqa() -> bool:
    """Whether torch's varlen attention has ``enable_gqa``; torch 2.11 wants keys and values repeated."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def is_hub_dataset(rows: Any) -> bool:
    """Whether it is a ``datasets.Dataset``; that library may not be installed."""
    return hasattr(rows, "_fingerprint") and hasattr(rows, "column_names") and hasattr(rows, "__len__")


def dataset_fingerprint(rows: Any) -> str | None:
    """What ``datasets`` knows a ``Dataset`` by: of its files and of all that was done to it; else None.

    There is no public form.
    """
    return str(rows._fingerprint) if is_hub_dataset(rows) else None


def versions_of_tokenizers() -> list[str]:
    """Versions of what turns a conversation into ids."""
    from importlib.metadata import version

    return [version("transformers"), version("tokenizers")]


def shares_of_stream(rows: Any) -> int:
    """Into how many shares a Hugging Face stream was split, of which it is one; 1 for anything else.

    ``datasets.distributed.split_dataset_by_node`` leaves no public mark.
    """
    return int(getattr(getattr(rows, "_distributed", None), "world_size", None) or 1)


# --- loss -------------------------------------------------------------------------------------------------


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` or ``module.compile()`` was called on this very module.

    ``Module.compile`` leaves the compiled call in ``_compiled_call_impl``, ``torch.compile`` the module in
    the ``_orig_mod`` of a wrapper; neither has a public reader.
    """
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def compiled_call_of(module: nn.Module) -> Callable[..., Any] | None:
    """What ``module.compile()`` has put in the place of the module's call; None without."""
    return module.__dict__.get("_compiled_call_impl")


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Put something around what ``compiled_call_of`` gave: hooks of autograd's for what it saves.

    Hooks of a module's own would be traced with it, and torch has no others around a compiled call.
    """
    module.__dict__["_compiled_call_impl"] = call


def foreign_hooks(module: nn.Module, *, pre: bool) -> list[Any]:
    """Hooks on a module's call that may look at or change what it returns.

    FSDP2's do not, nor those that count what checkpointing has done, nor torch's observers of every module.

    Hooks are kept in attributes without a public reader.

    Args:
        module: Looked at by itself, without what is below it.
        pre: Take those before the forward too, which may change what it is called with.
    """
    from torch.nn.modules import module as hooks_of_all

    kinds = ["forward", "backward", "backward_pre", *(["forward_pre"] if pre else [])]
    own = [hook for kind in kinds for hook in getattr(module, f"_{kind}_hooks").values()]
    kinds = [kind for kind in kinds if kind != "forward_pre"]
    of_all = [hook for kind in kinds for hook in getattr(hooks_of_all, f"_global_{kind}_hooks").values()]
    foreign = [hook for hook in own if not _defined_in(hook, "torch.distributed.fsdp.", "fsdp_sft.sac.")]
    # CommDebugMode and the counters of FLOPs and modules, which change nothing.
    return foreign + [hook for hook in of_all if not _defined_in(hook, "torch.")]


def _defined_in(hook: Any, *packages: str) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(packages)


LIMIT_LOGGER = "torch._dynamo.convert_frame"


def recompile_options(variants: int) -> dict[str, Any]:
    """Keywords of ``torch.compile`` that let one piece of code be compiled in so many variants.

    torch 2.13 has ``recompile_limit``; before it the limit is one of the process, which is raised.
    """
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": variants}
    from torch._dynamo import config

    config.recompile_limit = max(variants, config.recompile_limit)
    return {}


def limit_that_was_hit(record: Any) -> str | None:
    """The limit by which Dynamo has stopped compiling a piece of code, if a log record says so.

    The log is the only place where torch says it; what runs afterwards is plain Python.
    """
    hit = str(record.msg).startswith("torch._dynamo hit config.")
    return str(record.args[0]) if hit and record.args else None


# --- activation checkpointing -----------------------------------------------------------------------------


def checkpointing_flag(recompute: Callable[..., Any]) -> dict[str, Any]:
    """Attributes that make a ``GradientCheckpointingLayer`` of transformers recompute its forward.

    The layer reads the function from a private attribute; ``gradient_checkpointing_enable``, which sets it,
    takes all blocks or none.
    """
    return {"gradient_checkpointing": True, "_gradient_checkpointing_func": recompute}


def checkpoints_its_forward(block: nn.Module) -> bool:
    """Whether a block is transformers' layer with a flag, and recomputes its ``forward``.

    Up to some version before 5.23 the layer recomputed its ``__call__`` instead, and with it the hooks and,
    of a compiled block, the compiled code, which then runs inside of the checkpoint.
    """
    return is_checkpointing_layer(block) and type(block).__call__ is nn.Module.__call__


def is_checkpointing_layer(block: nn.Module) -> bool:
    """Whether a block is a ``GradientCheckpointingLayer``, by name: transformers may not be imported."""
    return any(
        base.__name__ == "GradientCheckpointingLayer" and base.__module__.startswith("transformers.")
        for base in type(block).__mro__
    )


def compile_memory_budget() -> float:
    """The share of activations that compiled code may keep, as set for the whole process.

    ``torch._functorch.config`` has no public form; ``torch.autograd.graph.region_activation_memory_budget``
    (a prototype, torch 2.13) cannot be asked.
    """
    from torch._functorch import config

    return float(config.activation_memory_budget)


def backend_with_memory_budget(backend: Any, budget: float) -> Callable[..., Any]:
    """A ``torch.compile`` backend that partitions forward and backward under ``budget``.

    ``lookup_backend`` is how ``torch.compile`` itself turns a name into a function. The budget is read while
    a graph is compiled, so it is set for that long only and other models of the process keep theirs.
    """
    from functools import partial

    from torch._dynamo import lookup_backend

    return partial(_compile_with_memory_budget, lookup_backend(backend), budget)


def _compile_with_memory_budget(
    compiler: Callable[..., Any], budget: float, graph: Any, inputs: Any, **options: Any
) -> Any:
    from torch._functorch import config

    with config.patch(activation_memory_budget=budget):
        return compiler(graph, inputs, **options)


def modules_being_traced() -> list[str]:
    """Names of the modules around the operation that is being compiled, outermost first; empty in eager.

    ``torch.fx.traceback`` carries what Dynamo saw into AOTAutograd's tracing; the key has no public reader.
    """
    import re

    from torch.fx import traceback

    stack: dict[str, tuple[str, Any]] = traceback.get_current_meta().get("nn_module_stack") or {}
    return [
        re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]|\[(\d+)\]", r".\1\2", name) for name, _ in stack.values()
    ]


class KeptValue:
    """One value that selective checkpointing keeps from the forward for the recomputation."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    @property
    def value(self) -> Any:
        return self._wrapper.val

    @property
    def changed(self) -> bool:
        """Whether it has been changed in place since, for which torch raises when it is used."""
        return isinstance(self.value, torch.Tensor) and self._wrapper.version != self.value._version

    def replace(self, value: Any, *, changed: bool = False) -> None:
        """Keep another object in its place; a tensor counts as unchanged from here on, or as ``changed``."""
        self._wrapper.val = value
        self._wrapper.version = value._version if isinstance(value, torch.Tensor) and not changed else None
        if changed:
            self._wrapper.version = -1


def kept_in(mode: Any) -> list[KeptValue]:
    """What a mode of ``create_selective_checkpoint_contexts`` keeps at present.

    torch holds on to the tensors themselves, past the hooks of autograd, and has no way to say where.
    """
    from torch.utils._pytree import tree_leaves
    from torch.utils.checkpoint import _VersionWrapper

    entries: list[Any] = []
    for of_operation in mode.storage.values():
        entries += of_operation.values() if isinstance(of_operation, dict) else of_operation
    return [KeptValue(leaf) for leaf in tree_leaves(entries) if isinstance(leaf, _VersionWrapper)]


def changes_its_inputs(op: Any) -> bool:
    """Whether an operator writes to its arguments: its schema has no public reader."""
    return bool(getattr(getattr(op, "_schema", None), "is_mutable", False))


def draws_random_numbers_now(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers with these arguments.

    Attention kernels carry the tag whether or not they drop anything; which argument says so is in the
    schema, which has no public reader.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            value = (
                args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            )
            return bool(value)
    return True


def composable_api_of(module: nn.Module) -> str | None:
    """Which of torch's composable APIs beside ``fully_shard`` was applied to a module; None for none.

    ``replicate`` leaves the module's class as it was; the registry of its contract has no public reader.
    """
    from torch.distributed._composable.contract import _get_registry

    registry = _get_registry(module)
    return next((name for name in registry or () if name != "fully_shard"), None)


def schedulers_within(scheduler: Any) -> list[Any]:
    """A scheduler and those that it steps: of ``SequentialLR`` and ``ChainedScheduler``, or of a wrapper.

    The former keep them in ``_schedulers``, which has no public reader; accelerate's wrapper has
    ``scheduler``.
    """
    inner = [*(getattr(scheduler, "_schedulers", None) or ())]
    wrapped = getattr(scheduler, "scheduler", None)
    inner += [wrapped] if callable(getattr(wrapped, "step", None)) else []
    return [scheduler, *(found for one in inner for found in schedulers_within(one))]


def found_infs(scaler: torch.amp.GradScaler, optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """What ``unscale_`` found of each optimizer and device: not 0 where a gradient has an inf or nan.

    ``GradScaler`` decides for each optimizer by itself, from a record without a public reader.
    """
    records: Any = scaler._per_optimizer_states
    found = [records[id(optimizer)]["found_inf_per_device"] for optimizer in optimizers]
    return [flag for by_device in found for flag in by_device.values()]


def keep_scale_on_host(scaler: torch.amp.GradScaler) -> None:
    """Have the scale of a ``GradScaler`` where the gradients of parameters kept on the host are.

    ``unscale_`` copies the scale to a gradient's device without waiting. From an accelerator to the host that
    is a copy into pinned memory, which the CPU reads before it has arrived: the gradients become NaN, or are
    divided by what was there before. The scale is made where the first scaled tensor is, and cannot be moved
    by a public function.
    """
    scale, tracker = scaler._scale, scaler._growth_tracker
    if scale is None:
        scaler.scale(torch.zeros(()))
    elif scale.device.type != "cpu":
        scaler._scale, scaler._growth_tracker = scale.cpu(), None if tracker is None else tracker.cpu()


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step can be left out on the device, as ``GradScaler`` asks fused optimizers to.

    ``_step_supports_amp_scaling`` is what the scaler looks at; a group may have another implementation.
    """
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(optimizer: torch.optim.Optimizer, left_out: torch.Tensor) -> None:
    """Step a fused optimizer unless ``left_out``, float32 on the device, is 1 when the device comes to it.

    The attribute ``found_inf`` is how ``GradScaler.step`` tells it; there is no argument for it.
    """
    stepped: Any = optimizer
    stepped.found_inf, stepped.grad_scale = left_out, None
    try:
        optimizer.step()
    finally:
        del stepped.found_inf, stepped.grad_scale


# --- meshes -----------------------------------------------------------------------------------------------


def forget_meshes() -> None:
    """Empty DTensor's caches of what operations do to placements, in a process with a new process group.

    Two meshes of one shape are equal, so an operation on the new one would be answered with the old one,
    whose groups are gone: wrong shards, or "could not resolve the process group". torch has no public way.
    """
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def split_axis(mesh: Any, axis: str, sizes: dict[str, int]) -> Any:
    """``mesh`` with several axes in the place of one, over the same ranks in the same order.

    torch can make one axis of several in public, and then warns wherever it is used beside another one.
    """
    return mesh._unflatten(axis, tuple(sizes.values()), tuple(sizes))


def split_factor_of(placement: Any) -> int | None:
    """Into how many parts a strided shard's dimension was cut before; None for another placement.

    FSDP2 places a parameter so that expert or tensor parallelism has cut along the same dimension. The class
    has no public name.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def exchange_rows(rows: torch.Tensor, group: str) -> torch.Tensor:
    """Send row i of ``rows`` to rank i of a process group, and get row i of the result from there.

    Differentiable, and an operation that compiled code can hold, unlike ``torch.distributed.nn``'s.
    """
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    splits = [1] * len(rows)
    return all_to_all_single_autograd(rows, splits, splits, group)  # type: ignore[arg-type]


# --- masks ------------------------------------------------------------------------------------------------


def keep_rows_apart(mask_function: Any, position_ids: torch.Tensor, rows: torch.Tensor) -> Any:
    """A mask function of transformers, for rows in a pack: what it says of each row by itself.

    Args:
        mask_function: Of (sequence, head, query, key).
        position_ids: ``(B, S)``.
        rows: Of each token ``(B, S)`` which row of the pack it is in.

    As transformers does where it sees positions that begin anew, for masks of its own making alone.
    transformers 5.17 counts queries and keys from the start of the pack also there, by which chunked windows
    go; so this does with it.
    """
    from transformers import masking_utils

    by_row = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if by_row is not None:
        return by_row(mask_function, position_ids, rows)
    return masking_utils.and_masks(mask_function, masking_utils.packed_sequence_mask_function(rows))


def eager_attention_of(module: nn.Module) -> Any | None:
    """The plain attention that a model's own file has for ``attn_implementation="eager"``, if it has one.

    transformers names it to its attention interface at each call, and nowhere else.
    """
    for cls in type(module).__mro__:
        found = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    return None


# --- routers ----------------------------------------------------------------------------------------------

_BALANCE = "load_balancing_loss_func"
_BALANCE_TAKES = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def intercept_balance_loss(
    model: nn.Module, intercepted: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> bool:
    """Put a function in the place of that by which a model's file computes its router's loss, for good.

    A forward computes it over its own tokens, without a place to say which other ranks have more of them, or
    that some are filler of a pack. Each file of transformers has the function by the same name, and looks it
    up at each call.

    Args:
        model: Inside of wrappers and adapters.
        intercepted: From the function to the one in its place; called once a file.

    Returns:
        Whether the forward calls a function of that name and of those arguments.
    """
    forward = inspect.unwrap(original_class(model).forward)
    known = getattr(forward, "__globals__", {})
    function = known.get(_BALANCE)
    if function is None or _BALANCE not in forward.__code__.co_names:
        return False
    if list(inspect.signature(function).parameters) != _BALANCE_TAKES:
        return False
    if not hasattr(function, "_fsdp_sft_intercepted"):
        known[_BALANCE] = intercepted(function)
        known[_BALANCE]._fsdp_sft_intercepted = True
    return True


# --- watchdog ---------------------------------------------------------------------------------------------


def default_store() -> Any:
    """The store over which the default process group was made, with the group's prefix.

    ``init_process_group`` keeps it; a store of one's own would need a port that only the launcher knows.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


# --- tensor subclasses ------------------------------------------------------------------------------------


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The very object that a DTensor wraps; ``tensor`` itself if it is none.

    The public ``to_local`` answers with a view, which subclasses of other libraries do not implement, or
    which loses what they hold.
    """
    from torch.distributed.tensor import DTensor

    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or what a DTensor wraps, has no memory of its own: its values are in other tensors.

    Made by ``_make_wrapper_subclass``, which leaves no public mark. Most follow the public protocol of
    ``__tensor_flatten__``, whose test is private.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    local: Any = local_tensor(tensor)
    if type(local) in (torch.Tensor, nn.Parameter, nn.Buffer) or local.is_meta:
        return False
    if is_traceable_wrapper_subclass(local):
        return True
    try:
        return bool(local.numel() > 0 and local.untyped_storage().data_ptr() == 0)
    except RuntimeError:  # "invalid python storage"
        return True


def experts_to_share_out(model: nn.Module) -> dict[str, int]:
    """FQNs of the modules whose experts transformers can share out over ranks, to how many each has.

    0 stands for one that has no parameters of its own, such as peft's around experts with adapters. A plan is
    expanded to a model's layers by ``_expand_parallel_plan`` alone. Empty where transformers has no plan for
    the model, or is older than 5.20.
    """
    plan: dict[str, str] = getattr(model, "ep_plan", None) or {}
    if not hasattr(model, "_expand_parallel_plan"):
        return {}
    expanded = model._expand_parallel_plan(plan)  # type: ignore[operator]
    dispatched = [name for name, style in expanded.items() if style == "ep_dispatch_experts"]
    return {name: _stack_length(model.get_submodule(name)) for name in dispatched}


def _stack_length(experts: nn.Module) -> int:
    return next((len(parameter) for parameter in experts.parameters(recurse=False)), 0)


def share_out_experts(model: nn.Module, ep_mesh: Any, alone: Any) -> None:
    """Keep of each stack of experts this rank's, and let tokens travel between the ranks of ``ep_mesh``.

    What ``from_pretrained(distributed_config=...)`` does to a model on the meta device; in public it only
    comes with transformers' own sharding and loading.

    Args:
        model: On the meta device, not sharded.
        ep_mesh: One axis, of ranks that have all experts together.
        alone: A mesh of this rank: transformers asks for the ranks that have the same tokens.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan = model._expand_parallel_plan(model.ep_plan)  # type: ignore[operator]
    apply_expert_parallelism(model, ep_mesh, alone, plan, ep_implementation="all_to_all")


# --- ways to compute experts --------------------------------------------------------------------------------

_EXPERTS_KNOW = (
    "has_gate",
    "is_transposed",
    "num_experts",
)  # set by their decorator


def switchable_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of experts, by FQN, that transformers can compute in more than one way.

    What its decorator has wrapped bears no public mark but the attributes that its functions read.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(type(module), "_apply_gate") and all(hasattr(module, key) for key in _EXPERTS_KNOW)
    }


def experts_implementation_of(experts: nn.Module) -> str:
    """Which implementation a module of experts runs: its config has it under a private name."""
    return str(getattr(experts.config, "_experts_implementation", None) or "eager")


def experts_forward(experts: nn.Module, implementation: str) -> Any:
    """The function ``(experts, hidden_states, top_k_index, top_k_weights)`` of an implementation.

    transformers looks it up in each forward, by the config that all experts of a model have in common.

    Raises:
        ValueError: If transformers knows none of that name.
    """
    import inspect

    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if implementation == "eager":
        return inspect.unwrap(type(experts).forward)
    if implementation not in ALL_EXPERTS_FUNCTIONS:
        known = ", ".join(map(repr, ("eager", *sorted(ALL_EXPERTS_FUNCTIONS))))
        raise ValueError(f"impl must be 'auto' or one of {known}, got {implementation!r}")
    return ALL_EXPERTS_FUNCTIONS[implementation]
