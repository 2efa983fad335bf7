"""Conversion of other tools' checkpoints into steps of this library: model, optimizer and step number.

The model is never loaded: each rank reads a tensor just before it writes it.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.named import clean_name
from fsdp_sft._model.sharded import reshard
from fsdp_sft._model.state import ModelTensors, match_tensors, model_tensors
from fsdp_sft._ranks.agree import agreed, through_rank_0
from fsdp_sft._tensors.boxes import Box
from fsdp_sft._tensors.disk import full_path, unsound_beside
from fsdp_sft.dcp_io.content import FolderContent, OptimizerContent, ReadTensor, describe_mesh
from fsdp_sft.dcp_io.folder import new_folder_beside, write_folder
from fsdp_sft.dcp_io.foreign.adam import optimizer_of
from fsdp_sft.dcp_io.foreign.names import KeyMap, check_known, in_order, translated
from fsdp_sft.dcp_io.foreign.open import FORMATS, open_foreign
from fsdp_sft.dcp_io.foreign.source import ForeignCheckpoint, ForeignTensor
from fsdp_sft.dcp_io.root import prepare_root
from fsdp_sft.dcp_io.steps import step_folder
from fsdp_sft.errors import CheckpointMismatchError, abridged

# Buffers that some tools store, and that models compute by themselves.
_COMPUTED = (".rotary_emb.inv_freq", "freqs_cis", "rope.cache")


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    model: nn.Module,
    format: str = "auto",  # noqa: A002 - the name that loading functions elsewhere have for it
    key_map: KeyMap | None = None,
    allow_pickle: bool = False,
) -> Path:
    """Write another tool's checkpoint as a step that ``load_checkpoint`` reads.

    It reads folders of Accelerate and of transformers' Trainer (``SHARDED_STATE_DICT``, ``FULL_STATE_DICT``),
    of torchtitan and torchtune, and of torch's distributed checkpoint with Hugging Face names, also as its
    recipe lays them out (``{"app": AppState}``). The model's numbers are taken over unchanged, and so are the
    moments of Adam and AdamW with their options. Random number generators, schedulers and loaders are not.

    Args:
        source: Folder of the other tool's checkpoint.
        target: Root of all steps of this library; made if it is not there. The step has the source's number,
            or 0 if the source has none.
        model: Model with the names, shapes, dtypes and sharding to write; it may be on the meta device. Its
            values are not used.
        format: ``"accelerate"`` and ``"full"`` (those two kinds of state dict), ``"dcp"`` (one folder of
            torch's distributed checkpoint: torchtitan, torchtune and others), or ``"auto"``.
        key_map: Mapping from the tool's names of parameters to the model's, or a function from one to the
            other; None as a name leaves the parameter out. It is needed for other models of torchtitan and
            torchtune than Llama 3 and Qwen 3, and for other tools. Names that a mapping does not have are
            translated as without it. Rows of Llama's queries and keys are reordered in any case if the names
            are torchtitan's or torchtune's.
        allow_pickle: Whether ``pytorch_model_fsdp.bin`` and ``optimizer.bin``, whole files of ``torch.save``,
            may be read. No code in any file is run, whether or not it is set.

    Returns:
        Folder of the step.

    Raises:
        CheckpointNotFoundError: If there is no such checkpoint.
        CheckpointFormatError: If a file holds objects that are not tensors or plain values.
        CheckpointCorruptError: If a file is damaged.
        CheckpointMismatchError: If names, shapes or dtypes are not the model's; the message lists them.
        CheckpointExistsError: If that step exists and is sound.
        CheckpointInUseError: If another job saves below ``target``.
        ValueError: If the tool's names, or its order of rows, are not known for this type of model.

    Collective: all ranks; all raise the same error, except for an argument that is wrong on one of them.
    Memory: This rank's part of one tensor, and one of the parts of the source's files that it lies in.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> saved = dcp.save(model.state_dict(), checkpoint_id="theirs")
        >>> meta = fs.build_meta_model(path)
        >>> print(fs.convert_checkpoint("theirs", "ckpt", model=meta).name)
        step-0
        >>> loaded = fs.load_checkpoint("ckpt", model=model)
    """
    _check_arguments(format, key_map)
    root, folder = full_path(target), full_path(source)
    reshard(model)
    with agreed(f"looking at {folder}"):
        if root.exists() and not root.is_dir():
            raise NotADirectoryError(f"{root} is a file; expected the folder of all steps")
        foreign = open_foreign(folder, format, allow_pickle=allow_pickle)
        content = _content(foreign, model, key_map)
    path = step_folder(root, int(content.step or 0))

    def make_folder(told: list[tuple[str, str]]) -> Path:
        digests, targets = zip(*told, strict=True)
        if len(set(targets)) > 1:
            raise ValueError(f"ranks were told different targets: {abridged(sorted(set(targets)))}")
        prepare_root(root, int(content.step or 0))
        return new_folder_beside(path, content, list(digests))

    temporary = through_rank_0(
        f"preparing to write {path}", lambda: (content.tensors_digest(), str(path)), make_folder
    )
    write_folder(path, content, aside=unsound_beside(path), temporary=temporary)
    return path


def _check_arguments(kind: str, key_map: Any) -> None:
    """Refuse arguments of undocumented types or values."""
    if kind not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {kind!r}")
    if key_map is None or callable(key_map):
        return
    pairs = key_map.items() if isinstance(key_map, Mapping) else [(None, None)]
    if any(not isinstance(theirs, str) or not isinstance(ours, str | None) for theirs, ours in pairs):
        raise TypeError("key_map must be a mapping of names to names or None, or a function of a name")


def _content(foreign: ForeignCheckpoint, model: nn.Module, key_map: KeyMap | None) -> FolderContent:
    """Content to write, whose tensors are read from the other checkpoint when they are written."""
    config = getattr(model, "config", None)
    if key_map is None:
        check_known(foreign.kind, config)
    live = model_tensors(model, values=False)
    if live.extra or foreign.others:
        raise CheckpointMismatchError(
            "state that is no tensor cannot be converted: "
            f"{abridged([*live.extra, *foreign.others], ', ', 4)}"
        )

    def ours(name: str) -> str | None:
        return translated(clean_name(name), foreign.kind, key_map)

    def ordered(name: str, tensor: ForeignTensor) -> ForeignTensor:
        return in_order(name, tensor, foreign.kind, config)

    tensors = _model(foreign, live, {name: ours(name) for name in foreign.model}, ordered)
    states, info = optimizer_of(foreign, live, ours, ordered)
    return FolderContent(
        step=foreign.step or 0,
        mesh=describe_mesh(model),
        model=replace(live, tensors=tensors),
        optimizer=OptimizerContent(states, info) if states else None,
    )


def _model(
    foreign: ForeignCheckpoint, live: ModelTensors, names: Mapping[str, str | None], ordered: Any
) -> dict[str, Any]:
    """What is read for each tensor of the model, by its first name.

    Args:
        foreign: The other tool's checkpoint.
        live: The model.
        names: The model's name of each tensor of the checkpoint; None leaves the tensor out.
        ordered: Function that puts the rows of a tensor into the model's order.
    """
    known = {n: ours for n, ours in names.items() if ours in live.names or not n.endswith(_COMPUTED)}
    stored = {name: (foreign.model[name].dtype, foreign.model[name].shape) for name in known}
    found, problems = match_tensors(live, stored, _is_exact, known)
    if problems:
        raise CheckpointMismatchError(
            f"the {foreign.kind} checkpoint does not fit the model: {abridged(problems, '; ')}"
        )
    read: dict[str, Any] = {}
    for first, theirs in found.items():
        like = live.tensors[first]
        tensors = [(name, ordered(names[name], foreign.model[name])) for name in theirs]
        read[first] = ReadTensor(tuple(like.shape), like.dtype, like, _reader(tensors, like.dtype))
    return read


def _is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether dtype ``target`` can hold every number of dtype ``source``."""
    both = source.is_floating_point and target.is_floating_point
    return source == target or (both and torch.promote_types(source, target) == target)


def _reader(tensors: list[tuple[str, ForeignTensor]], dtype: torch.dtype) -> Any:
    """A function that reads a box of a tensor, and checks that all its names have the same values."""

    def read(box: Box) -> torch.Tensor:
        values = tensors[0][1].read(box)
        for name, other in tensors[1:]:
            if not torch.equal(other.read(box), values):
                raise CheckpointMismatchError(f"{tensors[0][0]} and {name}, one tensor in the model, differ")
        return values.to(dtype)

    return read
