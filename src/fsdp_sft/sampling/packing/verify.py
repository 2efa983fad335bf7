"""Measure, on the model at hand, whether it keeps packed rows apart."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_sft._compat.attention import attention_of
from fsdp_sft._compat.models import original_class
from fsdp_sft._model.forward import forward_parameters, no_cache, probed
from fsdp_sft._model.sharded import compute_device, training_mesh_of
from fsdp_sft._model.twin import rotations_by_length, text_config
from fsdp_sft._model.view import record_of, unwrapped
from fsdp_sft._process.words import answered
from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft._ranks.mesh import raise_on_mesh
from fsdp_sft._tensors.rounding import TOLERANCES, logits_tolerance
from fsdp_sft.attention.hybrid import separate_rows
from fsdp_sft.collate import pack_size
from fsdp_sft.collate.options import check_count
from fsdp_sft.errors import PackingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Two tests. The first compares a row in a pack with the row alone: a leak moves logits by 0.1 to 1.5 of their
# size, more than rounding does (logits_tolerance), except in freshly initialised models, in which tokens
# hardly matter to each other. The second, for those, changes only the tokens of other rows: a change beyond
# _LEAK_TOLERANCE, and beyond _TIMES_NOISE times what later rows change, is a leak.
_LEAK_TOLERANCE = 1e-5
_TIMES_NOISE = 4
_EARLIER, _LATER = (7, 1, 9, 8), 10  # tokens of the rows before and after the long row of the probe
_SHORTEST_PROBE = 64
_LONGEST_PROBE = 4096  # at the first pack
_SAMPLES = 16  # positions compared at each end of a long row; twice as many are compared in between
_logger = logging.getLogger("fsdp_sft.sampling.packing")


@dataclass
class _Passed:
    """Kept on a model: the attentions with which no probe of it has failed."""

    attentions: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class PackingReport:
    """What ``verify_packing`` measured. Differences of logits are relative to their size.

    Attributes:
        error: Largest difference between the logits of a row in a pack and of the row alone.
        tolerance: Largest ``error`` that rounding explains in the dtype in which the model computes.
        leak: Largest change of a row's logits when the tokens of rows before it change.
        noise: Largest change of a row's logits when the tokens of rows after it change, which a causal model
            cannot see.
        unpacked: Largest difference if rows are simply joined: what ``error`` would be without isolation.

    Example:
        >>> report = fs.verify_packing(model, max_length=64)
        >>> report.error < report.tolerance < report.unpacked
        True
    """

    error: float
    tolerance: float
    leak: float
    noise: float
    unpacked: float

    def __str__(self) -> str:
        return (
            f"packed against alone {self.error:.1e} (at most {self.tolerance:.0e}; {self.unpacked:.1e} if "
            f"simply joined), moved by the rows before {self.leak:.1e}, by the rows after {self.noise:.1e}"
        )


@answered
def verify_packing(model: nn.Module, *, max_length: int) -> PackingReport:
    """Check that a row in a pack gives the same logits as alone; call it once before training.

    A pack of six random rows, one of them long, goes through the model as in training: ``position_ids`` from
    0 in each row, no attention mask, ``use_cache=False``. The logits are compared with those of each row
    alone, and with those of the pack when the tokens of its first or of its last rows are replaced. ALiBi,
    models that count positions by index, and recurrences of other kinds than ``shard_model`` and this
    function keep apart fail. Leaks smaller than the rounding of the dtype in which the model computes are
    not seen.

    Mode, gradients, buffers, sharding and random number generators are left as they were. Dropout is off
    during the check.

    Args:
        model: A causal language model with its weights, sharded or not.
        max_length: Tokens of the packs that will be trained; the probe has as many (at least 64), since some
            models count positions by index. If rotary embeddings depend on the longest row of a batch
            (dynamic NTK, LongRoPE), it must not be beyond their limit.

    Returns:
        What was measured, the same on every rank up to rounding.

    Raises:
        PackingError: If rows are not kept apart, or if the test is inconclusive with these weights.
        ValueError: If ``max_length`` is no positive integer.

    Collective: all ranks that hold the model; either all of them raise or none.
    Memory: A forward of ``max_length`` tokens. Logits at about 100 positions if the model takes
        ``logits_to_keep``, else at all of them.

    Example:
        >>> print(fs.verify_packing(model, max_length=64))
        packed against alone ... (at most ...; ... if simply joined), moved by ...
    """
    check_count("max_length", max_length)
    mesh = training_mesh_of(model)
    return verify(model, max_length, mesh, longest=max_length, untold_is_error=True)[0]


def verify_at_first_use(
    model: nn.Module, batches: Sequence[Any], mesh: "DeviceMesh | None", *, own_loss: bool = False
) -> None:
    """If any rank has a pack, verify, once for each model and attention, that rows are kept apart.

    Rows beyond the limit of rotary embeddings that depend on the longest row are refused in any pack.

    Args:
        model: Model, sharded or not; left as it was.
        batches: Batches of this rank, packs or not, with the same keys on all ranks.
        mesh: Ranks that hold the model, all of which call this.
        own_loss: Whether the caller passed a loss function; a model that is not from transformers is then not
            verified.

    Raises:
        PackingError: On all ranks, if rows are not kept apart.

    Collective: all ranks of the mesh, unless the model has been verified and its rotary embeddings do not
    depend on the longest row.
    """
    can_be_packs = any(
        isinstance(batch, Mapping)
        and batch.get("position_ids") is not None
        and batch.get("attention_mask") is None
        for batch in batches
    )
    attention = attention_of(unwrapped(model))
    if not can_be_packs or (own_loss and attention == "its own"):
        return
    done, limit = attention in record_of(model).kept_or_new(_Passed).attentions, row_limit(model)
    if (done and limit is None) or torch.compiler.is_compiling():
        return
    own = [pack_size(batch) for batch in batches]
    known = [size for sizes in (all_gather_objects(own) if mesh is not None else [own]) for size in sizes]
    width, longest = map(max, zip(*known, strict=True))
    if not width or (done and (limit is None or longest <= limit)):
        return
    try:
        _, told = verify(model, min(width, _LONGEST_PROBE), mesh, longest=longest, untold_is_error=False)
    except PackingError as error:
        raise PackingError(
            f"the first pack for this model: {error}. verify_packing shows the same before training; "
            "check=False leaves it out, and in a loop of your own loss_sum with scale_for_backward"
        ) from error
    if not told and (mesh is None or mesh.get_rank() == 0):
        _logger.warning(
            "%s with %s attention gets packs, and it cannot be told whether it keeps their rows apart: with "
            "these weights rows hardly matter to each other. Call verify_packing when it has been trained",
            type(unwrapped(model)).__name__,
            attention,
        )


def row_limit(model: nn.Module) -> int | None:
    """Tokens of the longest row with which rotary embeddings of dynamic NTK and LongRoPE are as without it.

    A longer row changes those of all rows of its batch. None if the model has no such embeddings.
    """
    limits = []
    module: Any
    for module in rotations_by_length(model).values():
        config: Any = module.config
        kinds = module.rope_type
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind == "longrope":
                parameters = config.rope_parameters if layer is None else config.rope_parameters[layer]
                limits.append(parameters["original_max_position_embeddings"])
            elif "dynamic" in kind:
                limits.append(config.max_position_embeddings)
    return min(limits, default=None)


def verify(
    model: nn.Module,
    max_length: int,
    mesh: "DeviceMesh | None",
    *,
    longest: int,
    untold_is_error: bool,
) -> tuple[PackingReport, bool]:
    """(the report of ``verify_packing``, whether it is conclusive).

    Args:
        model: A causal language model with its weights, sharded or not.
        max_length: Tokens of the packs.
        mesh: Mesh of the model; None if this process holds it alone.
        longest: Tokens of their longest row.
        untold_is_error: Whether to raise if the test is inconclusive.

    Raises:
        PackingError: If rows are not kept apart.

    Collective: all ranks of the mesh.
    """
    report = error = None
    told, limit = True, row_limit(model)
    try:
        if limit is not None and longest > limit:
            raise PackingError(
                f"packed rows are not kept apart by {_name(model)}: it rotates them as the longest row of "
                f"their pack asks for, and one of {longest} tokens is beyond the {limit} up to which its "
                "rotary embeddings (dynamic NTK, LongRoPE) do not depend on the length. Keep rows below "
                "that, or train without packing"
            )
        separate_rows(model)
        with probed(model):
            report = _measure(model, max(max_length, _SHORTEST_PROBE))
        told = _judge(model, report, untold_is_error)
    except Exception as caught:
        error = caught
    raise_on_mesh(error, "verifying that packed rows are kept apart", mesh)
    assert report is not None
    record_of(model).kept_or_new(_Passed).attentions.add(attention_of(unwrapped(model)))
    return report, told


def _measure(model: nn.Module, length: int) -> PackingReport:
    """Differences between the logits of the probe's forwards."""
    probe = _Probe(model, length)
    length = sum(probe.sizes)
    base, alone = probe.packed(probe.ids), probe.alone()
    joined = probe.packed(probe.ids, torch.arange(length) % probe.longest)
    size = (alone - alone.mean(-1, keepdim=True)).norm(dim=-1)

    def difference(a: torch.Tensor, b: torch.Tensor, where: slice) -> float:
        # nan if the logits are nan, or if all of them are the same
        return float(((a - b).norm(dim=-1) / size)[where].max())

    # Number of tokens of the early rows, and of their logits too: short rows are compared at every token.
    early = sum(_EARLIER)
    changed = torch.cat([probe.draw(early), probe.ids[:, early:]], 1)
    changed_later = torch.cat([probe.ids[:, :early], probe.draw(length - early)], 1)
    return PackingReport(
        error=difference(base, alone, slice(None)),
        tolerance=logits_tolerance(model, probe.device),
        leak=difference(base, probe.packed(changed), slice(early, None)),
        noise=difference(base, probe.packed(changed_later), slice(early)),
        unpacked=difference(joined, alone, slice(None)),
    )


