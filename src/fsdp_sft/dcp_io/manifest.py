"""The manifest: everything about a checkpoint except the values of its tensors, and a digest of that.

It says once, for all tensors that are sharded alike, which rank has written which part, and has a checksum
of the one file of each rank. So it does not grow with the number of tensors times the number of ranks: 70B
parameters and AdamW on 1,024 ranks take 0.4 MB. Nothing in it is trusted before it has been checked.
"""

import hashlib
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_sft._process.bounds import MAX_JSON_BYTES, MAX_RANKS, check_sizes, parse_json
from fsdp_sft._process.codec import MALFORMED, decode, dumps
from fsdp_sft._tensors.disk import FileRecord, read_bytes
from fsdp_sft._tensors.safetensors import DTYPES, dtype_name
from fsdp_sft._tensors.sharding import Sharding
from fsdp_sft.dcp_io.parts import StoredTensor, checked_size, file_key, shard_file
from fsdp_sft.errors import CheckpointCorruptError

# The names of the folders of steps below a root.

_NAME = re.compile(r"step-(0|[1-9]\d*)")


def step_folder(root: Path, step: int) -> Path:
    """The folder of a step."""
    return root / f"step-{step}"


def step_number(folder: Path) -> int | None:
    """Number of the step that a folder is named after; None if its name is not that of a step."""
    match = _NAME.fullmatch(folder.name)
    return None if match is None else int(match[1])


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) pairs below ``root``, in ascending order."""
    found: list[tuple[int, Path]] = []
    # A listing is no snapshot: where another job prunes, all in it may be gone, and the newest missing.
    for _ in range(4 if root.is_dir() else 0):
        found = found or sorted(
            (step, path)
            for path in root.iterdir()
            if (step := step_number(path)) is not None and path.is_dir()
        )
    return found


MANIFEST_NAME = "MANIFEST.json"
FORMAT = "fsdp-sft-checkpoint"
VERSION = 4
_MOST_AXES = 8  # of a mesh


@dataclass(frozen=True)
class Manifest:
    """The contents of one folder, without the values of its tensors.

    Attributes:
        step: Number of the step.
        world_size: Number of ranks that wrote it.
        model: Tensors of the model by FQN.
        ties: Name of the stored tensor of each further name of a tied tensor.
        optimizer: Tensors of the optimizer's state by ``<fqn>/<state name>``; None if there is no optimizer
            in the folder. With several optimizers, each name begins with the optimizer's number and a slash.
        optimizer_info: Class, parameters, groups and state other than tensors of the optimizer; with several
            optimizers, a list of these under ``optimizers``.
        metric: Metric passed to ``save_checkpoint``, lower being better; None if not finite or not given.
        train_state: The caller's state that all ranks share, as JSON.
        settings: What a resume is compared with, by subject: which adapters, which packed base.
        files: Record of the file of each rank, by its name, in a manifest that was read from a file.
        digest: SHA-256 of everything else, in a manifest that was read from a file.
    """

    step: int
    world_size: int
    model: dict[str, StoredTensor]
    ties: dict[str, str]
    optimizer: dict[str, StoredTensor] | None
    optimizer_info: dict[str, Any]
    metric: float | None
    train_state: str
    settings: dict[str, dict[str, Any]]
    files: dict[str, FileRecord]
    digest: str = ""

    @property
    def tensors(self) -> list[StoredTensor]:
        """All stored tensors, of the model and of the optimizer."""
        return [*self.model.values(), *(self.optimizer or {}).values()]


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest, with a digest of everything else in them.

    Raises:
        ValueError: If they are too many to be read again.
    """
    libraries = [sys.modules[name] for name in ("fsdp_sft", "torch", "transformers") if name in sys.modules]
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "metric": manifest.metric,
        "world_size": manifest.world_size,
        **encode_tensors(manifest),
        "ties": manifest.ties,
        "optimizer_info": manifest.optimizer_info,
        "train_state": manifest.train_state,
        "settings": manifest.settings,
        "files": [[record.size, record.sha256] for record in manifest.files.values()],
        "versions": {
            "python": sys.version.split()[0],
            **{library.__name__: str(library.__version__) for library in libraries},
        },
    }
    return checked_size(dumps({**body, "digest": hashlib.sha256(dumps(body)).hexdigest()}), "the manifest")


