"""Measure, on the model at hand, whether a row in a pack or behind padding gives the same logits as alone."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_sft._compat.attention import attention_of
from fsdp_sft._model.forward import TOLERANCES, forward_parameters, logits_tolerance, no_cache, probed
from fsdp_sft._model.sharded import compute_device, training_mesh_of
from fsdp_sft._model.twin import rotations_by_length, text_config
from fsdp_sft._model.view import original_class, record_of, unwrapped
from fsdp_sft._ranks.agree import agreed, through_rank_0
from fsdp_sft.attention.hybrid import separate_rows
from fsdp_sft.collate.options import check_count
from fsdp_sft.collate.packs import pack_size
from fsdp_sft.errors import PackingError, UnsupportedModelError

# Two tests of packs. The first compares a row in a pack with the row alone: a leak moves logits by 0.1 to 1.5
# of their size, more than rounding does (logits_tolerance), except in freshly initialised models, in which
# tokens hardly matter to each other. The second, for those, changes only the tokens of other rows: a change
# beyond _LEAK_TOLERANCE, and beyond _TIMES_NOISE times what later rows change, is a leak.
_LEAK_TOLERANCE = 1e-5
_TIMES_NOISE = 4
_EARLIER, _LATER = (7, 1, 9, 8), 10  # tokens of the rows before and after the long row of the probe
_SHORTEST_PROBE = 64
_LONGEST_PROBE = 4096  # at the first pack
_COMPARED = 64  # positions of a long row, its ends among them; a shorter row is compared at all of its own
_TOKENS, _PADDED = 16, 512  # of a row, and the most with the padding in front of it


class _Verified(set[tuple[str, str | bool]]):
    """Kept on a model: the attentions with which it kept packs apart, and how padding changed nothing."""


@dataclass(frozen=True)
class PackingReport:
    """What ``verify_packing`` measured. Differences of logits are relative to their size.

    Attributes:
        error: Largest difference between the logits of a row in a pack and of the row alone.
        tolerance: Largest ``error`` that rounding explains in the dtype in which the model computes.
        leak: Largest change of a row's logits when the tokens of rows before it change.
        noise: Largest change of a row's logits when the tokens of rows after it change, which a causal model
            cannot see.
        unpacked: Largest difference if rows are simply joined: what ``error`` would be without isolation. If
            it is below the tolerance, tokens hardly matter to each other with these weights.

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


def verify_packing(model: nn.Module, *, max_length: int) -> PackingReport:
    """Check that a row in a pack gives the same logits as alone; call it once before training.

    A pack of six random rows, one of them long, goes through the model as in training: ``position_ids`` from
    0 in each row, no attention mask, ``use_cache=False``. The logits are compared with those of each row
    alone, and with those of the pack when the tokens of its first or of its last rows are replaced. ALiBi,
    models that count positions by index, and recurrences of other kinds than ``shard_model`` and this
    function keep apart fail. Leaks smaller than the rounding of the dtype in which the model computes are
    not seen, and none of weights with which tokens do not matter to each other: load them first.

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
        PackingError: If rows are not kept apart.
        ValueError: If ``max_length`` is no positive integer.

    Collective: all ranks that hold the model; either all of them raise or none.
    Memory: A forward of ``max_length`` tokens. Logits at about 100 positions if the model takes
        ``logits_to_keep``, else at all of them.

    Example:
        >>> print(fs.verify_packing(model, max_length=64))
        packed against alone ... (at most ...; ... if simply joined), moved by ...
    """
    check_count("max_length", max_length)
    return verify(model, max_length, training_mesh_of(model), longest=max_length)


def verify_at_first_use(model: nn.Module, batch: Mapping[str, Any], mesh: DeviceMesh | None) -> None:
    """``verify_first_pack`` for a batch of each rank, packs or not, with the same keys on all ranks.

    Args:
        model: Model, sharded or not; left as it was.
        batch: Batch of this rank.
        mesh: Ranks that hold the model, all of which call this.

    Raises:
        PackingError: On all ranks, if rows are not kept apart.

    Collective: all ranks of the mesh, unless the model has been verified and its rotary embeddings do not
    depend on the longest row.
    """
    if batch.get("attention_mask") is None and not (_is_verified(model) and row_limit(model) is None):
        own = partial(unverified_pack, model, [batch])
        width: Any = own() if mesh is None else through_rank_0("looking for the first pack", own, max)
        verify_first_pack(model, width, mesh)


def unverified_pack(model: nn.Module, batches: Iterable[Any]) -> int:
    """Tokens of the largest pack of some batches, if the model is still to be verified; else 0.

    Raises:
        PackingError: If a row in a pack is beyond the limit of rotary embeddings that depend on the longest
            row, whether the model has been verified or not.
    """
    packs = [
        batch
        for batch in batches
        if isinstance(batch, Mapping)
        and batch.get("position_ids") is not None
        and batch.get("attention_mask") is None
    ]
    verified = _is_verified(model)
    if not packs or (verified and row_limit(model) is None):
        return 0
    width, longest = map(max, zip(*map(pack_size, packs), strict=True))
    _refuse_beyond_limit(model, longest)
    return 0 if verified else int(width)