class _Probe:
    """Random rows in one pack, and the positions at which their logits are compared."""

    def __init__(self, model: nn.Module, length: int) -> None:
        self.model, self.device = model, compute_device(model)
        self._generator = torch.Generator().manual_seed(0)
        config, limit = text_config(model), row_limit(model)
        self._vocabulary = getattr(config, "vocab_size", 8)
        most = getattr(config, "max_position_embeddings", None)
        if not isinstance(most, int) or most < max(_EARLIER):
            most = length
        self.longest = min(most, limit or length, length)
        left = length - sum(_EARLIER) - _LATER
        long_rows = [self.longest] * (left // self.longest) + [left % self.longest] * (
            left % self.longest > 0
        )
        self.sizes = [*_EARLIER, *long_rows, _LATER]
        self.ids = self.draw(length)
        self._kept = [_sampled(size) for size in self.sizes]
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self._kept_in_pack = torch.cat([s + keep for s, keep in zip(starts, self._kept, strict=True)])

    def draw(self, number: int) -> torch.Tensor:
        """Random token ids ``(1, number)``."""
        # Ids from the middle of the vocabulary, since those of padding, images and the like are at its ends.
        low, high = self._vocabulary // 4, max(3 * self._vocabulary // 4, 1)
        return torch.randint(low, high, (1, number), generator=self._generator)

    def packed(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the pack at the compared positions."""
        if position_ids is None:
            position_ids = torch.cat([torch.arange(size) for size in self.sizes])
        return self._logits(ids, self._kept_in_pack, {"position_ids": position_ids[None].to(self.device)})

    def alone(self) -> torch.Tensor:
        """Logits of each row alone, at the same positions."""
        rows = self.ids.split(self.sizes, 1)
        return torch.cat([self._logits(row, keep, {}) for row, keep in zip(rows, self._kept, strict=True)])

    def _logits(self, ids: torch.Tensor, keep: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """float32 logits ``(positions kept, vocabulary)``, computed as training does."""
        keep = keep.to(self.device)
        taken = forward_parameters(self.model)
        inputs |= no_cache(self.model)
        if "logits_to_keep" in taken:
            inputs["logits_to_keep"] = keep
        logits: torch.Tensor = self.model(input_ids=ids.to(self.device), **inputs).logits[0]
        return (logits if logits.shape[0] == len(keep) else logits[keep]).float()


def _sampled(size: int) -> torch.Tensor:
    """Positions at which a row is compared: all of a short row; both ends of a long row and some between."""
    if size <= 4 * _SAMPLES:
        return torch.arange(size)
    between = torch.linspace(_SAMPLES, size - _SAMPLES - 1, 2 * _SAMPLES).long()
    every = torch.cat([torch.arange(_SAMPLES), between, torch.arange(size - _SAMPLES, size)])
    return torch.tensor(sorted(set(every.tolist())))


def _judge(model: nn.Module, report: PackingReport, untold_is_error: bool) -> bool:
    """Whether the report is conclusive.

    Raises:
        PackingError: If rows are not kept apart, or if it is inconclusive and ``untold_is_error``.
    """
    measured = f"{_name(model)} with {attention_of(unwrapped(model))} attention: {report}"
    # In a mixture of experts rounding can route a token to another expert, which changes logits by far more.
    # If no bit of a row changes with the rows before it, a model that computes in 16 bits is therefore
    # allowed a quarter of the difference of joined rows, which wrong positions would cause.
    most = report.tolerance
    if report.leak == 0 and report.tolerance >= TOLERANCES[torch.float16]:
        most = max(report.tolerance, report.unpacked / 4)
    if report.error <= most and report.leak <= max(_LEAK_TOLERANCE, _TIMES_NOISE * report.noise):
        if report.unpacked > _TIMES_NOISE * report.tolerance:
            return True
        if not untold_is_error:
            return False
        raise PackingError(
            f"it cannot be told whether packed rows are kept apart by {measured}. Rows hardly matter to each "
            "other with these weights; load the weights first, and check them if they are loaded"
        )
    if not math.isfinite(report.error):
        raise PackingError(f"the logits are not finite, or all the same: {measured}. Check the weights")
    raise PackingError(
        f"packed rows are not kept apart by {measured}. Train it with SFTCollator, without packing; or try "
        "another attn_implementation, or a shorter max_length if only long packs fail. Models that do not "
        "heed position_ids, or mix tokens by a recurrence or convolution unknown here, cannot be packed"
    )


def _name(model: nn.Module) -> str:
    """Class name of the model, without wrappers."""
    return original_class(unwrapped(model)).__name__
