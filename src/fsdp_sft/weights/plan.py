"""The plan of a load, from the headers alone: what to read for each parameter and buffer."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.conversions import (
    ignored_on_load,
    match_checkpoint_keys,
    run_conversion,
    weight_conversions,
)
from fsdp_sft._compat.models import tied_names
from fsdp_sft._model.published import published, trained_copies
from fsdp_sft._model.twin import MTP_LAYERS, meta_twin, text_config
from fsdp_sft._model.view import base_of, inner_model, named_tensors
from fsdp_sft._quantised.settings import IN_16_BITS
from fsdp_sft._tensors.packed import Packed
from fsdp_sft._tensors.stored import Piece, Stored
from fsdp_sft.errors import CheckpointFormatError, CheckpointMismatchError, abridged
from fsdp_sft.weights.meta import OLD_ROWS
from fsdp_sft.weights.provenance import Traced, UntraceableError


@dataclass(frozen=True)
class Target:
    """One parameter or buffer, and where its elements are stored.

    Attributes:
        name: Name in the model; for tied weights, the one of their names that the checkpoint has.
        shape: Global shape, before sharding; without the rows for new tokens.
        pieces: Boxes of stored tensors that make up the target.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass
class LoadPlan:
    """Everything that a load does, the same on all ranks.

    Attributes:
        model: The model, with its adapters.
        stored: The checkpoint's tensors, by name.
        tensors: Parameters and buffers of the model without its adapters, by each of their names.
        twin: Copy of the model on the meta device, neither sharded nor tied.
        targets: Parameters and buffers to fill from the checkpoint, by name.
        duplicates: Further names, in the checkpoint, of tensors that are tied to a target; what is stored
            under them must have the target's values.
        missing: Names for which the checkpoint has no values, although the model's class does not allow them
            to be missing.
        initialised: Names that the model's own initialisation fills.
        unexpected: Names (after renaming) that the model has no place for.
        conversions: transformers' list of conversions, in which those that were used are marked.
    """

    model: nn.Module
    stored: Mapping[str, Stored]
    tensors: Mapping[str, torch.Tensor]
    twin: Any
    targets: dict[str, Target] = field(default_factory=dict)
    duplicates: list[Target] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    initialised: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    conversions: list[Any] = field(default_factory=list)

    def digest(self) -> str:
        """A fingerprint that is equal on two ranks exactly if they would load the same."""
        files = [
            (
                key,
                tensor.format,
                tensor.entry,
                [(r.file.name, r.start, r.num_bytes) for r in tensor.all_runs()],
            )
            for key, tensor in sorted(self.stored.items())
        ]
        described = repr(
            [
                *(files, [*self.targets.values(), *self.duplicates]),
                *(self.missing, self.initialised, self.unexpected),
            ]
        )
        return hashlib.sha256(described.encode()).hexdigest()


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