def verify_first_pack(model: nn.Module, width: int, mesh: DeviceMesh | None) -> None:
    """Verify that a model keeps the rows of packs apart, if any rank has a pack and it has not been verified.

    Args:
        model: Model, sharded or not; left as it was.
        width: The largest number that ``unverified_pack`` gave on any rank; the same on all.
        mesh: Ranks that hold the model.

    Raises:
        PackingError: On all ranks, if rows are not kept apart.

    Collective: all ranks of the mesh, if ``width`` is not 0.
    """
    if not width:
        return
    try:
        verify(model, min(width, _LONGEST_PROBE), mesh)
    except PackingError as error:
        raise PackingError(
            f"the first pack for this model: {error}. verify_packing shows the same before training; "
            "check=False leaves it out, and in a loop of your own loss_sum with scale_for_backward"
        ) from error


def _is_verified(model: nn.Module) -> bool:
    """Whether a model was verified with the attention that it has now."""
    return ("packs", attention_of(unwrapped(model))) in record_of(model).kept_or_new(_Verified)


def _refuse_beyond_limit(model: nn.Module, longest: int) -> None:
    """Refuse packs whose longest row changes the rotary embeddings of the others."""
    limit = row_limit(model)
    if limit is not None and longest > limit:
        raise PackingError(
            f"packed rows are not kept apart by {original_class(unwrapped(model)).__name__}: it rotates "
            f"them as the longest row of their pack asks for, and one of {longest} tokens is beyond the "
            f"{limit} up to which its rotary embeddings (dynamic NTK, LongRoPE) do not depend on the "
            "length. Keep rows below that, or train without packing"
        )


def row_limit(model: nn.Module) -> int | None:
    """Tokens of the longest row with which rotary embeddings of dynamic NTK and LongRoPE are as without it.

    A longer row changes those of all rows of its batch. None if the model has no such embeddings.
    """
    limits = []
    module: Any
    for module in rotations_by_length(model).values():
        config, kinds = module.config, module.rope_type
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind == "longrope":
                of_layer = config.rope_parameters.get(layer, config.rope_parameters)
                limits.append(of_layer["original_max_position_embeddings"])
            elif "dynamic" in kind:
                limits.append(config.max_position_embeddings)
    return min(limits, default=None)


def verify(model: nn.Module, max_length: int, mesh: DeviceMesh | None, *, longest: int = 0) -> PackingReport:
    """The report of ``verify_packing`` on packs of ``max_length`` tokens.

    Args:
        model: A causal language model with its weights, sharded or not.
        max_length: Tokens of the packs.
        mesh: Mesh of the model; None if this process holds it alone.
        longest: Tokens of their longest row; 0 if it was looked at before.

    Raises:
        PackingError: If rows are not kept apart.

    Collective: all ranks of the mesh.
    """
    with nullcontext() if mesh is None else agreed("verifying that packed rows are kept apart"):
        _refuse_beyond_limit(model, longest)
        separate_rows(model)
        report = _measure(model, max(max_length, _SHORTEST_PROBE))
        # In a mixture of experts rounding can route a token to another expert, which changes logits by far
        # more. If no bit of a row changes with the rows before it, a model that computes in 16 bits is
        # therefore allowed a quarter of the difference of joined rows, which wrong positions would cause.
        most = report.tolerance
        if report.leak == 0 and report.tolerance >= TOLERANCES[torch.float16]:
            most = max(report.tolerance, report.unpacked / 4)
        if not (report.error <= most and report.leak <= max(_LEAK_TOLERANCE, _TIMES_NOISE * report.noise)):
            raise PackingError(
                f"packed rows are not kept apart by {original_class(unwrapped(model)).__name__} with "
                f"{attention_of(unwrapped(model))} attention: {report}. Train it with SFTCollator, without "
                "packing; or try another attn_implementation, or a shorter max_length if only long packs "
                "fail. Models that do not heed position_ids, or mix tokens by a recurrence or convolution "
                "unknown here, cannot be packed. Where it says nan, logits are not finite, or all the same: "
                "check the weights"
            )
    record_of(model).kept_or_new(_Verified).add(("packs", attention_of(unwrapped(model))))
    return report