def encode_tensors(manifest: Manifest) -> dict[str, Any]:
    """Names, dtypes, shapes and shardings as JSON, all of which must be equal on all ranks.

    A tensor is [dtype, shape, number of its sharding], with the number of the copy that was written as a
    fourth entry unless it is 0.
    """
    shardings: dict[Sharding, int] = {}
    encoded: dict[str, Any] = {"optimizer": None}
    for section, tensors in (("model", manifest.model), ("optimizer", manifest.optimizer)):
        if tensors is None:
            continue
        rows = encoded[section] = {}
        for name, tensor in sorted(tensors.items()):
            number = shardings.setdefault(tensor.sharding, len(shardings))
            copy = [tensor.copy] if tensor.copy else []
            rows[name] = [dtype_name(tensor.dtype), list(tensor.shape), number, *copy]
    return {**encoded, "shardings": [encode_sharding(sharding) for sharding in shardings]}


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a folder, but not the files that it is of.

    Raises:
        CheckpointCorruptError: If it is missing, damaged or edited, of an unknown version, or lacks a file.
    """
    data = read_bytes(folder / MANIFEST_NAME, MAX_JSON_BYTES)
    try:
        body = checked_body(data)
        if body["version"] != VERSION:
            body |= _of_version_3(folder, body)
        if step_number(folder) not in (None, body["step"]):
            raise ValueError(f"it is of step {body['step']}, in a folder of another name")
        if len(body["files"]) != body["world_size"]:  # each rank writes one, with its own state in it
            raise ValueError(f"it lists {len(body['files'])} files of {body['world_size']} ranks")
        return parse(body)
    except MALFORMED as error:
        detail = f"{error}" if type(error) is ValueError else f"not what it should be ({error!r})"
        raise CheckpointCorruptError(f"{folder / MANIFEST_NAME} is not sound: {detail}") from None


def checked_body(data: bytes) -> dict[str, Any]:
    """The JSON of a manifest, after its format, version and digest have been checked.

    Raises:
        ValueError: If the bytes are not a manifest, are of a version that this release does not read, or are
            damaged.
    """
    raw = parse_json(data, MANIFEST_NAME)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError("it is not a manifest of this library")
    if raw.get("version") not in (3, VERSION):
        raise ValueError(
            f"its format is version {raw.get('version')}, and this release reads versions 3 and {VERSION}; "
            "load it with the release that wrote it"
        )
    body = {key: value for key, value in raw.items() if key != "digest"}
    # The bytes are compared as well as the digest of their values: a flipped bit can turn 1E5 into 1e5, which
    # is the same value.
    if raw.get("digest") != hashlib.sha256(dumps(body)).hexdigest() or dumps(raw) != data:
        raise ValueError("its digest does not match: it was damaged or edited")
    return raw


PARTS = "parts"  # of moments in a tensor subclass, as version 3 had them


def _of_version_3(folder: Path, body: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest of version 3 had in files of its own: checksums, the caller's state, and settings.

    Raises:
        ValueError: If a file is not what was written.
    """

    def text(name: str, digest: str) -> bytes:
        data = read_bytes(folder / name, MAX_JSON_BYTES)
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"{name} is not what was written")
        return data

    index = parse_json(text("INDEX.json", body["index"]["sha256"]), "INDEX.json")
    state = text("train_state.json", index["train_state.json"][1]) if "train_state.json" in index else b"null"
    names = {subject: f"settings/{subject}.json" for subject in ("adapters", "packed")}
    return {
        "files": [index[shard_file(rank)] for rank in range(int(body["world_size"]))],
        "train_state": state.decode(),
        "settings": {
            subject: parse_json(text(name, index[name][1]), name)
            for subject, name in names.items()
            if name in index
        },
    }


def parse(body: Mapping[str, Any]) -> Manifest:
    """A manifest from its JSON.

    Raises:
        ValueError: If something in it is not valid. Malformed JSON may also raise the other errors of
            ``MALFORMED``.
    """
    world_size = int(body["world_size"])
    if not 0 < world_size <= MAX_RANKS:
        raise ValueError(f"it is of {world_size} ranks; at most {MAX_RANKS} are read")
    shardings = [parse_sharding(sharding, world_size) for sharding in body["shardings"]]
    optimizer = None
    if body["optimizer"] is not None:
        optimizer = _parse_tensors(body["optimizer"], "optimizer", shardings)
        for info, own in per_optimizer(body["optimizer_info"], optimizer):
            _check_optimizer_info(info, own)
    manifest = Manifest(
        step=int(body["step"]),
        world_size=world_size,
        model=_parse_tensors(body["model"], "model", shardings),
        ties=dict(body["ties"]),
        optimizer=optimizer,
        optimizer_info=dict(body["optimizer_info"]),
        metric=None if body["metric"] is None else float(body["metric"]),
        train_state=str(body["train_state"]),
        settings={subject: dict(own) for subject, own in body["settings"].items()},
        files={
            shard_file(rank): FileRecord(int(size), str(digest))
            for rank, (size, digest) in enumerate(body["files"])
        },
        digest=str(body.get("digest", "")),
    )
    decode_json(manifest.train_state)  # raises if that is not possible
    return manifest


