"""The model in a checkpoint: comparing it with the live model, and reading it."""

import operator
import re
from collections.abc import Mapping

from fsdp_sft._model.state import ModelTensors, match_tensors
from fsdp_sft.dcp_io.folder import check_files
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
    stored = manifest.model or {}
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
    check_files(manifest, sources, {name: live.tensors[name] for name in sources})
    return sources


def _other_vocabulary(
    sources: Mapping[str, StoredTensor],
    live: ModelTensors,
    found: Mapping[str, list[str]],
    num_problems: int,
) -> int | None:
    """Rows of the stored embedding and head, if their number is all that differs; else None."""
    pairs = [(name, tuple(live.tensors[name].shape), stored) for name, stored in sources.items()]
    other = [pair for pair in pairs if pair[1] != pair[2].shape]
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
