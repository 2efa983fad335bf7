"""The parts of a load before and after the reads: memory, buffers, missing keys, ties, account and report."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.fsdp import keeps_shards_on_host
from fsdp_sft._compat.models import initialise_computed, tied_names
from fsdp_sft._compat.modules import apply_to_tensors
from fsdp_sft._model.adapters import saved_copies
from fsdp_sft._model.view import inner_model, named_tensors, slot
from fsdp_sft._process.devices import resolve_device
from fsdp_sft._process.generators import unmoved
from fsdp_sft._ranks.agree import all_reduce_sum
from fsdp_sft._tensors.boxes import Box, box_of, local_of
from fsdp_sft._tensors.sharding import own_part
from fsdp_sft.errors import CheckpointMismatchError, abridged
from fsdp_sft.weights.plan import LoadPlan

_PIECE_ELEMENTS = 1 << 20  # widened to float64 at once


def make_ties(model: nn.Module) -> None:
    """Tie the weights that the model's config ties, where they are not: ``to_empty`` unties them.

    Raises:
        ValueError: If the model is sharded and its tied weights are two parameters, which cannot be joined.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False))
    apart = [
        (target, source)
        for target, source in tied_names(model).items()
        if tensors.get(target) is not tensors.get(source)
    ]
    if apart and any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        raise ValueError(
            f"the config ties {' to '.join(map(repr, apart[0]))}, but they were sharded as two parameters; "
            "call model.tie_weights() before shard_model, or set config.tie_word_embeddings = False"
        )
    if apart:
        model.tie_weights(recompute_mapping=False)  # type: ignore[operator]


def materialise(model: nn.Module, packed: Collection[int] = ()) -> torch.device:
    """Give every meta tensor memory: shards where FSDP2 keeps them, the rest on the device that computes.

    Args:
        model: The model.
        packed: Ids of the parameters that get none, since their shards will be packed.

    Returns:
        The device of the shards.
    """
    named = named_tensors(model)
    sharded = [tensor for tensor in named.values() if isinstance(tensor, DTensor)]
    device = next(iter(named.values())).device
    if sharded and sharded[0].device_mesh.device_type != "cpu":
        device = resolve_device(None)  # a mesh says only the type
    elif sharded or device.type == "meta":
        device = torch.device("cpu")
    shard_device = torch.device("cpu") if keeps_shards_on_host(model) else device
    made: dict[int, torch.Tensor] = {}
    for name, tensor in named.items():
        if tensor.is_meta and not isinstance(tensor, DTensor):
            if id(tensor) not in made:
                fresh = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if is_parameter else fresh
            setattr(*slot(model, name), made[id(tensor)])

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta or id(tensor) in packed:
            return tensor
        # Not DTensor.from_local, which moves shards that stay on the host to the mesh's device.
        return torch.empty_like(tensor, device=shard_device)

    if any(tensor.is_meta for tensor in sharded):
        apply_to_tensors(model, fill)
    return shard_device


@torch.no_grad()
def initialise_rest(
    model: nn.Module, plan: LoadPlan, tensors: Mapping[str, torch.Tensor], *, seed: int
) -> None:
    """Compute the buffers that no checkpoint holds, and initialise the keys that this one lacks.

    The model's own code does both. The values are the same on every rank, and equal to those of plain
    ``from_pretrained`` after ``torch.manual_seed(seed)``.
    """
    with unmoved(seed=seed):
        values = initialise_computed(plan.twin, set(plan.initialised))
    persistent = plan.twin.state_dict().keys()
    for name, value in values.items():
        if name not in tensors:
            continue  # a module that the caller has taken out
        tensor = tensors[name]
        if name not in persistent:
            setattr(*slot(model, name), value.to(tensor.device, tensor.dtype))
            continue
        local_of(tensor).copy_(value[box_of(tensor).slices])