def make_plan(
    model: nn.Module, stored: Mapping[str, Stored], *, missing: str = "error", unexpected: str = "error"
) -> LoadPlan:
    """Tie a model as its config says, and plan, from the headers, what each of its tensors is read from.

    Args:
        model: The model, on the meta device or not, sharded or not; with adapters, its base is planned. Only
            its names, shapes and ties count.
        stored: The checkpoint's tensors, by name.
        missing: ``"error"`` or ``"initialise"``; see ``load_weights``.
        unexpected: ``"error"`` or ``"ignore"``; see ``load_weights``.

    Raises:
        CheckpointFormatError: If a shape does not fit, or a conversion fails or computes. Also, unless
            ``missing`` and ``unexpected`` allow it, if keys are missing that the model's class does not allow
            to be missing, or left over that it does not name as ignorable; the error has their names.
        ValueError: If tied weights were sharded as two parameters, or a key that is to be initialised has
            another shape than the config describes.
    """
    with published(model) as base:
        make_ties(base)
        tensors = named_tensors(base)
        twin = meta_twin(base)
    plan = LoadPlan(model, stored, tensors, twin, conversions=weight_conversions(twin))
    matched, left_over = match_checkpoint_keys(twin, list(stored), plan.conversions)
    found: dict[str, Target] = {}
    old_rows = getattr(base, OLD_ROWS, 0)
    for first, (converter, sources) in matched.items():
        for target in _targets_of(plan, first, converter, sources, old_rows):
            if target.name in tensors:
                found[target.name] = target
            else:
                left_over[target.name] = first
    _resolve_ties(plan, tied_names(base), found)
    absent = [name for name in twin.state_dict() if name not in found and name in tensors]
    # Tied names are one tensor, which is initialised once, under the first of them.
    first_names = {id(tensors[name]): name for name in reversed(absent)}
    plan.initialised = [name for name in absent if first_names[id(tensors[name])] == name]
    changed = [
        n
        for n, built in twin.state_dict().items()
        if n in plan.initialised and tensors[n].shape != built.shape
    ]
    if changed:
        raise ValueError(
            f"the model has other shapes than its config describes ({abridged(changed)}), which cannot be "
            "initialised: was it changed after it was built? Load first, then change it, or change the config"
        )
    may_miss, may_be_left = ignored_on_load(twin)
    plan.missing = [name for name in absent if not any(re.search(p, name) for p in may_miss)]
    text = text_config(twin)
    # transformers skips them by the depth of the models that it knows, and warns of those of others.
    for number in range(max((getattr(text, key, 0) or 0 for key in MTP_LAYERS), default=0)):
        # Towers have layers of their own, which are to have a place.
        may_be_left.append(rf"^(?!.*(vision|visual|audio)).*\blayers\.{text.num_hidden_layers + number}\.")
    plan.unexpected = sorted(name for name in left_over if not any(re.search(p, name) for p in may_be_left))
    within = tuple(f"{name.rpartition('.')[0]}." for name in plan.missing if "." in name)
    beside = {name: stored.get(key) for name, key in left_over.items() if name.startswith(within)}
    packed = [
        name
        for name, one in beside.items()
        if one is not None and (isinstance(one, Packed) or one.entry.dtype in _PACKED)
    ]
    if packed:
        raise CheckpointFormatError(
            f"the checkpoint has no values for {abridged(plan.missing)}, but packed ones "
            f"({abridged(sorted(packed))}): it is quantised, and its config does not say how: {IN_16_BITS}"
        )
    if plan.missing and missing == "error":
        other = f"it has {abridged(sorted(left_over))}, which the model lacks; " if left_over else ""
        raise CheckpointFormatError(
            f"the checkpoint has no values for {abridged(plan.missing)} of {type(twin).__name__}; "
            f"{other}load_weights(missing='initialise') fills them with the model's own initialisation",
            missing=plan.missing,
        )
    if plan.unexpected and unexpected == "error":
        raise CheckpointFormatError(
            f"{type(twin).__name__} has no place for {abridged(plan.unexpected)} of the checkpoint; "
            "load_weights(unexpected='ignore') leaves them unread",
            unexpected=plan.unexpected,
        )
    return plan


