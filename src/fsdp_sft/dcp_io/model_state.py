"""The model in a checkpoint: comparing it with the live model, and reading it."""

import operator
import re
from collections.abc import Mapping

import torch
from torch import nn

from fsdp_sft._model.state import ModelTensors, give_back, match_tensors, model_tensors, room_for
from fsdp_sft._process.codec import decode
from fsdp_sft._tensors.stored import StoredFolder
from fsdp_sft.dcp_io.extra_state import check_extra, digests, encode_extra
from fsdp_sft.dcp_io.folder import check_files, read_tensors
from fsdp_sft.dcp_io.manifest import Manifest
from fsdp_sft.dcp_io.stored import StoredTensor
from fsdp_sft.errors import CheckpointMismatchError, abridged

# Names of modules that have a row for each token of the vocabulary.
_VOCABULARY = re.compile(r"(?:^|\.)(?:\w*embed\w*|wte|lm_head|output)(?:\.|$)")


def check_model(manifest: Manifest, live: ModelTensors) -> dict[str, StoredTensor]:
    """The stored tensor for each tensor of the model, by the model's first name.

    Raises:
        CheckpointMismatchError: If names, ties, shapes or dtypes differ.
        CheckpointCorruptError: If a file that this rank will read is not listed in the manifest.
    """
    check_extra(manifest.extra, live)
    stored = {n: t for n, t in (manifest.model or {}).items() if not _is_extra(n, manifest)}
    first_stored = {**{name: name for name in stored}, **manifest.ties}
    described = {name: (stored[first].dtype, stored[first].shape) for name, first in first_stored.items()}
    found, problems = match_tensors(live, described, operator.eq)
    sources: dict[str, StoredTensor] = {}
    read_by: dict[str, str] = {}  # the model's tensor of each stored one
    for first, names in found.items():
        for source in {first_stored[name]: None for name in names}:
            if sources.setdefault(first, stored[source]) is not stored[source]:
                problems.append(f"{first} is tied to {source} in the model but not in the checkpoint")
            if read_by.setdefault(source, first) != first:
                other = read_by[source]
                problems.append(f"{first} is tied to {other} in the checkpoint but not in the model")
    if problems:
        rows = _other_vocabulary(sources, live, found, len(problems))
        advice = f"; load the model with new_vocab_size={rows}" if rows is not None else ""
        raise CheckpointMismatchError(
            "the checkpoint is of another model: " + abridged(problems, "; ") + advice
        )
    check_files(manifest, sources, {name: live.tensors[name] for name in sources if name not in live.made})
    return sources


def _other_vocabulary(
    sources: Mapping[str, StoredTensor],
    live: ModelTensors,
    found: Mapping[str, list[str]],
    num_problems: int,
) -> int | None:
    """Rows of the stored embedding and head, if their number is all that differs; else None."""
    pairs = [(name, tuple(live.tensors[name].shape), stored) for name, stored in sources.items()]
    other = [pair for pair in pairs if pair[0] not in live.made and pair[1] != pair[2].shape]
    rows = {(shape[:1], stored.shape[:1]) for _, shape, stored in other}
    is_all = len(rows) == 1 and sum(len(found[name]) for name, _, _ in other) == num_problems
    if not is_all or not all(
        _VOCABULARY.search(name)
        and shape[1:] == stored.shape[1:]
        and live.tensors[name].dtype == stored.dtype
        for name, shape, stored in other
    ):
        return None
    return other[0][2].shape[0]


def read_model(
    folder: StoredFolder,
    manifest: Manifest,
    model: nn.Module,
    live: ModelTensors,
    sources: Mapping[str, StoredTensor],
) -> None:
    """Read a checkpoint that ``check_model`` has accepted, and check that the model has taken all of it.

    Args:
        folder: The files.
        manifest: Manifest of the checkpoint.
        model: Model to read into.
        live: Its tensors.
        sources: What ``check_model`` returned.

    Raises:
        CheckpointMismatchError: If a module does not accept the state that it made, or returns another value
            afterwards.
    """
    made = {
        name: room_for(live.tensors[name], sources[name].dtype, sources[name].shape) for name in live.made
    }
    read_tensors(folder, sources, {**live.tensors, **made})
    described = {n: t for n, t in (manifest.model or {}).items() if _is_extra(n, manifest)}
    pieces = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in described.items()}
    read_tensors(folder, described, pieces)
    give_back(model, {**made, **{name: decode(value, pieces) for name, value in manifest.extra.items()}})
    if manifest.extra:
        _check_extra_taken(model, digests(manifest.extra, pieces))


def _is_extra(name: str, manifest: Manifest) -> bool:
    """Whether a stored tensor belongs to extra state: its name is the name of that state and a key path."""
    return name.partition("[")[0] in manifest.extra


def _check_extra_taken(model: nn.Module, expected: Mapping[str, str]) -> None:
    """Compare the extra state that modules return now with the digests of what they were given."""
    found = digests(*encode_extra(model_tensors(model)))
    lost = [name for name, digest in expected.items() if found.get(name) != digest]
    if lost:
        raise CheckpointMismatchError(
            f"{len(lost)} of {len(expected)} values of the modules' extra state did not come back: "
            f"{abridged(lost, ', ', 4)}. set_extra_state must take what get_extra_state gave"
        )