def _measure(model: nn.Module, length: int) -> PackingReport:
    """Differences between the logits of a pack's forwards and of its rows alone."""
    most = getattr(text_config(model), "max_position_embeddings", None)
    if not isinstance(most, int) or most < max(_EARLIER):
        most = length
    longest = min(most, row_limit(model) or length, length)
    whole, rest = divmod(length - sum(_EARLIER) - _LATER, longest)
    sizes = [*_EARLIER, *[longest] * whole, *[rest] * (rest > 0), _LATER]
    kept = [
        torch.linspace(0, size - 1, min(size, _COMPARED), dtype=torch.float64).round().long()
        for size in sizes
    ]
    kept_in_pack = torch.cat(
        [start + keep for start, keep in zip(accumulate(sizes[:-1], initial=0), kept, strict=True)]
    )
    positions = torch.cat([torch.arange(size) for size in sizes])

    def packed(ids: torch.Tensor, positions: torch.Tensor = positions) -> torch.Tensor:
        return _logits(model, kept_in_pack, input_ids=ids, position_ids=positions[None])[0]

    early = sum(_EARLIER)  # tokens of the early rows, and their logits too, since these are short
    ids, others = _random_ids(model, 2 * length).split(length, 1)
    base, joined = packed(ids), packed(ids, torch.arange(length) % longest)
    after_others = packed(torch.cat([others[:, :early], ids[:, early:]], 1))
    before_others = packed(torch.cat([ids[:, :early], others[:, early:]], 1))
    rows = zip(ids.split(sizes, 1), kept, strict=True)
    alone = torch.cat([_logits(model, keep, input_ids=row)[0] for row, keep in rows])
    return PackingReport(
        error=float(_relative(base - alone, alone).max()),
        # Norms and eager attention compute in float32 even in a float64 model, hence the least tolerance.
        tolerance=max(logits_tolerance(model, compute_device(model)), 1e-6),
        leak=float(_relative(base - after_others, alone)[early:].max()),
        noise=float(_relative(base - before_others, alone)[:early].max()),
        unpacked=float(_relative(joined - alone, alone).max()),
    )


def _random_ids(model: nn.Module, number: int) -> torch.Tensor:
    """Token ids ``(1, number)``, always the same."""
    vocabulary = getattr(text_config(model), "vocab_size", 8)
    # From the middle of the vocabulary, since ids of padding, images and the like are at its ends.
    low, high = vocabulary // 4, max(3 * vocabulary // 4, 1)
    return torch.randint(low, high, (1, number), generator=torch.Generator().manual_seed(0))


def _logits(model: nn.Module, keep: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """float32 logits ``(B, positions kept, vocabulary)``, computed as training does, without a trace."""
    device = compute_device(model)
    given: dict[str, Any] = {name: value.to(device) for name, value in inputs.items()} | no_cache(model)
    if "logits_to_keep" in forward_parameters(model):
        given["logits_to_keep"] = keep.to(device)
    with probed(model):
        logits: torch.Tensor = model(**given).logits
    return (logits if logits.shape[1] == len(keep) else logits[:, keep.to(device)]).float()


def _relative(difference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Size of a difference at each position relative to that of the logits; nan if they are all the same."""
    return torch.div(difference.norm(dim=-1), (logits - logits.mean(-1, keepdim=True)).norm(dim=-1))


def verify_left_padding(model: nn.Module, mesh: DeviceMesh | None, *, with_positions: bool) -> None:
    """Refuse a model that computes something else of a row behind padding; looked at once per model.

    Models that count positions from the first column (GPT-2), or carry a state over the padding
    (RecurrentGemma), train on wrong numbers without an error.

    Args:
        model: A causal language model, sharded or not; left as it was.
        mesh: Ranks that hold the model, all of which call this.
        with_positions: Whether the batches have ``position_ids``, which are then those of each row alone.

    Raises:
        UnsupportedModelError: On all ranks, if logits differ by more than rounding explains.

    Collective: all ranks of the mesh, the first time.
    """
    verified, own = record_of(model).kept_or_new(_Verified), ("left padding", with_positions)
    if own in verified:
        return
    with nullcontext() if mesh is None else agreed("verifying that padding on the left changes nothing"):
        difference = left_padding_error(model, with_positions)
        # Angles of rotary positions are float32 in a float64 model too.
        tolerance = max(logits_tolerance(model, compute_device(model)), TOLERANCES[torch.float32])
        if not difference <= tolerance:
            raise UnsupportedModelError(
                f"{original_class(unwrapped(model)).__name__} reads a row behind padding differently: "
                f"its logits differ by {difference:.1e} of their size (rounding: {tolerance:.0e}). It counts "
                "positions from the first column, or carries a state over the padding. Pad on the right: "
                'SFTCollator does, or tokenizer.padding_side = "right"'
            )
    verified.add(own)


def left_padding_error(model: nn.Module, with_positions: bool = False) -> float:
    """Median over a row's tokens of how far its logits behind padding are from those alone, relatively.

    The median, since rounding routes single tokens of a mixture to other experts. There is as much padding as
    a table of positions has room for: logits may depend slowly on a position's number (BEAM).

    Collective: all ranks that hold the model, by forwards of a row of 16 tokens, alone and behind padding.
    """
    row, config = _random_ids(model, _TOKENS), text_config(model)
    tables = (getattr(config, f"max_{name}", None) for name in ("position_embeddings", "target_positions"))
    # Half of a table, since some begin at an offset.
    padded = min(_PADDED, row_limit(model) or _PADDED, *(most // 2 for most in tables if most))
    logits = []
    for width in (_TOKENS, max(padded, _TOKENS + 1)):
        ids, mask = (nn.functional.pad(t, (width - _TOKENS, 0)) for t in (row, torch.ones_like(row)))
        given = {"input_ids": ids, "attention_mask": mask}
        given |= {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if with_positions else {}
        logits.append(_logits(model, torch.arange(width)[-_TOKENS:], **given)[0])
    return float(_relative(logits[1] - logits[0], logits[0]).median())
