"""Every private name of torch, transformers and datasets that the library touches, each with its reason.

A private name may change in any release. So each function here says which name it uses and why no public name
would do, and tests on the lowest and the newest versions (``make test-floor``, ``make test-latest``) find out
when that changes.
"""

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

# The documented base class of modes that see every operation; only the name of its module is private.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# --- modules ----------------------------------------------------------------------------------------------


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer below ``module`` by ``function`` of it.

    ``nn.Module._apply`` is what ``.to()`` calls, and no public method takes a function. FSDP2 overrides it to
    take over the new shards, which makes it the supported way to change the dtype of shards.
    """
    module._apply(function)


def keep_in_float32_patterns(model: nn.Module) -> tuple[set[str], set[str]]:
    """Patterns of names that transformers keeps in float32: (under float16 only, under bfloat16 as well).

    ``_keep_in_fp32_modules`` and ``_keep_in_fp32_modules_strict`` are class attributes that no public
    function reads; see ``PreTrainedModel`` in transformers' ``modeling_utils.py``.
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
    """Within the block, gloo groups are made whose ranks connect when they first talk, with one thread each.

    Connections: otherwise each rank of each group connects to every other rank at once. Only the environment
    variable ``TORCH_GLOO_LAZY_INIT`` changes that; ``lazy_init`` of a device alone has no effect (torch
    2.13).

    One thread: each of gloo's two threads assigns the name of the work it has done to the same string,
    without a lock (``lastCompletedWorkName`` in ``ProcessGroupGloo::runLoop``). A name that is too long to be
    stored inside the string object, such as that of DTensor's all-gather, is then sometimes freed twice, and
    the process dies later at another place. The number of threads is an option of the private class
    ``ProcessGroupGloo._Options``, and ``new_group`` does not pass options on.
    """
    import torch.distributed.distributed_c10d as c10d

    original = getattr(c10d, "ProcessGroupGloo", None)  # None in a build of torch without gloo
    is_chosen = _LAZY_GLOO in os.environ
    if original is not None and original.__name__ != "OneThread":  # it is OneThread inside another such block
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
        def __init__(self, store: Any, rank: int, size: int, timeout: Any, **others: Any) -> None:
            options = original._Options()
            for name, value in others.items():  # torch 2.15 gives enable_reconfigure, which is an option too
                setattr(options, name, value)
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

    ``apply_chat_template`` calls ``render_jinja_template``; only the latter returns the character spans of
    ``{% generation %}`` blocks.

    Returns:
        (text, character spans of the generation blocks; empty for a template without them).
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    # A template without the tag is not asked for spans, since transformers would log a warning.
    tagged = _has_generation_tag(template)
    render: Any = render_jinja_template  # annotated as returning a str; returns a pair, at least up to 5.23
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
    """The ``tokenizers.Tokenizer`` whose ``encode_batch_fast`` gives the same ids as calling ``tokenizer``.

    None if the tokenizer's class encodes in its own way, or if the backend is set up to pad, to truncate or
    to split special tokens differently, which a call would change first. Only the backend tokenises without
    offsets. Whether a class encodes in its own way shows only in whether it overrides ``__call__`` or the
    private ``_encode_plus``.
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

    ``save_pretrained`` does this between gathering and writing, and offers no public way to do it for a part
    of the model.

    Args:
        model: Unsharded model; transformers looks conversions up by its class, which FSDP2 replaces.
        state_dict: Tensors by their names in the model; they may be on the meta device.

    Returns:
        Tensors by their names in the checkpoint; ``state_dict`` itself if the architecture has no
        conversions.
    """
    from transformers.core_model_loading import revert_weight_conversion as revert

    reverted: dict[str, torch.Tensor] = revert(model, state_dict)  # type: ignore[arg-type]
    return reverted


def copy_weight_conversions(source: nn.Module, target: nn.Module) -> None:
    """Have ``target`` saved in the format that ``source`` was loaded from.

    ``from_pretrained`` keeps the conversions it used in ``_weight_conversions``, and only saving reads them.
    """
    conversions = getattr(source, "_weight_conversions", None)
    if conversions is not None and is_dequantised(source):
        conversions = _without_quantiser(target, conversions)
    if conversions is not None:
        target._weight_conversions = conversions


def is_dequantised(model: nn.Module) -> bool:
    """Whether transformers dequantised the model while loading, so that a save would quantise it again.

    The quantiser's operations stay in ``_weight_conversions``, and what they do is done backwards on saving:
    https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/core_model_loading.py, in
    ``revert_weight_conversion``. ``save_pretrained(save_original_format=False)`` leaves all of them out.
    """
    conversions = getattr(model, "_weight_conversions", None) or []
    return any(map(_is_of_quantiser, conversions)) and not getattr(model, "is_quantized", False)


def _is_of_quantiser(conversion: Any) -> bool:
    return any(hasattr(operation, "hf_quantizer") for operation in getattr(conversion, "operations", ()))


