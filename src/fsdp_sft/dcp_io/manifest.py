"""The manifest: everything about a checkpoint except the numbers, with a digest of its own.

Nothing in it is trusted before it has been checked: names of files follow one pattern, and the stored parts
tile every tensor exactly once.
"""

import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp_sft._boxes import Box, tiling_problem
from fsdp_sft._disk import FileRecord, TensorReader, file_problem, read_bytes
from fsdp_sft._safetensors import DTYPES, dtype_name
from fsdp_sft.dcp_io.codec import decode, dumps, loads
from fsdp_sft.dcp_io.steps import step_number
from fsdp_sft.errors import CheckpointCorruptError

MANIFEST_NAME = "MANIFEST.json"
TRAIN_STATE_NAME = "train_state.json"
FORMAT = "fsdp-sft-checkpoint"
VERSIONS = (1, 2)  # 2 has several optimizers, or state that modules have made themselves
MAX_JSON_BYTES = 1 << 27  # Python makes up to 24 bytes of one; 70B parameters on 1,024 ranks take 100 MB
_MAX_DIMS = 64  # torch's own limit
_MAX_SIZE = (1 << 63) - 1
_FILE_NAMES = re.compile(
    r"(?:model|optimizer)/\d{5,}\.safetensors|train_state\.json|rank/\d{5,}\.(?:json|safetensors)"
    r"|settings/\w[\w.-]*"
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint.

    Attributes:
        shape: Of the full tensor.
        dtype: Of its elements.
        chunks: (file, part of the tensor that it has) pairs; together they tile the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[tuple[str, Box]]


@dataclass(frozen=True)
class Manifest:
    """What one folder holds.

    Attributes:
        step: Number of the step; None for an optimizer state of its own.
        world_size: Ranks that wrote it.
        mesh: Name to size of each axis of their mesh, in order; None for an ordinary model.
        files: Name below the folder to record.
        model: FQN to tensor; None if there is no model in it.
        ties: Other names of tied tensors, to the one that is stored.
        frozen: FQNs of parameters that were frozen.
        extra: Name to what ``get_extra_state`` of a module returned, as JSON; its tensors are in ``model``.
        optimizer: ``<fqn>/<state name>`` to tensor; None if there is no optimizer in it. Of several, each
            with its number and a slash in front.
        metric: What ``save_checkpoint`` was given, lower being better; None if it was nothing finite.
        optimizer_info: The optimizer's class, parameters, groups and state other than tensors; of several, a
            list of these under ``optimizers``.
        versions: Of the libraries that wrote it.
        digest: Of everything else, once it has been read from a file.
    """

    step: int | None
    world_size: int
    mesh: list[list[Any]] | None
    files: dict[str, FileRecord]
    model: dict[str, StoredTensor] | None = None
    ties: dict[str, str] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, StoredTensor] | None = None
    optimizer_info: dict[str, Any] = field(default_factory=dict)
    metric: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    digest: str = ""


def versions() -> dict[str, str]:
    """Versions of what writes a checkpoint; of transformers only if it has been imported."""
    from fsdp_sft import __version__

    found = {"fsdp_sft": __version__, "torch": str(torch.__version__), "python": sys.version.split()[0]}
    if "transformers" in sys.modules:
        found["transformers"] = str(sys.modules["transformers"].__version__)
    return found


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's bytes, with the digest of all the rest in them."""
    body = {
        "format": FORMAT,
        "version": VERSIONS[bool(manifest.extra or {"optimizers", "parts"} & manifest.optimizer_info.keys())],
        "step": manifest.step,
        "metric": manifest.metric,
        "world_size": manifest.world_size,
        "mesh": manifest.mesh,
        "files": {name: {"size": r.size, "sha256": r.sha256} for name, r in manifest.files.items()},
        "model": None if manifest.model is None else _encode_tensors(manifest.model),
        "ties": manifest.ties,
        "frozen": manifest.frozen,
        "optimizer": None if manifest.optimizer is None else _encode_tensors(manifest.optimizer),
        "optimizer_info": manifest.optimizer_info,
        "versions": manifest.versions,
    }
    if manifest.extra:
        body["extra"] = manifest.extra
    return checked_size(dumps({**body, "digest": hashlib.sha256(dumps(body)).hexdigest()}), "the manifest")


