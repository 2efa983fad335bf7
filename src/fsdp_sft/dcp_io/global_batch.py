"""The global batch, the rows of a step of the optimizer, recorded so that a resume can say how it changes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_sft._model.record import kept_of, record_of
from fsdp_sft._model.sharded import mesh_of
from fsdp_sft._process.codec import MALFORMED, dumps, loads
from fsdp_sft._ranks.agree import world_size
from fsdp_sft._ranks.mesh import CP, copies_of_rows
from fsdp_sft._tensors.disk import read_bytes
from fsdp_sft.dcp_io.manifest import MAX_JSON_BYTES, Manifest
from fsdp_sft.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAME = "batch.json"  # below settings/


@dataclass
class GlobalBatch:
    """The usual window of ``train_step``: a shorter one than before counts only if it comes twice in a row.

    Attributes:
        micro_batches: Number of micro-batches on a rank.
        rows: Their rows, on this rank.
        readers: Number of ranks, or groups of ranks, that read distinct rows.
    """

    micro_batches: int = 0
    rows: int = 0
    readers: int = 0


@dataclass
class _LastWindow:
    """Number of micro-batches of the last window."""

    micro_batches: int = 0


def remember_batch(model: nn.Module, micro_batches: Sequence[Any], mesh: "DeviceMesh | None") -> None:
    """Record the window of a completed step."""
    record = record_of(model)
    known, last = record.kept_or_new(GlobalBatch), record.kept_or_new(_LastWindow)
    number = len(micro_batches)
    if number == last.micro_batches or number >= known.micro_batches:
        record.keep(GlobalBatch(number, sum(map(_rows_of, micro_batches)), readers_of(mesh)))
    last.micro_batches = number


def _rows_of(batch: Any) -> int:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids.shape[0] if isinstance(ids, torch.Tensor) and ids.ndim else 0


def readers_of(mesh: "DeviceMesh | None") -> int:
    """Number of ranks of a model's mesh, or groups of ranks, that read distinct rows."""
    if mesh is None:
        return 1
    sharing = mesh[CP].size() if CP in (mesh.mesh_dim_names or ()) else 1
    return mesh.size() // sharing // copies_of_rows(mesh)


def _readers_now(model: nn.Module, saved: GlobalBatch, manifest: Manifest) -> int:
    """``readers_of`` the model's mesh; of a model without one (the caller's own DDP) all ranks, as it was."""
    mesh = mesh_of(model)
    if mesh is None:
        return world_size() if saved.readers == manifest.world_size else saved.readers
    return readers_of(mesh)


def batch_settings(model: nn.Module) -> dict[str, bytes]:
    """Content of ``batch.json``, by the file's name; empty before the first step."""
    known = kept_of(model, GlobalBatch)
    return {NAME: dumps(asdict(known))} if known is not None and known.micro_batches else {}


def change_of_batch(folder: Path, manifest: Manifest, model: nn.Module) -> str:
    """How the global batch of a step changes when other ranks load it, in words; "" if it does not.

    Raises:
        CheckpointCorruptError: If the file is not what was written.
    """
    if f"settings/{NAME}" not in manifest.files:  # without a train_step, or of an earlier version
        return ""
    path = folder / "settings" / NAME
    try:
        saved = GlobalBatch(**loads(read_bytes(path, MAX_JSON_BYTES), NAME))
        now = _readers_now(model, saved, manifest)
        wanted = Fraction(saved.micro_batches * saved.readers, now)
    except (*MALFORMED, ZeroDivisionError) as error:
        raise CheckpointCorruptError(f"{path} is not what was written: {error}") from None
    if now == saved.readers:
        return ""
    keeps = (
        f"grad_accum_steps={wanted} keeps it"
        if wanted.denominator == 1
        else f"no grad_accum_steps keeps it exactly ({float(wanted):.2f} would)"
    )
    return (
        f"a step of the optimizer had {saved.rows * saved.readers:,} rows ({saved.rows:,} on each of "
        f"{saved.readers}, in {saved.micro_batches} micro-batches), and has {saved.rows * now:,} on {now} "
        f"with the same loader: {keeps}"
    )
