"""A description of a checkpoint in words, for the command line."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_sft._tensors.disk import full_path
from fsdp_sft.dcp_io.manifest import Manifest, per_optimizer, read_manifest
from fsdp_sft.dcp_io.retention import find_checkpoints
from fsdp_sft.dcp_io.steps import is_step_folder
from fsdp_sft.dcp_io.verify import file_problems, verify_folder
from fsdp_sft.errors import CheckpointCorruptError, CheckpointNotFoundError, abridged, printable


@dataclass(frozen=True)
class Inspection:
    """What a step or a root is.

    Attributes:
        facts: The same as the text, in JSON types.
        text: A description in words.
        sound: Whether nothing is wrong.
    """

    facts: dict[str, Any]
    text: str
    sound: bool


def inspect_checkpoint(path: str | os.PathLike[str], *, hashes: bool = False) -> Inspection:
    """Describe a step, or list the steps below a root.

    Args:
        path: Folder of the step, or root.
        hashes: Whether to read every file of a step and compare checksums.

    Raises:
        CheckpointNotFoundError: If there is no such folder.
    """
    folder = full_path(path)
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"there is no folder {folder}")
    steps = [] if is_step_folder(folder) else find_checkpoints(folder)
    if not steps:
        return _of_step(folder, hashes)
    looked = "contents compared with checksums" if hashes else "names and sizes compared"
    lines, found = [f"{len(steps)} steps below {folder}; {looked}"], []
    for info in steps:
        problems = verify_folder(info.path, hashes=True) if hashes and info.sound else []
        sound = info.sound and not problems
        metric = "" if info.metric is None else f", metric {info.metric:g}"
        lines.append(f"  {info.path.name}: {'sound' if sound else 'NOT SOUND'}{metric}")
        lines += [f"    PROBLEM  {problem}" for problem in problems[:20]]
        one = {"path": str(info.path), "step": info.step, "sound": sound, "metric": info.metric}
        found.append(one | ({"problems": problems} if problems else {}))
    return Inspection({"steps": found}, printable("\n".join(lines)), all(one["sound"] for one in found))


def _of_step(folder: Path, hashes: bool) -> Inspection:
    """What one step is."""
    try:
        manifest = read_manifest(folder)
    except CheckpointCorruptError as error:
        facts = {"path": str(folder), "sound": False, "problems": [str(error)]}
        return Inspection(facts, f"{error}\nload the step before it", False)
    problems = (
        verify_folder(folder, hashes=True)
        if hashes
        else file_problems(folder, manifest, list(manifest.files), hashes=False, headers=False)
    )
    lines = [str(folder), *(f"  {name:<12} {value}" for name, value in _facts(manifest))]
    looked = "contents compared with checksums" if hashes else "names and sizes compared"
    lines.append(f"  {'files':<12} {len(manifest.files)}, {_bytes(manifest)}; {looked}")
    lines += [f"  PROBLEM      {problem}" for problem in problems[:20]]
    facts = {"path": str(folder), "sound": not problems, "problems": problems, **dict(_facts(manifest))}
    return Inspection(facts, printable("\n".join(lines)), not problems)


def _facts(manifest: Manifest) -> list[tuple[str, str]]:
    """(heading, text) of each line about a step."""
    mesh = ", ".join(f"{name}={size}" for name, size in manifest.mesh or [])
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    facts = [
        ("step", str(manifest.step)),
        ("format", f"version {manifest.version}, written by {versions}"),
        ("ranks", f"{manifest.world_size}{f' ({mesh})' if mesh else ''}"),
    ]
    if manifest.metric is not None:
        facts.append(("metric", f"{manifest.metric:g}"))
    if manifest.model is not None:
        numel = sum(math.prod(tensor.shape) for tensor in manifest.model.values())
        dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in manifest.model.values()})
        more = f", {len(manifest.ties)} tied names" if manifest.ties else ""
        more += f", {len(manifest.frozen)} frozen" if manifest.frozen else ""
        found = f"{len(manifest.model)} tensors, {numel:,} elements, {', '.join(dtypes)}"
        facts.append(("model", found + more))
    if manifest.optimizer is not None:
        for info, tensors in per_optimizer(manifest.optimizer_info, manifest.optimizer):
            states = sorted({name.rpartition("/")[2] for name in tensors})
            text = f"{info['class']}, {len(info['parameters'])} parameters in {len(info['groups'])} groups"
            facts.append(("optimizer", f"{text}, state {abridged(states)}"))
    return [*facts, ("for torch", "HuggingFaceStorageReader(<folder>/shards), names model.*, optimizer.*")]


def _bytes(manifest: Manifest) -> str:
    """The size of all files in words."""
    size = float(sum(record.size for record in manifest.files.values()))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