def checked_size(text: bytes, what: str) -> bytes:
    """``text``, if loading would take it.

    Raises:
        ValueError: If it is longer than ``MAX_JSON_BYTES``.
    """
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(
            f"{what} takes {len(text)} bytes as JSON, more than the {MAX_JSON_BYTES} that are read again; "
            "large state belongs in tensors: in rank_state, or in buffers of the model"
        )
    return text


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a folder, not the files it names.

    Raises:
        CheckpointCorruptError: If it is missing, damaged or edited, of an unknown version, names a file
            outside the folder, or has a tensor that its parts do not tile.
    """
    data = read_bytes(folder / MANIFEST_NAME, MAX_JSON_BYTES)
    try:
        manifest = _parse(data)
        if step_number(folder) not in (None, manifest.step):
            raise ValueError(f"it is of step {manifest.step}, in a folder of another name")
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        detail = f"{error}" if type(error) is ValueError else f"not what it should be ({error!r})"
        raise CheckpointCorruptError(f"{folder / MANIFEST_NAME} is not sound: {detail}") from error


def file_problems(folder: Path, manifest: Manifest, names: list[str], *, hashes: bool) -> list[str]:
    """How some of a checkpoint's files differ from what the manifest says; empty if they do not."""
    problems = []
    expected = _expected_entries(manifest)
    for name in names:
        problem = file_problem(folder, name, manifest.files[name], hashes=hashes)
        if problem is None and name in expected:
            problem = _header_problem(folder, name, expected[name])
        if problem is not None:
            problems.append(f"{folder.name}/{name} {problem}")
    return problems


def verify_folder(folder: Path, *, hashes: bool) -> list[str]:
    """All problems of a checkpoint folder, looked at by this process alone."""
    try:
        manifest = read_manifest(folder)
    except CheckpointCorruptError as error:
        return [str(error)]
    return file_problems(folder, manifest, list(manifest.files), hashes=hashes)


def tiling_problems(tensors: dict[str, StoredTensor]) -> list[str]:
    """Names of tensors whose parts do not tile them, each with the reason."""
    found = {
        name: tiling_problem(tensor.shape, [box for _, box in tensor.chunks])
        for name, tensor in tensors.items()
    }
    return [f"{name}: {problem}" for name, problem in found.items() if problem is not None]


def _encode_tensors(tensors: dict[str, StoredTensor]) -> dict[str, Any]:
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": dtype_name(tensor.dtype),
            "chunks": [[file, list(box.offset), list(box.shape)] for file, box in tensor.chunks],
        }
        for name, tensor in tensors.items()
    }


def _parse(data: bytes) -> Manifest:
    raw = loads(data, MANIFEST_NAME)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError("it is not a manifest of this library")
    if raw.get("version") not in VERSIONS:
        raise ValueError(
            f"its format is version {raw.get('version')}, this release reads up to {VERSIONS[-1]}; "
            "load it with the release that wrote it"
        )
    body = {key: value for key, value in raw.items() if key != "digest"}
    # The bytes too: a flipped bit can make 1e5 of 1E5, which is equal.
    if raw.get("digest") != hashlib.sha256(dumps(body)).hexdigest() or dumps(raw) != data:
        raise ValueError("its digest does not match: it was damaged or edited")
    files = {}
    for name, record in body["files"].items():
        if not _FILE_NAMES.fullmatch(name):
            raise ValueError(f"it names a file {name!r}, which no checkpoint has")
        files[name] = FileRecord(int(record["size"]), str(record["sha256"]))
    optimizer = _parse_tensors(body["optimizer"], "optimizer/", files)
    if optimizer is not None:
        for info, own in per_optimizer(body["optimizer_info"], optimizer):
            _check_optimizer_info(info, own)
    extra = dict(body.get("extra", {}))
    model = _parse_tensors(body["model"], "model/", files)
    decode(list(extra.values()), {name: torch.empty(0) for name in model or {}})  # raises if it cannot be
    return Manifest(
        step=body["step"],
        world_size=int(body["world_size"]),
        mesh=body["mesh"],
        files=files,
        model=model,
        ties=dict(body["ties"]),
        frozen=list(body["frozen"]),
        extra=extra,
        optimizer=optimizer,
        optimizer_info=dict(body["optimizer_info"]),
        metric=None if body["metric"] is None else float(body["metric"]),
        versions=dict(body["versions"]),
        digest=raw["digest"],
    )


