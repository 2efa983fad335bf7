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
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.codec import MALFORMED, dumps, loads
from fsdp_sft._ranks.agree import this_rank, world_size
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
class _LastWindows:
    """Number of micro-batches of the last window, its rows, and how many windows in a row had as many."""

    micro_batches: int = 0
    rows: int = 0
    times: int = 0


@dataclass
class _Resumed:
    """Number of the step that the model was loaded from, and the rows of all ranks in its windows."""

    step: int
    rows: int


_STEADY = 3  # windows in a row with the same number of rows, from which on that counts as the usual one


def remember_batch(model: nn.Module, micro_batches: Sequence[Any], mesh: "DeviceMesh | None") -> None:
    """Record the window of a completed step."""
    record = record_of(model)
    known, last = record.kept_or_new(GlobalBatch), record.kept_or_new(_LastWindows)
    number, rows, readers = len(micro_batches), sum(map(_rows_of, micro_batches)), readers_of(mesh)
    if number == last.micro_batches or number >= known.micro_batches:
        record.keep(GlobalBatch(number, rows, readers))
    last.times = last.times + 1 if (number, rows) == (last.micro_batches, last.rows) else 1
    last.micro_batches, last.rows = number, rows
    resumed = kept_of(model, _Resumed)
    if resumed is not None and last.times == _STEADY:
        _compare(resumed, rows * readers)
        resumed.rows = 0


def _compare(resumed: _Resumed, rows: int) -> None:
    """Warn, on rank 0, of steps with another number of rows than before the resume."""
    if this_rank() == 0 and resumed.rows and rows and rows != resumed.rows:
        warn_caller(
            f"a step of the optimizer had {resumed.rows:,} rows when step {resumed.step} was saved, and has "
            f"{rows:,} now (micro-batch x grad_accum_steps x ranks): learning rate and schedule were chosen "
            "for as many as before"
        )


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

    What the step had is kept, to be compared with the first windows.

    Raises:
        CheckpointCorruptError: If the file is not what was written.
    """
    if f"settings/{NAME}" not in manifest.files:  # without a train_step, or of an earlier version
        return ""
    path = folder / "settings" / NAME
    try:
        saved = GlobalBatch(**loads(read_bytes(path, MAX_JSON_BYTES), NAME))
        record_of(model).keep(_Resumed(int(manifest.step or 0), saved.rows * saved.readers))
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
