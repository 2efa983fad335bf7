"""The source of each tensor's values.

Memory that is allocated and never written holds whatever was there before, so a tensor without a source of
its values is an error.
"""

from collections.abc import Collection, Iterable
from typing import Literal

from torch import nn

from fsdp_sft._model.adapters import saved_copies, without_adapters
from fsdp_sft._model.named import named_tensors
from fsdp_sft._model.wrappers import inner_model
from fsdp_sft.errors import CheckpointMismatchError, abridged
from fsdp_sft.weights.plan import LoadPlan

Source = Literal["checkpoint", "tie", "initialised", "computed", "copy", "kept"]


def account(model: nn.Module, plan: LoadPlan) -> dict[str, Source]:
    """Source of the values of every parameter and buffer of a model, by name.

    ``"tie"`` is another name of a tensor that was named before, ``"copy"`` a copy of ``modules_to_save``,
    and ``"kept"`` a tensor that has memory already and is not written to: adapters, and what the caller has
    added.

    Args:
        model: The whole model, with its adapters, not yet materialised.
        plan: Plan for its base.

    Raises:
        CheckpointMismatchError: If a tensor on the meta device would be given memory and no value.
    """
    filled: dict[int, Source] = {}
    with without_adapters(model) as base:
        tensors = named_tensors(base)
    of_base: dict[Source, Iterable[str]] = {
        "computed": plan.computed,
        "initialised": plan.initialised,
        "checkpoint": plan.targets,
    }
    for source, names in of_base.items():
        filled.update({id(tensors[name]): source for name in names if name in tensors})
    for original, copied in saved_copies(model):
        if id(original) in filled or not original.is_meta:
            filled[id(copied)] = "copy"
    sources: dict[str, Source] = {}
    left: list[str] = []
    seen: set[int] = set()
    for name, tensor in named_tensors(model).items():
        if id(tensor) not in filled and tensor.is_meta:
            left.append(name)
        sources[name] = "tie" if id(tensor) in seen else filled.get(id(tensor), "kept")
        seen.add(id(tensor))
    if left:
        raise CheckpointMismatchError(
            f"nothing says what {abridged(left)} should hold: these tensors are on the meta device, and "
            "neither the checkpoint nor the model's own initialisation has values for them. "
            f"{_advice(left)}{inner_model(model)}"
        )
    return sources


def check_nothing_empty(model: nn.Module, sources: Collection[str]) -> None:
    """Check that a load has left nothing on the meta device, and that every tensor is among ``sources``.

    Raises:
        CheckpointMismatchError: If there are such tensors; the message names them.
    """
    tensors = named_tensors(model)
    left = [name for name, tensor in tensors.items() if tensor.is_meta or name not in sources]
    if left:
        raise CheckpointMismatchError(f"the load has left {abridged(left)} without a value")


def _advice(left: list[str]) -> str:
    """Advice, for the error, on tensors that nothing fills."""
    if any("lora_" in name for name in left):
        return (
            "Put adapters in with fsdp_sft.add_adapters(model, peft_config) in place of peft.get_peft_model: "
            "it gives them their values, the same on every rank"
        )
    return "Add modules of your own to a model after loading it, or give them memory and values before"
