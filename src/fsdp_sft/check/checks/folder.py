"""Whether the run's folder takes checkpoints: writes, room, renames that all ranks see, and its speed."""

import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fsdp_sft._process.gpus import GIB
from fsdp_sft._ranks.agree import all_gather_objects, all_reduce_sum, through_rank_0
from fsdp_sft._tensors.disk import renames_whole, sync_file
from fsdp_sft._tensors.safetensors import bytes_of
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.layers import parameters_of
from fsdp_sft.check.mechanism import Check, Outcome, Trouble

_BYTES, _ON_CPU = 64 << 20, 4 << 20  # that each rank writes
_SEEN_WITHIN = 5.0  # seconds after which a rename has to be seen by every rank
_LOOK = 0.1
_LEAST_ROOM = 1 * GIB
_A_PARAMETER = 12  # bytes of a checkpoint: a master and two moments in float32


def _run(cluster: Cluster) -> Outcome:
    if cluster.folder is None:
        if cluster.folder_problem:
            return Outcome(troubles=(Trouble("fail", cluster.folder_ranks, cluster.folder_problem),))
        return Outcome(unseen="no folder that all nodes see: give --root")
    folder, root = cluster.folder, cluster.asked.root
    size = _BYTES if cluster.has_own_clock else _ON_CPU
    wrote, problem = _write(folder / f"rank-{cluster.rank}", size, cluster.rank)
    problems = [(rank, one) for rank, (_, one) in enumerate(all_gather_objects((wrote, problem))) if one]
    if problems:
        cluster.folder, cluster.folder_problem = None, problems[0][1]  # nothing after this can use it
        return Outcome(troubles=tuple(_unwritable(problems, root or folder)))
    troubles = _renames(cluster, folder)
    read, contents = _read(folder / f"rank-{(cluster.rank + 1) % cluster.world_size}", size, cluster)
    rates = all_gather_objects((wrote, read, contents))
    stale = tuple(rank for rank, (_, _, is_right) in enumerate(rates) if not is_right)
    if stale:
        text = (
            "what another rank has written is read as something else, or not at all: do not use this folder"
        )
        troubles.append(Trouble("fail", stale, text))
    measured = {
        "write_bytes_per_second": size * cluster.world_size / max(one for one, _, _ in rates),
        "read_bytes_per_second": size * cluster.world_size / max(one for _, one, _ in rates),
    }
    troubles += through_rank_0("looking at the folder", lambda: None, lambda _: _kind_of(cluster, folder))
    said = "writes {:.3g} GB/s, reads {:.3g} GB/s, all ranks together".format(
        *(v / 1e9 for v in measured.values())
    )
    return Outcome(said, tuple(troubles), measured)


def _content(size: int, rank: int) -> torch.Tensor:
    return torch.arange(size // 8, dtype=torch.int64) + rank


def _write(path: Path, size: int, rank: int) -> tuple[float, str]:
    """(seconds of writing a file to the disk, why it failed or "")."""
    content = bytes_of(_content(size, rank))
    start = time.perf_counter()
    try:
        with path.open("wb") as file:
            file.write(content)
        sync_file(path)
    except OSError as error:
        return 0.0, f"{type(error).__name__}: {error.strerror or error}"
    return time.perf_counter() - start, ""


def _unwritable(problems: list[tuple[int, str]], root: Path) -> list[Trouble]:
    by_text: dict[str, list[int]] = {}
    for rank, text in problems:
        by_text.setdefault(text, []).append(rank)
    return [
        Trouble("fail", tuple(ranks), f"{root} cannot be written ({text}): make room or take another --root")
        for text, ranks in by_text.items()
    ]


def _read(path: Path, size: int, cluster: Cluster) -> tuple[float, bool]:
    """(seconds of reading the next rank's file, whether it holds what that rank has written)."""
    peer = (cluster.rank + 1) % cluster.world_size
    all_reduce_sum([0.0])
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):  # so that the disk is read, and not the memory of this host
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            found = bytearray()
            while piece := os.read(fd, 16 << 20):
                found += piece
        finally:
            os.close(fd)
    except OSError:
        return 1e-9, False
    return max(time.perf_counter() - start, 1e-9), found == bytes(bytes_of(_content(size, peer)))