def _without_quantiser(twin: nn.Module, used: list[Any]) -> list[Any]:
    """The conversions of the class, in place of those that a quantiser has put operations into.

    Of changes of a prefix there are those that were used: only loading can tell whether the prefix was there.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    def place(entry: Any) -> tuple[Any, ...]:
        return tuple(entry.source_patterns), tuple(entry.target_patterns), entry.scope_prefix

    prefixes = {place(entry) for entry in used if isinstance(entry, PrefixChange)}
    own = get_model_conversion_mapping(twin, add_legacy=False)  # type: ignore[arg-type]
    return [entry for entry in own if not isinstance(entry, PrefixChange) or place(entry) in prefixes]


def names_left_out_on_save(model: nn.Module) -> tuple[set[str], set[str]]:
    """(names that ``save_pretrained`` never writes, patterns of tied names that it leaves out).

    ``_keys_to_ignore_on_save`` and ``_tied_weights_keys`` are class attributes that no public function reads;
    see ``remove_tied_weights_from_state_dict`` in transformers' ``modeling_utils.py``.
    """
    ignored: Any = getattr(model, "_keys_to_ignore_on_save", None) or ()
    tied: set[str] = set()
    for prefix, module in model.named_modules():
        keys: Any = getattr(module, "_tied_weights_keys", None) or ()
        tied.update(f"{prefix}.{key}" if prefix else key for key in keys)
    return set(ignored), tied


# --- weights ----------------------------------------------------------------------------------------------


def original_class(model: nn.Module) -> type[nn.Module]:
    """The class that a model had before ``fully_shard`` put a subclass, made on the spot, in its place.

    transformers looks conversions up by the name of the class, and recognises its own code by ``__module__``;
    FSDP2's class has another name and another module.
    """
    from torch.distributed.fsdp import FSDPModule

    bases: Any = type(model).__mro__
    original: type[nn.Module] = next(base for base in bases if not issubclass(base, FSDPModule))
    return original


def build_like_from_pretrained(cls: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model on the meta device with untied weights, as ``from_pretrained`` builds it before it reads.

    No public function stops there. ``get_init_context`` is the classmethod that makes the context of the
    build; ``patch_output_recorders`` and ``_get_dtype_plan`` are the two steps after it. Parameters that the
    class keeps in float32 under ``dtype`` are float32. ``config`` is changed: it gets ``dtype``, and the
    model refers to it.
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
    """The ties that the model's config asks for, from target name to source name.

    ``all_tied_weights_keys`` is what transformers itself ties by; models from elsewhere do not have it.
    """
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def drop_tie(model: nn.Module, target: str) -> None:
    """Forget one tie, as ``tie_weights`` does if a checkpoint has two different tensors for it."""
    model.all_tied_weights_keys.pop(target, None)  # type: ignore[operator,union-attr]


def tie_by_names(model: nn.Module) -> None:
    """Tie what ``tied_names`` lists; without the argument ``tie_weights`` would ask the config anew."""
    model.tie_weights(recompute_mapping=False)  # type: ignore[operator]


def match_checkpoint_keys(
    twin: nn.Module, keys: list[str], conversions: list[Any]
) -> tuple[dict[str, tuple[Any, dict[str, list[str]]]], dict[str, str]]:
    """Match checkpoint keys with tensors of the model: the first half of transformers' loading.

    transformers does this in the loop of ``convert_and_load_state_dict_in_model``, which cannot be called for
    the matching alone. The order matters: keys are visited in transformers' natural order, which is the order
    in which experts are stacked.

    Args:
        twin: Unsharded copy of the model on the meta device, untied.
        keys: Names in the checkpoint.
        conversions: The list of ``weight_conversions``; conversions that match are marked as used.

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
    """The renamings and conversions that transformers has for a model's class and its sub-models; a new list.

    ``get_model_conversion_mapping`` is what loading calls; there is no public form. Its first call makes a
    table of all architectures, whose 1,044 entries compile a pattern each. That takes a quarter of a second,
    and a model needs about ten of the patterns; here they are compiled when they are used.
    """
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    with _patterns_compiled_at_use(core_model_loading):
        return list(get_model_conversion_mapping(twin))  # type: ignore[arg-type]


@contextmanager
def _patterns_compiled_at_use(module: Any) -> Iterator[None]:
    """Within the block, ``re.compile`` in a module returns patterns that are compiled at their first use."""
    known = getattr(module, "re", None)
    if known is not re:  # the module no longer has this name, or another thread is in here already
        yield
        return
    module.re = _LazyRe()
    try:
        yield
    finally:
        module.re = known