# Values of formats that quantise: initialised weights beside them would be random without a word.
_PACKED = (torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
_WRITE_ONCE = (
    "; a shard is read from the bytes that it is made of, so no conversion may compute: write the checkpoint "
    "once as the model has it, model.save_pretrained(out, save_original_format=False) of transformers"
)


def _targets_of(
    plan: LoadPlan,
    first: str,
    converter: Any,
    sources: dict[str, list[str]],
    old_rows: int,
) -> list[Target]:
    """The targets of one conversion, or of one tensor that is only renamed (``converter`` is None)."""
    keys = [key for own in sources.values() for key in own]
    traced: dict[str, torch.Tensor] = {}
    for key in keys:
        entry = plan.stored[key].entry
        traced[key] = Traced(entry.shape, entry.dtype, [plan.stored[key].piece(key)])
    converted: Any
    if converter is None:
        converted = {first: traced[keys[0]]}
    else:
        made = {pattern: [traced[key] for key in own] for pattern, own in sources.items()}
        try:
            converted = run_conversion(plan.twin, first, converter, made)
            if not all(isinstance(tensor, Traced) for tensor in converted.values()):
                raise UntraceableError("it makes tensors of its own")
        except Exception as error:
            raise CheckpointFormatError(
                f"{converter} cannot make {first!r} from {abridged(keys)}: {error}"
                + (_WRITE_ONCE if isinstance(error, UntraceableError) else "")
            ) from None
    targets = []
    for name, tensor in converted.items():
        if name in plan.tensors:
            _check_fits(name, plan.tensors[name], tensor, keys, old_rows)
        targets.append(Target(name, tuple(tensor.shape), tuple(tensor.pieces)))
    return targets


def _check_fits(
    name: str,
    tensor: torch.Tensor,
    read: torch.Tensor,
    keys: list[str],
    old_rows: int,
) -> None:
    """Refuse a stored tensor that is quantised, or of another shape than the model's."""
    is_scaled = read.dtype.itemsize == 1 or not read.dtype.is_floating_point
    if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and is_scaled:
        raise CheckpointFormatError(
            f"{name!r} is stored as {read.dtype} (from {abridged(keys)}): it is quantised, and its "
            f"config does not say how: {IN_16_BITS}"
        )
    is_short = old_rows > 0 and read.shape == (old_rows, *tensor.shape[1:])
    if tensor.shape != read.shape and not is_short:
        raise CheckpointFormatError(
            f"{name!r} has shape {tuple(tensor.shape)} in the model and {tuple(read.shape)} in the "
            f"checkpoint (from {abridged(keys)}); is this checkpoint of this model?"
        )


def _resolve_ties(plan: LoadPlan, ties: Mapping[str, str], found: dict[str, Target]) -> None:
    """Fill each tensor from one of its names, and keep its further names for the comparison."""
    preferred = set(ties.values())
    aliases: dict[int, list[str]] = {}
    for name, tensor in plan.tensors.items():
        aliases.setdefault(id(tensor), []).append(name)
    for names in aliases.values():
        present = sorted((name for name in names if name in found), key=lambda name: name not in preferred)
        if present:
            plan.targets[present[0]] = found[present[0]]
            plan.duplicates += [found[name] for name in present[1:]]
            for name in names:
                found.setdefault(name, found[present[0]])


# The source of each tensor's values.
#
# Memory that is allocated and never written holds whatever was there before, so a tensor without a source of
# its values is an error.

_PUT_IN = (
    "Put adapters in with fsdp_sft.add_adapters(model, peft_config) in place of peft.get_peft_model: it "
    "gives those of linear layers and parameters their values, the same on every rank; for others load the "
    "base model first, with from_pretrained"
)
_ADD_LATER = "Give modules of your own memory and values before"

Source = Literal["checkpoint", "tie", "initialised", "computed", "copy", "kept"]


def account(plan: LoadPlan) -> dict[str, Source]:
    """Source of the values of every parameter and buffer of the plan's model, not yet materialised, by name.

    ``"tie"`` is another name of a tensor that was named before, ``"copy"`` a copy of ``modules_to_save``,
    and ``"kept"`` a tensor that has memory already and is not written to: adapters, and what the caller has
    added.

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
    for original, copied in trained_copies(plan.model):
        if id(original) in filled or not original.is_meta:
            filled[id(copied)] = "copy"
    sources: dict[str, Source] = {}
    left: list[str] = []
    seen: set[int] = set()
    for name, tensor in named_tensors(plan.model).items():
        if id(tensor) not in filled and tensor.is_meta:
            left.append(name)
        sources[name] = "tie" if id(tensor) in seen else filled.get(id(tensor), "kept")
        seen.add(id(tensor))
    if left:
        raise CheckpointMismatchError(
            f"nothing says what {abridged(left)} should hold: these tensors are on the meta device, and "
            "neither the checkpoint nor the model's own initialisation has values for them. "
            f"{_PUT_IN if any('lora_' in name for name in left) else _ADD_LATER}"
            f"{inner_model(base_of(plan.model))}"
        )
    return sources
