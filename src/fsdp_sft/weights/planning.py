"""Look at a load before doing it: what each rank would read, without a peer and without a tensor."""

import itertools
import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_sft.weights.geometry import Box, box_of
from fsdp_sft.weights.plan import Plan, make_plan
from fsdp_sft.weights.provenance import Piece, intersect
from fsdp_sft.weights.resolve import Checkpoint, open_checkpoint


def plan_load(
    model: nn.Module, folder: str | os.PathLike[str], *, missing: str = "error", unexpected: str = "error"
) -> tuple[Plan, Checkpoint]:
    """Plan a load from a local folder; not collective, so one process can plan for a whole job.

    Args:
        model: Meta or not, sharded (over a fake process group, too) or not.
        folder: Of the checkpoint; the headers of its files are read.
        missing: See ``load_weights``.
        unexpected: See ``load_weights``.

    Raises:
        CheckpointFormatError: As ``load_weights`` does before it reads.
    """
    checkpoint = open_checkpoint(Path(folder))
    return make_plan(model, checkpoint, missing=missing, unexpected=unexpected), checkpoint


def bytes_by_rank(model: nn.Module, plan: Plan, checkpoint: Checkpoint) -> list[int]:
    """Bytes that each rank of the model's mesh would read with ``strategy="slice"``, by its coordinates.

    Groups that are converted whole count on every rank.
    """
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    mesh = next((t.device_mesh for t in tensors.values() if isinstance(t, DTensor)), None)
    extents = tuple(mesh.shape) if mesh is not None else ()
    coordinates = [list(c) for c in itertools.product(*(range(n) for n in extents))]
    whole = sum(checkpoint.sources[key].entry.num_bytes for group in plan.groups for key in group.keys)
    counts = [whole] * len(coordinates)
    for target in plan.targets.values():
        for number, coordinate in enumerate(coordinates):
            box = box_of(tensors[target.name], coordinate)
            counts[number] += sum(_overlap(checkpoint, piece, box) for piece in target.pieces)
    return counts


def _overlap(checkpoint: Checkpoint, piece: Piece, box: Box) -> int:
    part = intersect(piece, box.start, box.size)
    dtype: torch.dtype = checkpoint.sources[piece.key].entry.dtype
    return 0 if part is None else part.numel * dtype.itemsize