class _LazyRe:
    """The module ``re`` with another ``compile``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)

    @staticmethod
    def compile(pattern: str, flags: int = 0) -> "_LazyPattern":
        return _LazyPattern(pattern, flags)


class _LazyPattern:
    """A pattern that is compiled when an attribute of it is first asked for."""

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
    """Run one ``WeightConverter`` of transformers over tensors, as loading does; see its ``convert``.

    Args:
        twin: Unsharded copy of the model.
        first_target: Name of the first tensor that the conversion makes.
        converter: The converter, which is copied.
        tensors: Tensors of the checkpoint by the source pattern that they match.

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
    """Keep the conversions that matched in ``_weight_conversions``, where ``save_pretrained`` reads them."""
    model._weight_conversions = [entry for entry in conversions if entry.was_used()]  # type: ignore[assignment]


def ignored_on_load(twin: nn.Module) -> tuple[list[str], list[str]]:
    """(patterns of keys that may be missing, patterns of keys that may be unexpected).

    ``_keys_to_ignore_on_load_missing`` and ``_keys_to_ignore_on_load_unexpected`` are class attributes that
    no public function reads. The two patterns that are added are those of transformers'
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
    """Run the model's own initialisation on the CPU for its computed buffers and the missing keys.

    transformers marks tensors that have been loaded by the attribute ``_is_hf_initialized``, and
    ``initialize_weights`` fills all others. Here the marks on the meta tensors of a twin protect all tensors
    but the wanted ones.

    Returns:
        Values of all non-persistent buffers and of ``missing``, by name.
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
    """An instance of a tensor subclass, without storage.

    ``_make_wrapper_subclass`` is how torch's documentation of ``__torch_dispatch__`` makes one.
    """
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))


def forget_failed_iteration(model: nn.Module) -> None:
    """Put FSDP2 back to where it is between steps, after an error in a forward or a backward.

    Parameters are sharded again, and what the failed iteration has left is dropped: gathers under way,
    gradients that no rank has seen yet, and the note that the end of a backward is still to come, which would
    keep the next backward from ending. ``FSDPModule.reset_iter_state`` (torch 2.13) does most of it. Earlier
    versions do not have it, and it leaves the gradients that wait unsharded in a group's private parameters.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        if state._is_root:  # None before the first forward, when there is nothing to forget
            if hasattr(module, "reset_iter_state"):
                module.reset_iter_state()
            else:
                _reset_iteration(state)
    forget_held_back(model)


def keep_trained_flags(module: Any) -> None:
    """Carry ``requires_grad`` of an FSDP2 module's gathered parameters over to their shards.

    Whoever freezes a parameter meets the one that the module shows at the moment. FSDP2 copies the flag from
    the shard when it gathers, and never back, so that a change between the two would be undone.
    """
    for group in _parameter_groups(module._get_fsdp_state()):
        if group.is_sharded:
            continue
        for parameter in group.fsdp_params:
            shown = parameter._sharded_post_forward_param if group.is_sharded_post_forward else None
            shown = parameter._unsharded_param if shown is None else shown
            parameter.sharded_param.requires_grad_(shown.requires_grad)


def is_broken_off(model: nn.Module) -> bool:
    """Whether an error has left FSDP2 in the middle of a forward or backward, in which it shards nothing."""
    return any(state._training_state.name != "IDLE" for state in _states_within(model))


def replaced_parameters(module: Any) -> list[tuple[nn.Module, str]]:
    """Parameters that were put in the place of those that FSDP2 holds, and that it would put back."""
    state = module._get_fsdp_state()
    if state._is_root is None:  # before the first forward FSDP2 takes what it finds
        return []
    found = []
    for group in _parameter_groups(state):
        attribute = "sharded_param" if group.is_sharded else "_unsharded_param"
        attribute = "_sharded_post_forward_param" if group.is_sharded_post_forward else attribute
        for parameter in group.fsdp_params:
            own, info = getattr(parameter, attribute), parameter._module_info
            places = [(info.module, info.param_name)]
            if info.shared_modules:
                places += zip(info.shared_modules, info.shared_param_names, strict=True)
            found += [place for place in places if place[0]._parameters.get(place[1]) is not own]
    return found


def forget_held_back(model: nn.Module) -> None:
    """Drop gradients of a window that was given up: FSDP2 holds them back, where ``zero_grad`` sees none."""
    for parameter, gathered in _held_parameters(model):
        parameter.unsharded_accumulated_grad = None
        if gathered is not None and gathered.grad is not None:
            gathered.grad = None


def hooked_while_gathered(model: nn.Module) -> set[torch.Tensor]:
    """The shards of FSDP2 whose gathered parameters have hooks, which see the gradients of one rank.

    A gathered parameter is kept with its hooks, and without its memory, from one gathering to the next.
    """
    return {
        parameter.sharded_param
        for parameter, gathered in _held_parameters(model)
        if gathered is not None and (has_hooks(gathered) or has_grad_hooks(gathered))
    }


def _held_parameters(model: nn.Module) -> Iterator[tuple[Any, nn.Parameter | None]]:
    """FSDP2's own object for each parameter, and the gathered parameter; None if it never was gathered."""
    for state in _states_within(model):
        for group in _parameter_groups(state):
            for parameter in group.fsdp_params:
                yield parameter, getattr(parameter, "_unsharded_param", None)


