"""Export to a Hugging Face folder: what ``save_pretrained`` of the unsharded model would write."""

import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_sft._agree import agreed, share, this_rank
from fsdp_sft._compat import (
    copy_weight_conversions,
    keep_in_float32_patterns,
    names_left_out_on_save,
    revert_weight_conversion,
)
from fsdp_sft._disk import sweep, temporary_beside
from fsdp_sft._gather import Gatherer
from fsdp_sft._late import settle
from fsdp_sft._model import (
    ModelTensors,
    clean_name,
    model_tensors,
    tied_meta_twin,
    with_extra_tensors,
)
from fsdp_sft._wrappers import unwrapped
from fsdp_sft.adapters import adapted_layers, merged_weights, without_adapters
from fsdp_sft.blocks import configs_without_caches
from fsdp_sft.distributed import reshard
from fsdp_sft.errors import abridged
from fsdp_sft.export.hf_files import Described, HfFiles
from fsdp_sft.export.own_rows import has_whole_rows, open_own_rows
from fsdp_sft.export.settings import export_config, write_settings
from fsdp_sft.export.target import export_target, put_in_place, reachable
from fsdp_sft.export.upload import make_repository, upload


@dataclass(frozen=True)
class ExportPlan:
    """What an export writes, made on rank 0 and the same on all ranks.

    Attributes:
        sources: Name to save under, before conversion, to the model's first name of the tensor.
        dtypes: Dtype in the files of each source.
        groups: Sources that are converted together.
        written: Dtype and shape of what the files get, in order.
        unchanged: Sources that no conversion touches, to their names in the files.
        converts: Whether the architecture has conversions.
    """

    sources: dict[str, str]
    dtypes: dict[str, torch.dtype]
    groups: list[list[str]]
    written: Described
    unchanged: dict[str, str]
    converts: bool