def per_optimizer(
    info: Mapping[str, Any], tensors: Mapping[str, Any]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Information and state of each optimizer, the state by ``<fqn>/<state name>``."""
    if "optimizers" not in info:
        return [(dict(info), dict(tensors))]
    parts: list[dict[str, Any]] = [{} for _ in info["optimizers"]]
    for key, tensor in tensors.items():
        number, _, name = key.partition("/")
        parts[int(number)][name] = tensor
    return list(zip(info["optimizers"], parts, strict=True))


def _check_optimizer_info(info: Any, tensors: dict[str, StoredTensor]) -> None:
    parameters = info["parameters"]
    in_groups = [name for group in info["groups"] for name in group["params"]]
    inside = _check_parts(info, tensors)
    in_state = [*(name.rpartition("/")[0] for name in tensors if name not in inside), *info["values"]]
    if sorted(in_groups) != sorted(parameters) or not set(in_state) <= set(parameters):
        raise ValueError("its optimizer's groups and state are not of the same parameters")
    if not isinstance(info["class"], str) or any(not isinstance(g["options"], dict) for g in info["groups"]):
        raise ValueError("its optimizer's groups are not valid")
    decode([[group["options"] for group in info["groups"]], info["values"]])  # raises if it cannot be


def _check_parts(info: Any, tensors: dict[str, StoredTensor]) -> set[str]:
    """Names of the tensors inside others, whose parts make up their parameters."""
    inside: set[str] = set()
    for name, entries in info.get("parts", {}).items():
        shape = tuple(info["parameters"][name.rpartition("/")[0]][1])
        boxes = [Box(tuple(entry["offset"]), tuple(entry["shape"])) for entry in entries]
        if any(type(n) is not int or n < 0 for box in boxes for n in (*box.offset, *box.shape)):
            raise ValueError(f"a part of {name} is not valid")
        if tiling_problem(shape, boxes) is not None:
            raise ValueError(f"{name} is not complete: {tiling_problem(shape, boxes)}")
        for index, entry in enumerate(entries):
            for inner, (dtype, size) in entry["inner"].items():
                key = f"{name}/{index}/{inner}"
                if (tensors[key].dtype, tensors[key].shape) != (DTYPES[dtype], tuple(size)):
                    raise ValueError(f"{key} is not what the parts say")
                inside.add(key)
        decode([entry["context"] for entry in entries])
    return inside


def _parse_tensors(raw: Any, prefix: str, files: dict[str, FileRecord]) -> dict[str, StoredTensor] | None:
    if raw is None:
        return None
    tensors: dict[str, StoredTensor] = {}
    for name, value in raw.items():
        chunks = [(file, Box(tuple(offset), tuple(shape))) for file, offset, shape in value["chunks"]]
        numbers = [*value["shape"], *(n for _, box in chunks for n in (*box.offset, *box.shape))]
        valid = all(type(number) is int and 0 <= number <= _MAX_SIZE for number in numbers)
        if not valid or len(value["shape"]) > _MAX_DIMS:
            raise ValueError(f"the shape or a part of {name} is not valid")
        if any(file not in files or not file.startswith(prefix) for file, _ in chunks):
            raise ValueError(f"{name} has a part in a file that is not listed")
        if len({file for file, _ in chunks}) != len(chunks):
            raise ValueError(f"{name} has two parts in one file")
        tensors[name] = StoredTensor(tuple(value["shape"]), DTYPES[value["dtype"]], chunks)
    problems = tiling_problems(tensors)
    if problems:
        raise ValueError(f"{len(problems)} tensors are not complete: {'; '.join(problems[:3])}")
    return tensors


def _expected_entries(manifest: Manifest) -> dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """File to what its header must say of each tensor."""
    expected: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {
        name: {} for name in manifest.files if name.startswith(("model/", "optimizer/"))
    }
    for section in (manifest.model, manifest.optimizer):
        for name, tensor in (section or {}).items():
            for file, box in tensor.chunks:
                expected[file][name] = (tensor.dtype, box.shape)
    return expected


def _header_problem(
    folder: Path, name: str, expected: dict[str, tuple[torch.dtype, tuple[int, ...]]]
) -> str | None:
    try:
        with TensorReader(folder) as reader:
            entries = reader.header(name).entries
    except CheckpointCorruptError as error:
        return f"is not sound: {error}"
    if {key: (entry.dtype, entry.shape) for key, entry in entries.items()} != expected:
        return "holds other tensors than the manifest says"
    return None