def _states_within(model: nn.Module) -> Iterator[Any]:
    """FSDP2's state of each module that it has sharded."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module._get_fsdp_state()


def _reset_iteration(root: Any) -> None:
    """``FSDPModule.reset_iter_state`` for a version of torch without it."""
    if root._device.type != "cpu":
        torch.accelerator.synchronize()  # so that no event has to be waited for
    root._comm_ctx.all_gather_state = root._comm_ctx.reduce_scatter_state = None
    root._comm_ctx.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        for group in _parameter_groups(state):
            if group._all_gather_result is not None and group._all_gather_result.all_gather_work is not None:
                group._all_gather_result.all_gather_work.wait()
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = state._training_state
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _parameter_groups(state: Any) -> list[Any]:
    """The groups of parameters of an FSDP2 state: one in earlier versions of torch, a list in later ones."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def keeps_shards_on_host(model: nn.Module) -> bool:
    """Whether a model was sharded with ``CPUOffloadPolicy``.

    FSDP2 keeps the policy in its groups of parameters (``_fsdp_param_group``), which no public function
    shows.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups = _parameter_groups(module._get_fsdp_state())
            if any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups):
                return True
    return False


def offset_in_checkpoint(tensor: torch.Tensor) -> int:
    """Offset in its file, in bytes, of the storage of a tensor that ``torch.load(map_location="meta")`` made.

    ``torch.load`` notes it on storages whose bytes it has not read, as ``_checkpoint_offset``.

    Raises:
        ValueError: If the tensor has no storage in the file.
    """
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if not isinstance(offset, int):
        raise ValueError("a tensor has no bytes of its own in the file")
    return offset


# --- packing ----------------------------------------------------------------------------------------------


def compute_dtypes(model: nn.Module) -> set[torch.dtype]:
    """The floating dtypes of a model's parameters, and those that FSDP2 casts them to for the forward.

    ``fully_shard`` keeps its ``mp_policy`` in a state (``_get_fsdp_state``) that no public function shows.
    """
    from torch.distributed.fsdp import FSDPModule

    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            policy: Any = module._get_fsdp_state()._mp_policy
            dtypes |= {policy.param_dtype} - {None}
    return dtypes


def native_mesh(model: nn.Module) -> Any | None:
    """The mesh on which transformers has sharded a model while loading it; None for other models.

    Only axes of more than one rank are returned. ``from_pretrained(distributed_config=...)`` keeps the mesh
    in the private ``_mesh_manager``. The meshes of the model's parameters would not do: they do not show an
    axis along which only experts are cut.
    """
    manager: Any = getattr(model, "_mesh_manager", None)
    if manager is None:
        return None
    axes = ("pp", "dp_replicate", "fsdp", "tp")
    wide = tuple(axis for axis in axes if manager.get_mesh(axis).size() > 1)
    return manager.get_mesh(wide) if wide else None


def reduction_dtype(module: nn.Module, gradient: torch.dtype) -> torch.dtype:
    """The dtype in which FSDP2 reduces the gradients of a module that was given to ``fully_shard``.

    The policy is read as in ``compute_dtypes``.

    Args:
        module: Module that is a group of FSDP2's.
        gradient: Dtype of the group's stored shards, which counts if the policy says nothing.
    """
    policy: Any = module._get_fsdp_state()._mp_policy  # type: ignore[operator]
    return policy.reduce_dtype or policy.param_dtype or gradient


def attention_of(model: nn.Module) -> str:
    """Name of the attention that a transformers model runs: its config's ``_attn_implementation``."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None) or "its own")


def varlen_attn_takes_gqa() -> bool:
    """Whether torch's ``varlen_attn`` has the argument ``enable_gqa``.

    In torch 2.11 it has not, and keys and values must be repeated for each group of query heads.
    """
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def is_hub_dataset(rows: Any) -> bool:
    """Whether ``rows`` is a ``datasets.Dataset``, told by its attributes: datasets may not be installed."""
    return hasattr(rows, "_fingerprint") and hasattr(rows, "column_names") and hasattr(rows, "__len__")


def dataset_fingerprint(rows: Any) -> str | None:
    """The fingerprint of a ``datasets.Dataset``; None for other rows.

    ``datasets`` computes it from the data set's files and all that was done to it, and keeps it in
    ``_fingerprint`` alone.
    """
    return str(rows._fingerprint) if is_hub_dataset(rows) else None


def versions_of_tokenizers() -> list[str]:
    """Versions of the libraries that turn a conversation into ids: transformers and tokenizers."""
    from importlib.metadata import version

    return [version("transformers"), version("tokenizers")]