@torch.no_grad()
def fill_new_rows(plan: LoadPlan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set the rows of new tokens to the mean of the old ones, taken in float64 and the same on all ranks.

    Collective: all ranks.
    """
    for name, target in plan.targets.items():
        tensor, shape = tensors[name], target.shape
        if shape == tensor.shape:
            continue
        old, box, local = shape[0], box_of(tensor), local_of(tensor)
        sums = torch.zeros(shape[1:], dtype=torch.float64)
        # This rank's share of the old rows. Of replicas only the owner adds it, so that no row counts twice.
        held = Box((0, *box.offset[1:]), (old, *box.shape[1:])).intersect(box)
        if held is not None and own_part(tensor) is not None:
            rows = local[held.relative_to(box).slices]
            # In pieces, since torch widens everything that it sums at once.
            pieces = rows.split(max(1, _PIECE_ELEMENTS // max(1, rows[:1].numel())))
            sums[held.slices[1:]] = sum(piece.sum(0, dtype=torch.float64) for piece in pieces).cpu()
        mean = torch.tensor(all_reduce_sum(sums.reshape(-1).tolist()), dtype=torch.float64) / old
        added = Box((old, *box.offset[1:]), (tensor.shape[0] - old, *box.shape[1:])).intersect(box)
        if added is not None:
            own = mean.reshape(shape[1:])[added.slices[1:]].to(tensor.dtype)
            local[added.relative_to(box).slices].copy_(own.to(local.device).expand(added.shape))


# The source of each tensor's values.
#
# Memory that is allocated and never written holds whatever was there before, so a tensor without a source of
# its values is an error.

_PUT_IN = (
    "Put adapters in with fsdp_sft.add_adapters(model, peft_config) in place of peft.get_peft_model: it "
    "gives those of linear layers and parameters their values, the same on every rank; for others load the "
    "base model first, with from_pretrained"
)
_ADD_LATER = "Add modules of your own to a model after loading it, or give them memory and values before"

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
    of_base: dict[Source, Iterable[str]] = {
        "computed": [name for name, _ in plan.twin.named_non_persistent_buffers()],
        "initialised": plan.initialised,
        "checkpoint": plan.targets,
    }
    for source, names in of_base.items():
        filled.update({id(plan.tensors[name]): source for name in names if name in plan.tensors})
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
            f"{_PUT_IN if any('lora_' in name for name in left) else _ADD_LATER}{inner_model(model)}"
        )
    return sources


# The report on a load.


@dataclass(frozen=True, repr=False)
class LoadReport:
    """What ``load_weights`` read, wrote and decided.

    Attributes:
        bytes_read: Tensor bytes that this rank has read.
        job_bytes_read: Tensor bytes that all ranks together have read.
        checkpoint_bytes: Bytes of all tensors in the checkpoint.
        seconds: Duration of planning and reading, on this rank; not of a download.
        loaded: Names of the parameters and buffers that were filled from the checkpoint.
        missing: Names that the checkpoint has no values for, though the model's class expects them.
        unexpected: Names in the checkpoint that the model has no place for.
        initialised: Names that the model's own initialisation filled: the missing ones, and those that its
            class allows to be missing.
        formats: Number of the checkpoint's tensors by the format in which they are stored, such as
            ``"bf16"``, ``"fp8 128x128"`` or ``"mxfp4"``.
        sources: Source of the values of every parameter and buffer, by name: ``"checkpoint"``, ``"tie"``
            (another name of a tensor listed before), ``"initialised"``, ``"computed"``, ``"copy"`` (of
            ``modules_to_save``) or ``"kept"`` (it had values already, as adapters have).

    Example:
        >>> report = model.load_report
        >>> report.bytes_read == report.checkpoint_bytes  # one rank reads all of it, once
        True
        >>> print(report)
        loaded ... tensors: ... read by all ranks, ... by this one, in ... s (... GB/s)
    """

    bytes_read: int
    job_bytes_read: int
    checkpoint_bytes: int
    seconds: float
    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    initialised: list[str]
    formats: dict[str, int]
    sources: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        speed = self.job_bytes_read / self.seconds / 1e9 if self.seconds > 0 else 0.0
        return (
            f"loaded {len(self.loaded)} tensors: {_readable(self.job_bytes_read)} of "
            f"{' and '.join(self.formats)} read by all ranks, "
            f"{_readable(self.bytes_read)} by this one, in {self.seconds:.2f} s ({speed:.2f} GB/s)"
        )


def _readable(num_bytes: int) -> str:
    """A number of bytes in words."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
