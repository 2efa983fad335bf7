"""Format versions 1 and 2, which list every part of every tensor with its file. Read, no longer written."""

from collections.abc import Collection
from typing import Any

from fsdp_sft._boxes import Box, tiling_problem
from fsdp_sft._safetensors import DTYPES
from fsdp_sft.dcp_io.stored import Listed, StoredTensor, checked_shape


def parse_chunk_lists(raw: Any, prefix: str, files: Collection[str]) -> dict[str, StoredTensor]:
    """The tensors of one section (model or optimizer), by name.

    Args:
        raw: Section of the manifest, as JSON.
        prefix: Beginning of the names of the section's files.
        files: Names of all files that the manifest lists.

    Raises:
        ValueError: If a tensor is not valid, or its parts do not tile it.
    """
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for name, value in raw.items():
        shape = checked_shape(name, value["shape"])
        chunks = [
            (file, Box(checked_shape(name, o), checked_shape(name, n))) for file, o, n in value["chunks"]
        ]
        if any(file not in files or not file.startswith(prefix) for file, _ in chunks):
            raise ValueError(f"{name} has a part in a file that is not listed")
        if len({file for file, _ in chunks}) != len(chunks):
            raise ValueError(f"{name} has two parts in one file")
        problem = tiling_problem(shape, [box for _, box in chunks])
        if problem is not None:
            problems.append(f"{name}: {problem}")
        tensors[name] = StoredTensor(shape, DTYPES[value["dtype"]], name, Listed(tuple(chunks)))
    if problems:
        raise ValueError(f"{len(problems)} tensors are not complete: {'; '.join(problems[:3])}")
    return tensors