def shares_of_stream(rows: Any) -> int:
    """Number of shares into which a stream of ``datasets`` was split, if ``rows`` is one share; otherwise 1.

    ``datasets.distributed.split_dataset_by_node`` marks a share by the private ``_distributed`` alone.
    """
    return int(getattr(getattr(rows, "_distributed", None), "world_size", None) or 1)


# --- loss -------------------------------------------------------------------------------------------------


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` or ``module.compile()`` was called on this very module.

    ``Module.compile`` keeps the compiled call in ``_compiled_call_impl``. ``torch.compile`` returns a wrapper
    that keeps the module in ``_orig_mod``. No public function asks for either.
    """
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def compiled_call_of(module: nn.Module) -> Callable[..., Any] | None:
    """The function that ``module.compile()`` runs in place of the module's call; None without ``compile``."""
    return module.__dict__.get("_compiled_call_impl")


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Replace the function that ``compiled_call_of`` returns, to set autograd's saved-tensor hooks around it.

    Hooks registered on the module would be traced with it, and torch has no hooks around a compiled call.
    """
    module.__dict__["_compiled_call_impl"] = call


def foreign_hooks(module: nn.Module, *, pre: bool) -> list[Any]:
    """Hooks on a module's call that may look at or change what it returns.

    Left out are hooks that do neither: FSDP2's, those by which this library counts checkpointed forwards, and
    torch's own hooks on all modules. Modules keep their hooks in private attributes that no public function
    reads.

    Args:
        module: The module; modules inside it are not looked at.
        pre: Whether to include hooks before the forward, which may change its arguments.
    """
    kinds = ["forward", "backward", "backward_pre", *(["forward_pre"] if pre else [])]
    own = [hook for kind in kinds for hook in getattr(module, f"_{kind}_hooks").values()]
    foreign = [hook for hook in own if not _defined_in(hook, "torch.distributed.fsdp.", "fsdp_sft.sac.")]
    return foreign + hooks_on_all_modules(pre=False)


def end_persistent_workers(loader: "torch.utils.data.DataLoader[Any]") -> None:
    """End the workers that a loader has kept; the next ones get its data set as it is now.

    Persistent workers have a copy of the data set from when they began, in which a later ``set_epoch`` does
    not show. A loader keeps them with its iterator, in the private ``_iterator``.
    """
    if loader.persistent_workers:
        loader._iterator = None


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether ``register_hook`` was called on a parameter: its hooks are in a private attribute."""
    return bool(parameter._backward_hooks)


def has_grad_hooks(parameter: torch.Tensor) -> bool:
    """Whether ``register_post_accumulate_grad_hook`` was called on a parameter."""
    return bool(parameter._post_accumulate_grad_hooks)


def hooks_on_all_modules(*, pre: bool) -> list[Any]:
    """Hooks on the calls of all modules but torch's own: CommDebugMode's and its counters' change nothing.

    Args:
        pre: Whether to include hooks before the forward.
    """
    from torch.nn.modules import module as hooks_of_all

    kinds = ["forward", "backward", "backward_pre", *(["forward_pre"] if pre else [])]
    of_all = [hook for kind in kinds for hook in getattr(hooks_of_all, f"_global_{kind}_hooks").values()]
    return [hook for hook in of_all if not _defined_in(hook, "torch.")]


def is_ours(hook: Any) -> bool:
    """Whether a hook is one of this library's."""
    return _defined_in(hook, "fsdp_sft.")


def only_records(hook: Any) -> bool:
    """Whether a hook is one with which transformers records outputs; a model's first forward puts them in."""
    return _defined_in(hook, "transformers.utils.output_capturing")


def _defined_in(hook: Any, *packages: str) -> bool:
    """Whether the function of a hook was defined in one of the packages."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(packages)


LIMIT_LOGGER = "torch._dynamo.convert_frame"  # the logger of the message that limit_that_was_hit reads


def recompile_options(variants: int) -> dict[str, Any]:
    """Keywords of ``torch.compile`` that allow ``variants`` compiled variants of one piece of code.

    torch 2.13 has ``recompile_limit``. Before it the limit is a setting of the whole process in
    ``torch._dynamo.config``, which is raised here.
    """
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": variants}
    from torch._dynamo import config

    config.recompile_limit = max(variants, config.recompile_limit)
    return {}


def limit_that_was_hit(record: Any) -> str | None:
    """Name of the limit at which Dynamo has stopped compiling a piece of code, if a log record says so.

    torch says it in its log alone; from then on that code runs as plain Python.
    """
    hit = str(record.msg).startswith("torch._dynamo hit config.")
    return str(record.args[0]) if hit and record.args else None


# --- activation checkpointing -----------------------------------------------------------------------------


def checkpointing_flag(recompute: Callable[..., Any]) -> dict[str, Any]:
    """Attributes that make a ``GradientCheckpointingLayer`` of transformers recompute its forward.

    The layer reads the function from ``_gradient_checkpointing_func``. The public method that sets it,
    ``gradient_checkpointing_enable``, sets it for all blocks.
    """
    return {"gradient_checkpointing": True, "_gradient_checkpointing_func": recompute}


def being_compiled() -> bool:
    """Whether code runs in order to be compiled, by Dynamo or in AOTAutograd's trace.

    torch's public ``is_compiling`` is False on torch 2.11 where AOTAutograd traces a checkpoint, which then
    accepts the contexts of compiled code only. torch.utils.checkpoint asks for the private proxy mode.
    """
    if torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def checkpoints_its_forward(block: nn.Module) -> bool:
    """Whether a block is a ``GradientCheckpointingLayer`` that recomputes its ``forward``.

    Before some version that is not later than 5.23 the layer recomputed its ``__call__`` instead. Hooks, and
    the compiled code of a compiled block, then run inside of the checkpoint.
    """
    return is_checkpointing_layer(block) and type(block).__call__ is nn.Module.__call__


def is_checkpointing_layer(block: nn.Module) -> bool:
    """Whether a block is a ``GradientCheckpointingLayer``, by its name: transformers may not be imported."""
    return any(
        base.__name__ == "GradientCheckpointingLayer" and base.__module__.startswith("transformers.")
        for base in type(block).__mro__
    )


def compile_memory_budget() -> float:
    """The share of activations that compiled code may keep, as set for the whole process.

    It is set in ``torch._functorch.config``, for which there is no public name. The prototype
    ``torch.autograd.graph.region_activation_memory_budget`` (torch 2.13) cannot be asked for its value.
    """
    from torch._functorch import config

    return float(config.activation_memory_budget)


def backend_with_memory_budget(backend: Any, budget: float) -> Callable[..., Any]:
    """A ``torch.compile`` backend that partitions forward and backward under ``budget``.

    ``torch.compile`` itself turns a backend's name into a function by ``lookup_backend``. The budget is read
    while a graph is compiled. So it is set for that time only, and other models of the process keep theirs.
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
    """Names of the modules around the operation that is being compiled, outermost first; empty in eager mode.

    Dynamo's record of them reaches AOTAutograd's tracing in ``torch.fx.traceback``, under the undocumented
    key ``nn_module_stack``.
    """
    import re

    from torch.fx import traceback

    stack: dict[str, tuple[str, Any]] = traceback.get_current_meta().get("nn_module_stack") or {}
    return [
        re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]|\[(\d+)\]", r".\1\2", name) for name, _ in stack.values()
    ]


class KeptValue:
    """One value that selective checkpointing keeps from the forward for the recomputation.

    torch keeps it in the private class ``_VersionWrapper``, with the version that a tensor had then.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    @property
    def value(self) -> Any:
        return self._wrapper.val

    @property
    def changed(self) -> bool:
        """Whether the tensor has been changed in place since; torch raises when such a value is used."""
        return isinstance(self.value, torch.Tensor) and self._wrapper.version != self.value._version

    def replace(self, value: Any, *, changed: bool = False) -> None:
        """Keep another object in its place; a tensor counts as unchanged from now on unless ``changed``."""
        self._wrapper.val = value
        self._wrapper.version = value._version if isinstance(value, torch.Tensor) and not changed else None
        if changed:
            self._wrapper.version = -1  # no tensor has this version


def kept_in(mode: Any) -> list[KeptValue]:
    """The values that a mode of ``create_selective_checkpoint_contexts`` keeps at present.

    torch keeps these tensors in the mode's ``storage``. They do not pass autograd's saved-tensor hooks, and
    there is no public way to have them kept elsewhere.
    """
    from torch.utils._pytree import tree_leaves
    from torch.utils.checkpoint import _VersionWrapper

    entries: list[Any] = []
    for of_operation in mode.storage.values():
        entries += of_operation.values() if isinstance(of_operation, dict) else of_operation
    return [KeptValue(leaf) for leaf in tree_leaves(entries) if isinstance(leaf, _VersionWrapper)]


def changes_its_inputs(op: Any) -> bool:
    """Whether an operator writes to its arguments, which only its private ``_schema`` says."""
    return bool(getattr(getattr(op, "_schema", None), "is_mutable", False))


def draws_random_numbers_now(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers when it is called with these arguments.

    Attention kernels have the tag ``nondeterministic_seeded`` even where they drop nothing. Only the private
    ``_schema`` says which of their arguments is ``dropout_p``.
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
    """Name of a composable API of torch that was applied to a module, other than ``fully_shard``; or None.

    ``replicate`` does not change the module's class, so only the registry of applied APIs shows it, which is
    read by the private ``_get_registry``.
    """
    from torch.distributed._composable.contract import _get_registry

    registry = _get_registry(module)
    return next((name for name in registry or () if name != "fully_shard"), None)


def schedulers_within(scheduler: Any) -> list[Any]:
    """A scheduler and the schedulers that it steps.

    ``SequentialLR`` and ``ChainedScheduler`` keep theirs in the private ``_schedulers``; accelerate's wrapper
    has ``scheduler``.
    """
    inner = [*(getattr(scheduler, "_schedulers", None) or ())]
    wrapped = getattr(scheduler, "scheduler", None)
    inner += [wrapped] if callable(getattr(wrapped, "step", None)) else []
    return [scheduler, *(found for one in inner for found in schedulers_within(one))]


def found_infs(scaler: torch.amp.GradScaler, optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The flags that ``unscale_`` set for each optimizer and device: not 0 if a gradient has an inf or a nan.

    ``GradScaler`` decides for each optimizer separately, from ``_per_optimizer_states``, which no public
    function shows.
    """
    records: Any = scaler._per_optimizer_states
    found = [records[id(optimizer)]["found_inf_per_device"] for optimizer in optimizers]
    return [flag for by_device in found for flag in by_device.values()]


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Let a scaler unscale again after a step that failed before its ``update``, which alone forgets it."""
    scaler._per_optimizer_states.clear()


def known_scale(scaler: torch.amp.GradScaler) -> float | None:
    """The scale, if the host need not wait for it; ``get_scale`` always asks the device."""
    scale: Any = scaler._scale
    if scale is None:
        return float(scaler._init_scale)
    return float(scale) if scale.device.type == "cpu" else None


def keep_scale_on_host(scaler: torch.amp.GradScaler) -> None:
    """Keep the scale of a ``GradScaler`` on the host, where the gradients of offloaded parameters are.

    ``unscale_`` copies the scale to a gradient's device without waiting. From an accelerator to the host that
    is a copy into pinned memory, which the CPU reads before the scale has arrived: the gradients become NaN,
    or are divided by what was there before. The scale is made on the device of the first scaled tensor, and
    no public function moves it (``_scale``, ``_growth_tracker``).
    """
    scale, tracker = scaler._scale, scaler._growth_tracker
    if scale is None:
        scaler.scale(torch.zeros(()))  # makes the scale, on the CPU
    elif scale.device.type != "cpu":
        scaler._scale, scaler._growth_tracker = scale.cpu(), None if tracker is None else tracker.cpu()


# --- meshes -----------------------------------------------------------------------------------------------


def forget_meshes() -> None:
    """Empty DTensor's cache of what operations do to placements, for a process with a new process group.

    Two meshes of one shape are equal. So an operation on the new mesh would be answered from the cache with
    the old mesh, whose groups are gone: shards come out wrong, or torch "could not resolve the process
    group". Only the private ``_clear_sharding_prop_cache`` empties the cache. The caches of redistributions
    and of what they cost have no public form either; they keep old groups alive, with threads and sockets.
    """
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    for clear in (
        getattr(debug, "_clear_sharding_prop_cache", None),
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
        getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", None),
        getattr(_collective_utils.MeshTopoInfo.build_from_mesh, "cache_clear", None),
    ):
        if clear is not None:
            clear()


def split_axis(mesh: Any, axis: str, sizes: dict[str, int]) -> Any:
    """``mesh`` with several axes in the place of one, over the same ranks in the same order.

    The opposite is public: one axis made of several. But torch then warns wherever that axis is used beside
    another one, hence the private ``_unflatten``. It gets the axis by its place: torch 2.11 refuses the names
    of axes that the mesh has.
    """
    return mesh._unflatten(mesh.mesh_dim_names.index(axis), tuple(sizes.values()), tuple(sizes))


def split_factor_of(placement: Any) -> int | None:
    """Number of parts into which a strided shard's dimension was already cut; None for other placements.

    FSDP2 gives this placement to a parameter that expert or tensor parallelism has cut along the same
    dimension. Its class ``_StridedShard`` has no public name.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def exchange_rows(rows: torch.Tensor, group: str) -> torch.Tensor:
    """Send row i of ``rows`` to rank i of a process group, and return what arrives from rank i as row i.

    ``all_to_all_single_autograd`` is differentiable, and an operation that compiled code can hold, which the
    public exchange of ``torch.distributed.nn`` is not.
    """
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    splits = [1] * len(rows)
    return all_to_all_single_autograd(rows, splits, splits, group)  # type: ignore[arg-type]


# --- masks ------------------------------------------------------------------------------------------------


def keep_rows_apart(mask_function: Any, position_ids: torch.Tensor, rows: torch.Tensor) -> Any:
    """A mask function of transformers restricted to the rows of a pack: each row sees itself alone.

    transformers does this where it sees positions that begin anew, but only for masks that it makes itself.
    ``packed_sequence_compatibility_function`` and ``packed_sequence_mask_function`` are its own functions for
    that. transformers 5.17 counts queries and keys from the start of the pack even there, which matters for
    chunked windows; with 5.17 this does the same.

    Args:
        mask_function: Function of (sequence, head, query, key).
        position_ids: Positions, ``(B, S)``.
        rows: Number of the row that each token belongs to, ``(B, S)``.
    """
    from transformers import masking_utils

    by_row = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if by_row is not None:
        return by_row(mask_function, position_ids, rows)
    return masking_utils.and_masks(mask_function, masking_utils.packed_sequence_mask_function(rows))


def eager_attention_of(module: nn.Module) -> Any | None:
    """The function that a model's own file has for ``attn_implementation="eager"``; None if it has none.

    Model files hand ``eager_attention_forward`` to transformers' attention interface at each call; no table
    lists these functions.
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
    """Replace the function by which a model's file computes its router's loss, for the life of the process.

    A forward computes that loss over its own tokens. No argument can tell it that other ranks have more
    tokens, or that some tokens only fill up a pack. Each model file of transformers has the function under
    the same name, and looks it up at each call.

    Args:
        model: Model without wrappers and adapters around it.
        intercepted: Function that gets the file's function and returns the one to put in its place; called
            once per file.

    Returns:
        Whether the forward calls a function with that name and those arguments.
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

    ``init_process_group`` keeps it where only ``_get_default_store`` finds it. A store of our own would need
    a port, which only the launcher knows.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


# --- tensor subclasses ------------------------------------------------------------------------------------


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The very object that a DTensor wraps; ``tensor`` itself if it is no DTensor.

    The public ``to_local`` returns a view. Tensor subclasses of other libraries may not implement views, or
    lose what they hold in one.
    """
    from torch.distributed.tensor import DTensor

    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or what a DTensor wraps, keeps its values in other tensors and has no memory itself.

    Such tensors are made by ``_make_wrapper_subclass``, which leaves no public mark. Most follow the public
    protocol of ``__tensor_flatten__``, but the test for it, ``is_traceable_wrapper_subclass``, is private.
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
    """The modules whose experts transformers can share out over ranks: FQN to number of experts.

    The number is 0 for a module without parameters of its own, such as peft's around experts with adapters.
    The result is empty if transformers has no plan for the model, or is older than 5.20. Only the private
    ``_expand_parallel_plan`` expands a plan to a model's layers.
    """
    plan: dict[str, str] = getattr(model, "ep_plan", None) or {}
    if not hasattr(model, "_expand_parallel_plan"):
        return {}
    expanded = model._expand_parallel_plan(plan)  # type: ignore[operator]
    dispatched = [name for name, style in expanded.items() if style == "ep_dispatch_experts"]
    return {name: _stack_length(model.get_submodule(name)) for name in dispatched}


def _stack_length(experts: nn.Module) -> int:
    """Number of experts in a module: the length of its first own parameter; 0 without one."""
    return next((len(parameter) for parameter in experts.parameters(recurse=False)), 0)


def share_out_experts(model: nn.Module, ep_mesh: Any, alone: Any) -> None:
    """Leave each stack of experts only this rank's, and let tokens travel between the ranks of ``ep_mesh``.

    ``from_pretrained(distributed_config=...)`` does this to a model on the meta device, but publicly only
    together with transformers' own sharding and loading; hence ``apply_expert_parallelism``.

    Args:
        model: Model on the meta device, not sharded.
        ep_mesh: Mesh of one axis, whose ranks together have all experts.
        alone: Mesh of this rank alone: transformers asks which ranks have the same tokens.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan = model._expand_parallel_plan(model.ep_plan)  # type: ignore[operator]
    apply_expert_parallelism(model, ep_mesh, alone, plan, ep_implementation="all_to_all")


# --- ways to compute experts --------------------------------------------------------------------------------

# Attributes that transformers' decorator of experts sets.
_EXPERTS_KNOW = (
    "has_gate",
    "is_transposed",
    "num_experts",
)


def switchable_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of experts, by FQN, that transformers can compute in more than one way.

    Its decorator leaves no public mark on them; they are recognised by the attributes that its functions
    read.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(type(module), "_apply_gate") and all(hasattr(module, key) for key in _EXPERTS_KNOW)
    }


def experts_implementation_of(experts: nn.Module) -> str:
    """Name of the implementation that a module of experts runs: its config's ``_experts_implementation``."""
    return str(getattr(experts.config, "_experts_implementation", None) or "eager")


def experts_forward(experts: nn.Module, implementation: str) -> Any:
    """The function ``(experts, hidden_states, top_k_index, top_k_weights)`` of an implementation.

    transformers looks it up in ``ALL_EXPERTS_FUNCTIONS`` at each forward, by the name in the config that all
    experts of a model share.

    Raises:
        ValueError: If transformers has no implementation of that name.
    """
    import inspect

    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if implementation == "eager":
        return inspect.unwrap(type(experts).forward)
    if implementation not in ALL_EXPERTS_FUNCTIONS:
        known = ", ".join(map(repr, ("eager", *sorted(ALL_EXPERTS_FUNCTIONS))))
        raise ValueError(f"impl must be 'auto' or one of {known}, got {implementation!r}")
    return ALL_EXPERTS_FUNCTIONS[implementation]
