"""A check, before its files are written, that an export will be read as the model that was trained."""

from pathlib import Path
from typing import Any

from fsdp_sft._compat.models import original_class
from fsdp_sft._model.twin import tied_meta_twin
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._tensors.safetensors import TensorEntry, num_bytes
from fsdp_sft._tensors.stored import InFile
from fsdp_sft.errors import CheckpointFormatError, UnsupportedModelError, abridged
from fsdp_sft.export.hf_files import Described
from fsdp_sft.weights.plan import make_plan
from fsdp_sft.weights.resolve import Checkpoint


def refuse_unreadable(model: Any, config: Any, written: Described, buffers: set[str]) -> None:
    """Compare an export's names, shapes and dtypes with what the class that its config names would read.

    Args:
        model: A transformers model.
        config: Config of the export.
        written: Dtype and shape of each tensor in the files, by name.
        buffers: Names of those that are no parameters; the class need not have a place for them.

    Raises:
        UnsupportedModelError: If a parameter would not be read, or a tensor would be drawn at random.
    """
    entries = {
        name: TensorEntry(dtype, shape, 0, num_bytes(dtype, shape))
        for name, (dtype, shape) in written.items()
    }
    stored = Checkpoint({}, {name: InFile(Path(), entry) for name, entry in entries.items()})
    try:
        plan = make_plan(tied_meta_twin(model, config), stored, unexpected="ignore")
    except CheckpointFormatError as error:
        raise _unreadable(model, str(error).partition(";")[0]) from error
    unread = [name for name in plan.unexpected if name not in buffers]
    if unread:
        raise _unreadable(model, f"its class has no place for {abridged(unread)}")
    if plan.unexpected:
        name = original_class(model).__name__
        warn_caller(
            f"buffers of the model are exported that {name} does not read: {abridged(plan.unexpected)}"
        )


def _unreadable(model: Any, what: str) -> UnsupportedModelError:
    name = original_class(model).__name__
    return UnsupportedModelError(
        f"an export of this {name} would not be read as it was trained: {what}. Merge what was put into the "
        "model, or take it out, before the export (adapters of peft are merged by it); save_full_state_dict "
        "writes any model"
    )
