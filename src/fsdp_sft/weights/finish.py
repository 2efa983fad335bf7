"""The parts of a load before and after the reads: memory, buffers, missing keys, ties, account and report."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.fsdp import keeps_shards_on_host
from fsdp_sft._compat.models import initialise_computed, tie_by_names, tied_names
from fsdp_sft._compat.modules import apply_to_tensors
from fsdp_sft._model.adapters import saved_copies, without_adapters
from fsdp_sft._model.named import named_tensors, slot
from fsdp_sft._model.sharded import compute_device
from fsdp_sft._model.twin import meta_twin
from fsdp_sft._model.wrappers import inner_model
from fsdp_sft._process.generators import unmoved
from fsdp_sft._ranks.agree import this_rank
from fsdp_sft._tensors.boxes import box_of, local_of, part_of
from fsdp_sft._tensors.packed_shard import PackedShard
from fsdp_sft._tensors.reader import check_all_finite
from fsdp_sft.errors import CheckpointMismatchError, abridged
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


# The source of each tensor's values.
#
# Memory that is allocated and never written holds whatever was there before, so a tensor without a source of
# its values is an error.

_PUT_IN = (
    "Put adapters in with fsdp_sft.add_adapters(model, peft_config) in place of peft.get_peft_model: it "
    "gives them their values, the same on every rank"
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
            f"{_PUT_IN if any('lora_' in name for name in left) else _ADD_LATER}{inner_model(model)}"
        )
    return sources


# The report on a load, and its progress bar.

_PROGRESS_AFTER_SECONDS = 3


@dataclass(frozen=True, repr=False)
class LoadReport:
    """What ``load_weights`` read, wrote and decided.

    Attributes:
        bytes_read: Tensor bytes that this rank has read.
        job_bytes_read: Tensor bytes that all ranks together have read.
        checkpoint_bytes: Bytes of all tensors in the checkpoint.
        seconds: Duration of the whole call, on this rank.
        loaded: Names of the parameters and buffers that were filled from the checkpoint.
        missing: Names that the checkpoint has no values for, though the model's class expects them.
        unexpected: Names in the checkpoint that the model has no place for.
        initialised: Names that the model's own initialisation filled: the missing ones, and those that its
            class allows to be missing.
        strategy: Strategy that was used: ``"slice"`` or ``"exchange"``.
        reason: Reason for that strategy, in words.
        class_bytes: Bytes of the checkpoint by how they become parameters: ``"identity"`` (a stored tensor as
            it is), ``"separable"`` (whole tensors side by side), ``"region"`` (parts of tensors) and
            ``"other"`` (converted as a whole).
        formats: Number of the checkpoint's tensors by the format in which they are stored, such as
            ``"bf16"``, ``"fp8 128x128"`` or ``"mxfp4"``.
        sources: Source of the values of every parameter and buffer, by name: ``"checkpoint"``, ``"tie"``
            (another name of a tensor listed before), ``"initialised"``, ``"computed"``, ``"copy"`` (of
            ``modules_to_save``) or ``"kept"`` (it had values already, as adapters have).

    Example:
        >>> report = model.load_report
        >>> report.bytes_read == report.checkpoint_bytes  # one rank reads all of it, once
        True
        >>> report.class_shares
        {'identity': 1.0, 'separable': 0.0, 'region': 0.0, 'other': 0.0}
        >>> print(report)
        loaded ... tensors: ... strategy slice: one process reads everything [identity 100.0%]
    """

    bytes_read: int
    job_bytes_read: int
    checkpoint_bytes: int
    seconds: float
    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    initialised: list[str]
    strategy: str
    reason: str
    class_bytes: dict[str, int]
    formats: dict[str, int]
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def class_shares(self) -> dict[str, float]:
        """``class_bytes`` as fractions of their sum."""
        total = sum(self.class_bytes.values())
        return {kind: count / total if total else 0.0 for kind, count in self.class_bytes.items()}

    def __repr__(self) -> str:  # names of thousands of tensors are in the attributes
        return f"<{type(self).__name__}: {self}>"

    def __str__(self) -> str:
        speed = self.job_bytes_read / self.seconds / 1e9 if self.seconds > 0 else 0.0
        shares = ", ".join(f"{kind} {share:.1%}" for kind, share in self.class_shares.items() if share)
        return (
            f"loaded {len(self.loaded)} tensors: {_readable(self.job_bytes_read)} of "
            f"{' and '.join(self.formats)} read by all ranks, "
            f"{_readable(self.bytes_read)} by this one, in {self.seconds:.2f} s ({speed:.2f} GB/s), "
            f"strategy {self.strategy}: {self.reason} [{shares}]"
        )


def _readable(num_bytes: int) -> str:
    """A number of bytes in words."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on rank 0 that appears only if reading takes longer than a few seconds."""
    if this_rank() != 0:
        yield lambda _: None
        return
    from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="loading weights (rank 0)",
        delay=_PROGRESS_AFTER_SECONDS,
    ) as bar:
        yield bar.update