def export_hf(
    model: nn.Module,
    out_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    chat_template: str | None = None,
    push_to_hub: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a folder that ``from_pretrained`` and serving engines read: weights, index, configuration, card.

    Names, shapes and dtypes are those of ``save_pretrained`` on the unsharded model: tied weights once, and
    in the format of the architecture on the Hub where transformers loads another one (such as Mixtral's
    experts, which are one tensor in memory and many on the Hub). The folder appears when it is complete.

    Adapters of peft are merged into the weights that are written; the model keeps them apart.
    ``export_adapter`` writes them alone.

    Args:
        model: A transformers model, sharded or not, or a peft model around one.
        out_dir: The folder to make; it may exist if it is empty. ``check_export`` says before training
            whether it can be made. Where it has filled meanwhile, the export is written beside it, under the
            name with ``-2`` at its end or the next number that is free, with a warning: a trained model is
            not lost for the name of a folder. Every rank writes its rows if all see rank 0's folder; else
            rank 0 writes everything.
        dtype: Of floating-point tensors, except modules that transformers always keeps in float32; None
            keeps what they have. Also goes into the configuration.
        max_shard_size: Of one file, in bytes or such as ``"5GB"``.
        tokenizer: Saved beside the model, if given: a tokenizer or a processor. Where it has a chat template,
            the token that ends an answer goes into ``generation_config.eos_token_id``, in front of those that
            are there, so that the model stops where it was taught to.
        chat_template: The template that rows were encoded with, if it is not the tokenizer's own: the text,
            or the name of one of the tokenizer's. It is saved with the tokenizer; the object itself stays as
            it is.
        push_to_hub: A repository such as ``"name/model"``, which is made (public or not as the account's
            default says) before the export begins, so that a token that may not write is found at once. The
            files are uploaded when all are complete, by rank 0, and stay if that fails.
        overwrite: If ``out_dir`` has files in it, exchange those of an earlier export (weights,
            configuration, tokenizer) for the new ones when these are complete, and leave the others.

    Returns:
        The folder: ``out_dir``, unless there was a warning.

    Raises:
        TypeError: If the model is not a transformers model, or ``tokenizer`` cannot be saved.
        ValueError: If the model has adapters that cannot be merged.
        OSError: If writing or uploading fails; raised on all ranks. Nothing is left behind of what is not
            complete.

    Collective: all ranks.
    Memory: 4 Mi elements of a tensor on each rank. Of tensors that are converted, or that are not sharded
        by rows: on rank 0 one of them, or a group that is converted together, twice, and on other ranks
        their own part of one. All of it CPU memory. A weight with adapters is float32 at least while they are
        merged.
    """
    if isinstance(model, nn.Module):
        model = unwrapped(model)
        settle(model)
    reshard(model)
    target = export_target(out_dir)
    merges = {} if not isinstance(model, nn.Module) else adapted_layers(model)
    caching = [] if not isinstance(model, nn.Module) else configs_without_caches(model)
    with without_adapters(model, trained=True) as base:
        folder, files = _export(
            base,
            merges,
            caching,
            target,
            dtype,
            max_shard_size,
            (tokenizer, chat_template),
            push_to_hub,
            overwrite,
        )
    if push_to_hub is not None:
        upload(folder, push_to_hub, files)
    return folder


def _export(
    model: nn.Module,
    merges: Mapping[str, Any],
    caching: list[Any],
    target: Path,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    chat: tuple[Any, str | None],
    push_to_hub: str | None,
    overwrite: bool,
) -> tuple[Path, list[str]]:
    plan: ExportPlan | None = None
    temporary: Path | None = None
    files: list[str] = []
    try:
        with agreed(f"preparing to export to {target}"):
            content = _checked(model, dtype, *chat)
            _refuse_tied(content, merges)
            if this_rank() == 0:
                if push_to_hub is not None:
                    make_repository(push_to_hub)
                target = reachable(target)
                target.parent.mkdir(parents=True, exist_ok=True)
                sweep(target)
                temporary = temporary_beside(target)
                temporary.mkdir()
                plan = _plan(model, content, dtype)
                config = export_config(model, content, caching, dtype)
                write_settings(model, config, temporary, push_to_hub or target.name, dtype, *chat)
        plan, folder = share((plan, temporary))
        assert plan is not None
        gatherer = Gatherer()
        _write_weights(model, content, plan, merges, folder, max_shard_size, gatherer)
        gatherer.finish(f"exporting to {target}")
        with agreed(f"publishing {target}"):
            if temporary is not None:
                files = [str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file()]
                target = put_in_place(temporary, target, overwrite=overwrite)
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    done: tuple[Path, list[str]] = share((target, files))
    return done


def _checked(model: nn.Module, dtype: torch.dtype | None, tokenizer: Any, chat_template: Any) -> ModelTensors:
    import transformers

    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(
            f"export_hf takes a transformers model, got {type(model).__name__}; "
            "save_full_state_dict writes any model"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise TypeError(f"tokenizer must have save_pretrained, got {type(tokenizer).__name__}")
    if chat_template is not None and not isinstance(chat_template, str):
        raise TypeError(f"chat_template must be a string, got {type(chat_template).__name__}")
    return _without_extra_objects(model_tensors(model))


def _without_extra_objects(content: ModelTensors) -> ModelTensors:
    kept = {name: value for name, value in content.extra.items() if type(value) is torch.Tensor}
    left_out = content.extra.keys() - kept.keys()
    if left_out:
        warnings.warn(
            f"extra state of modules that is no tensor is not exported: {abridged(left_out)}", stacklevel=4
        )
    return with_extra_tensors(replace(content, extra=kept))


def _plan(model: nn.Module, content: ModelTensors, dtype: torch.dtype | None) -> ExportPlan:
    twin = _unsharded_twin(model)
    sources = _sources(twin, content)
    dtypes = _dtypes(model, content, sources, dtype)
    meta = {
        name: torch.empty(content.tensors[first].shape, dtype=dtypes[name], device="meta")
        for name, first in sources.items()
    }
    final = revert_weight_conversion(twin, meta)
    converts = final is not meta
    groups = _groups(twin, meta, final) if converts else [[name] for name in meta]
    written = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in final.items()}
    names = {id(tensor): name for name, tensor in final.items()}
    unchanged = {name: names[id(tensor)] for name, tensor in meta.items() if id(tensor) in names}
    return ExportPlan(sources, dtypes, groups, written, unchanged, converts)


def _unsharded_twin(model: nn.Module) -> nn.Module:
    """An ordinary model of the same architecture; without memory, if ``model`` is sharded."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return model
    twin = tied_meta_twin(model)
    copy_weight_conversions(model, twin)
    return twin


def _sources(twin: nn.Module, content: ModelTensors) -> dict[str, str]:
    ignored, tied_patterns = names_left_out_on_save(twin)
    aliases: dict[str, list[str]] = {}
    for name, first in content.names.items():
        aliases.setdefault(first, []).append(name)
    kept = set()
    for names in aliases.values():
        main = [name for name in names if not any(re.search(pattern, name) for pattern in tied_patterns)]
        kept.add(main[0] if main else max(names))
    return {name: first for name, first in content.names.items() if name in kept and name not in ignored}


def _dtypes(
    model: nn.Module, content: ModelTensors, sources: Mapping[str, str], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    float16_only, always = keep_in_float32_patterns(model)
    patterns = (
        {torch.float16: always | float16_only, torch.bfloat16: always}.get(dtype, set()) if dtype else set()
    )
    dtypes = {}
    for name, first in sources.items():
        own = content.tensors[first].dtype
        in_float32 = any(re.search(rf"(?:^|\.){re.escape(p)}(?:\.|$)", name) for p in patterns)
        wanted = torch.float32 if in_float32 else dtype
        dtypes[name] = wanted if wanted is not None and own.is_floating_point else own
    return dtypes


def _groups(
    twin: nn.Module, meta: dict[str, torch.Tensor], final: dict[str, torch.Tensor]
) -> list[list[str]]:
    """The smallest sets of tensors that can be converted apart from the others, tried out without memory."""
    alone: dict[str, bool] = {}  # by name without indices: blocks are alike
    outputs: dict[str, list[str]] = {}
    for name, tensor in meta.items():
        kind = re.sub(r"\d+", "#", name)
        if alone.get(kind):
            continue
        try:
            made = revert_weight_conversion(twin, {name: tensor})
        except Exception:  # a conversion that needs several tensors fails in its own way with one of them
            made = {}
        alone[kind] = bool(made) and all(
            key in final and final[key].shape == t.shape for key, t in made.items()
        )
        if not alone[kind]:
            outputs[name] = list(made) or [re.sub(r"(\d+).*", r"\1", name)]  # else by block
    groups = [[name] for name in meta if alone[re.sub(r"\d+", "#", name)]]
    return groups + _joined(outputs)


def _joined(outputs: Mapping[str, list[str]]) -> list[list[str]]:
    """Names that share an output, together."""
    groups: list[tuple[set[str], list[str]]] = []
    for name, made in outputs.items():
        sharing = [group for group in groups if group[0].intersection(made)]
        groups = [group for group in groups if group not in sharing]
        merged = set(made).union(*(keys for keys, _ in sharing))
        groups.append((merged, [member for _, members in sharing for member in members] + [name]))
    return [members for _, members in groups]


def _write_weights(
    model: Any,
    content: ModelTensors,
    plan: ExportPlan,
    merges: Mapping[str, Any],
    folder: Path,
    max_shard_size: int | str,
    gatherer: Gatherer,
) -> None:
    writer = HfFiles(plan.written)
    if this_rank() == 0:
        gatherer.attempt(lambda: writer.start(folder, max_shard_size, model.num_parameters()))
    twin = _unsharded_twin(model) if plan.converts and this_rank() == 0 else None
    own = open_own_rows(folder, writer.places() if this_rank() == 0 and gatherer.error is None else None)
    for group in plan.groups:
        tensor = content.tensors[plan.sources[group[0]]]
        is_adapted = plan.sources[group[0]].rpartition(".")[0] in merges
        if own is not None and group[0] in plan.unchanged and not is_adapted and has_whole_rows(tensor):
            written = plan.unchanged[group[0]]
            gatherer.attempt(partial(own.write, written, tensor, plan.dtypes[group[0]]))
            writer.expect_no_more(written)
            continue
        full = {}
        for name in group:
            whole = _gathered(content, plan, merges, name, gatherer)
            if whole is not None:
                full[name] = whole
        if full:
            gatherer.attempt(partial(_write_converted, writer, twin, full))
    if own is not None:
        gatherer.attempt(own.sync)
        own.close()
    if this_rank() == 0:
        gatherer.attempt(writer.finish)
        writer.close()


def _write_converted(writer: HfFiles, twin: nn.Module | None, full: dict[str, torch.Tensor]) -> None:
    made = full if twin is None else revert_weight_conversion(twin, full)
    for name, tensor in made.items():
        writer.write(name, tensor)


def _refuse_tied(content: ModelTensors, merges: Mapping[str, Any]) -> None:
    tied = {*content.ties, *content.ties.values()}
    for fqn in merges:
        if f"{fqn}.weight" in tied:
            raise ValueError(
                f"{fqn} has adapters and its weight is tied to another: merged, both would change. Write the "
                "adapters alone with export_adapter"
            )


def _gathered(
    content: ModelTensors, plan: ExportPlan, merges: Mapping[str, Any], name: str, gatherer: Gatherer
) -> torch.Tensor | None:
    """The full tensor on rank 0, with adapters merged into it if it has any."""
    source, dtype = plan.sources[name], plan.dtypes[name]
    fqn, _, leaf = source.rpartition(".")
    if fqn not in merges:
        return gatherer.gather(content.tensors[source], dtype)
    full = {}
    for key, tensor in merges[fqn].state_dict(keep_vars=True).items():
        wide = (
            torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
        )
        part = gatherer.gather(tensor, wide)
        if part is not None:
            full[clean_name(key)] = part
    if not full:
        return None
    merged: dict[str, torch.Tensor] = {}
    gatherer.attempt(lambda: merged.update(merged_weights(merges[fqn], full)))
    return merged[leaf].to(dtype) if merged else None