def decode_json(text: str) -> Any:
    """The value of ``Manifest.train_state``."""
    return decode(parse_json(text.encode(), "train_state"))


def per_optimizer(
    info: dict[str, Any], tensors: dict[str, Any]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Information and state of each optimizer, the state by ``<fqn>/<state name>`` without its number."""
    if "optimizers" not in info:
        return [(info, tensors)]
    parts: list[dict[str, Any]] = [{} for _ in info["optimizers"]]
    for key, tensor in tensors.items():
        number, _, name = key.partition("/")
        parts[int(number)][name] = tensor
    return list(zip(info["optimizers"], parts, strict=True))


def _check_optimizer_info(info: Any, tensors: dict[str, StoredTensor]) -> None:
    """Refuse information about an optimizer that contradicts itself or the stored tensors."""
    if info.get(PARTS):  # which no optimizer is read from
        return
    parameters = info["parameters"]
    in_groups = [name for group in info["groups"] for name in group["params"]]
    in_state = [name.rpartition("/")[0] for name in (*tensors, *info.get("apart", ()))]
    if sorted(in_groups) != sorted(parameters) or not {*in_state, *info["values"]} <= {*parameters}:
        raise ValueError("its optimizer's groups and state are not of the same parameters")
    for name in tensors:
        if tensors[name].shape not in ((), tuple(parameters[name.rpartition("/")[0]][1])):
            raise ValueError(f"{name} has the shape {tensors[name].shape}, which its parameter has not")
    # Raises if that is not possible.
    decode([info["class"], [dict(g["options"]) for g in info["groups"]], info["values"]])


def _parse_tensors(raw: Any, section: str, shardings: list[Sharding]) -> dict[str, StoredTensor]:
    """The tensors of one section, checked; the inverse of ``encode_tensors``."""
    tensors: dict[str, StoredTensor] = {}
    for name, (dtype, shape, number, *more) in raw.items():
        (copy,) = more or (0,)
        shape = check_sizes(shape, f"the shape of {name}")
        if (
            any(type(n) is not int for n in (number, copy))
            or not 0 <= number < len(shardings)
            or not 0 <= copy < shardings[number].copies
            or any(dim >= len(shape) for _, dim in shardings[number].splits)
        ):
            raise ValueError(f"the place of {name} is not valid")
        tensors[name] = StoredTensor(shape, DTYPES[dtype], file_key(section, name), shardings[number], copy)
    if len({tensor.key for tensor in tensors.values()}) != len(tensors):
        raise ValueError(f"two tensors of the {section} have one name in the files")
    return tensors


def encode_sharding(sharding: Sharding) -> dict[str, Any]:
    """A sharding as JSON."""
    encoded = {"mesh": list(sharding.mesh_shape), "splits": [list(split) for split in sharding.splits]}
    return encoded if sharding.ranks is None else {**encoded, "ranks": list(sharding.ranks)}


def parse_sharding(raw: Any, world_size: int) -> Sharding:
    """The inverse of ``encode_sharding``.

    Raises:
        ValueError: If it is not valid, or has keys that this release does not know.
    """
    unknown = sorted(raw.keys() - {"mesh", "splits", "ranks"})
    if unknown:
        raise ValueError(f"a sharding has {unknown}, unknown here: load it with the release that wrote it")
    ranks = None if raw.get("ranks") is None else tuple(raw["ranks"])
    sharding = Sharding(tuple(raw["mesh"]), ranks, tuple((axis, dim) for axis, dim in raw["splits"]))
    mesh, axes = sharding.mesh_shape, [axis for axis, _ in sharding.splits]
    numbers = [*mesh, *(ranks or ()), *axes, *(dim for _, dim in sharding.splits)]
    if (
        any(type(n) is not int or n < 0 for n in numbers)
        or not 0 < len(mesh) <= _MOST_AXES
        or not 0 < math.prod(mesh) <= world_size
        or len(set(axes)) != len(axes)
        or max(axes, default=0) >= len(mesh)
        or (
            ranks is not None
            and not (len(ranks) == math.prod(mesh) == len({*ranks}) and max(ranks) < world_size)
        )
    ):
        raise ValueError("a sharding is not valid")
    return sharding