def _renames(cluster: Cluster, folder: Path) -> list[Trouble]:
    """Each rank renames a folder with a file, and looks for those of all ranks."""
    ranks = range(cluster.world_size)
    before, after = folder / f"old-{cluster.rank}", folder / f"new-{cluster.rank}"
    problem = ""
    try:
        before.mkdir()
        (before / "file").write_text(str(cluster.rank))
        os.listdir(folder)  # a client that remembers a listing remembers this one
        os.rename(before, after)
    except OSError as error:
        problem = f"{type(error).__name__}: {error.strerror or error}"
    problems = [(rank, one) for rank, one in enumerate(all_gather_objects(problem)) if one]
    if problems:
        return _unwritable(problems, cluster.asked.root or folder)
    deadline, unseen = time.monotonic() + _SEEN_WITHIN, {0}
    while unseen:
        names = set(os.listdir(folder))
        unseen = {rank for rank in ranks if f"new-{rank}" not in names or f"old-{rank}" in names}
        if not unseen or time.monotonic() > deadline:
            break
        time.sleep(_LOOK)
    for rank in sorted(set(ranks) - unseen):
        try:
            if (folder / f"new-{rank}" / "file").read_text() != str(rank):
                unseen.add(rank)
        except OSError:
            unseen.add(rank)
        if cluster.world_size > 256 and rank > 256:
            break  # a file of every rank would be a million opens
    told: list[list[int]] = all_gather_objects(sorted(unseen))
    return _blamed(told)


def _blamed(told: list[list[int]]) -> list[Trouble]:
    """Who does not see whose rename: a rank that sees hardly any, or one whose rename hardly any sees."""
    if not any(told):
        return []
    ranks = len(told)
    blind = tuple(rank for rank, missing in enumerate(told) if len(missing) > ranks / 2)
    votes = Counter(whose for rank, missing in enumerate(told) if rank not in blind for whose in missing)
    lost = tuple(sorted(votes)) if len(blind) < ranks else tuple(range(ranks))
    found = []
    if blind and len(blind) < ranks:
        text = f"renames of the other ranks are not seen within {_SEEN_WITHIN:.0f} s"
        found.append(Trouble("fail", blind, f"{text}: {_ADVICE}"))
    if lost:
        text = f"what these ranks rename is not seen under its new name alone within {_SEEN_WITHIN:.0f} s"
        found.append(Trouble("fail", lost, f"{text}: {_ADVICE}"))
    return found


_ADVICE = (
    "checkpoints appear by a rename; mount the folder without caching of attributes (noac), or take another"
)


def _kind_of(cluster: Cluster, folder: Path) -> list[Trouble]:
    """What rank 0 sees alone: whether renames are whole, whether a file is made once, and the room."""
    found = []
    if not renames_whole(folder):
        text = "its folders are copied, not renamed, as by mounts of object stores: take a file system"
        found.append(Trouble("fail", (), text))
    (folder / "once").touch(exist_ok=False)
    try:
        (folder / "once").touch(exist_ok=False)
        found.append(Trouble("fail", (), "the same file can be made twice: locks of the folder do not hold"))
    except FileExistsError:
        pass
    free = shutil.disk_usage(folder).free
    need = max(_LEAST_ROOM, _checkpoint_bytes(cluster.asked.config))
    if free < need:
        text = (
            f"{cluster.asked.root or folder} has {free / GIB:,.1f} GiB free, and one checkpoint takes about "
            f"{need / GIB:,.1f}"
        )
        found.append(Trouble("warn", (), text))
    return found


def _checkpoint_bytes(config: Any | None) -> int:
    """Bytes of a step of full fine-tuning; 0 without a config."""
    if config is None:
        return 0
    return _A_PARAMETER * parameters_of(config)


CHECK = Check(
    "folder", "does the run's folder take checkpoints, and do all ranks see the same?", 120, 15, _run
)
