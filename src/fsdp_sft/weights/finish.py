"""The parts of a load before and after the reads: memory, computed buffers, missing keys, ties."""

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.fsdp import keeps_shards_on_host
from fsdp_sft._compat.models import initialise_computed, tie_by_names, tied_names
from fsdp_sft._compat.modules import apply_to_tensors
from fsdp_sft._model.named import named_tensors, slot
from fsdp_sft._model.sharded import compute_device
from fsdp_sft._model.twin import meta_twin
from fsdp_sft._process.generators import unmoved
from fsdp_sft._tensors.boxes import box_of, local_of, part_of
from fsdp_sft._tensors.packed_shard import PackedShard
from fsdp_sft._tensors.reader import check_all_finite
from fsdp_sft.weights.plan import LoadPlan


def make_ties(model: nn.Module) -> None:
    """Tie the weights that the model's config ties, where they are not tied yet.

    Raises:
        ValueError: If the model is sharded and its tied weights are two parameters, which cannot be joined.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False))
    apart = [
        (target, source)
        for target, source in tied_names(model).items()
        if tensors.get(target) is not tensors.get(source)
    ]
    if not apart:
        return
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        target, source = apart[0]
        raise ValueError(
            f"the config ties {target!r} to {source!r}, but they were sharded as two parameters; call "
            "model.tie_weights() before shard_model, or set config.tie_word_embeddings = False"
        )
    tie_by_names(model)


def materialise(model: nn.Module, packed: Collection[int] = ()) -> torch.device:
    """Give every meta tensor memory: shards where FSDP2 keeps them, the rest on the device that computes.

    Args:
        model: The model.
        packed: Ids of the parameters that get none, since their shards will be packed.

    Returns:
        The device of the shards.
    """
    device = compute_device(model)
    if device.type == "meta":
        device = torch.device("cpu")
    shard_device = torch.device("cpu") if keeps_shards_on_host(model) else device
    named = named_tensors(model)
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

    if any(isinstance(tensor, DTensor) and tensor.is_meta for tensor in named.values()):
        apply_to_tensors(model, fill)
    return shard_device


@torch.no_grad()
def initialise_rest(model: nn.Module, plan: LoadPlan, *, seed: int) -> None:
    """Compute the buffers that no checkpoint holds, and initialise the keys that this one lacks.

    The model's own code does both. The values are the same on every rank, and equal to those of plain
    ``from_pretrained`` after ``torch.manual_seed(seed)``.
    """
    with unmoved(seed=seed):
        values = initialise_computed(plan.twin, set(plan.initialised))
        values.update(_computed_in_16_bits(model, plan, values))
    persistent = plan.twin.state_dict().keys()
    tensors = named_tensors(model)
    for name, value in values.items():
        if name not in tensors:
            continue  # a module that the caller has taken out
        tensor = tensors[name]
        if name not in persistent:
            setattr(*slot(model, name), value.to(tensor.device, tensor.dtype))
            continue
        local_of(tensor).copy_(part_of(value, box_of(tensor)))


def _computed_in_16_bits(
    model: nn.Module, plan: LoadPlan, values: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Computed buffers that ``shard_model`` has made 16-bit, with the values of a plain model of that dtype.

    Casting the float32 values could round differently.
    """
    tensors = named_tensors(model)
    persistent = plan.twin.state_dict().keys()
    lower: dict[str, torch.Tensor] = {}
    wanted = {
        name: tensors[name].dtype
        for name, value in values.items()
        if name in tensors and name not in persistent and value.is_floating_point()
    }
    for dtype in {torch.bfloat16, torch.float16} & set(wanted.values()):
        if all(values[name].dtype == dtype for name in wanted if wanted[name] == dtype):
            continue
        computed = initialise_computed(meta_twin(plan.twin, dtype), set())
        lower.update({name: computed[name] for name in wanted if wanted[name] == dtype and name in computed})
    return lower


def check_shards_finite(model: nn.Module, plan: LoadPlan) -> None:
    """Refuse NaN and infinity in shards on an accelerator.

    Shards on the host, and those that are packed, were checked as they were read.

    Raises:
        CheckpointFormatError: If a parameter has such values; the message names it.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, target in plan.targets.items():
        if target.is_parameter and parameters[name].is_floating_point():
            local = local_of(parameters[name])
            if local.device.type != "cpu" and not isinstance(local, PackedShard):
                by_device.setdefault(local.device, {})[name] = local
    for tensors in by_device.values():
        check_all_finite(tensors)
