"""Recompute blocks in the backward: a ratio or a list of them, whole or except for named submodules."""

import difflib
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, Literal

from torch import nn

from fsdp_sft._model.blocks import find_blocks, is_never_called, to_prepare
from fsdp_sft.sac.attach import checkpoint_blocks, note_model, remove_sac
from fsdp_sft.sac.decisions import checkpoint_of
from fsdp_sft.sac.offload import Offload, refuse_compiled
from fsdp_sft.sac.ops import checkpoint_keeping, kept_modules, refuse_inner_groups

Ratio = float | str | Fraction
Placement = Literal["even", "prefix"]

_PLACEMENTS = ("even", "prefix")


def apply_sac(
    model: nn.Module,
    ratio: Ratio | None = None,
    *,
    save: str | Iterable[str] | None = None,
    blocks: Iterable[int | str] | None = None,
    placement: Placement = "even",
    preserve_rng_state: bool | Literal["auto"] = "auto",
    early_stop: bool | None = None,
    offload: bool = False,
) -> list[str]:
    """Checkpoint some of the model's blocks: their activations are recomputed in the backward.

    A block that transformers can checkpoint is switched by its own flag; the ``forward`` of any other module
    is replaced on the instance. Parameter names do not change. Call it before or after ``compile_blocks``
    and ``shard_model``. A second call replaces the first. Only ``train()`` mode recomputes. Generation
    caches cannot be combined with recomputation, so ``use_cache`` is turned off in the model's configs
    until ``remove_sac``.

    With ``save`` the outputs of the costly operations inside the named submodules are kept and the rest is
    recomputed. For a linear layer that is its output, for an attention module its projections and its fused
    kernel. Cheap operations are recomputed everywhere.

    Args:
        model: Any model that ``find_blocks`` reads.
        ratio: Fraction of blocks in [0, 1]: a number or a text such as ``"1/3"``. It may be left out with
            ``save``, which then applies to all blocks. Blocks of towers that ``freeze_towers`` has frozen
            do not count: text does not pass through them.
        save: Names of submodules within a block whose costly outputs are kept, given by their last
            components: ``"self_attn"``, ``"o_proj"``, ``"mlp.down_proj"``; or ``"sdpa"`` for the fused
            attention kernels alone. None recomputes the chosen blocks as a whole.
        blocks: FQNs of any modules, or positions in ``find_blocks(model)`` (negative ones count from the
            end), instead of a ratio.
        placement: ``"even"`` spreads the chosen blocks, ``"prefix"`` takes the first ones.
        preserve_rng_state: Whether the recomputation repeats the random numbers of the forward, without which
            dropout gives wrong gradients. ``"auto"`` repeats them only if the model has dropout or jitter.
        early_stop: Whether recomputation ends at the last tensor that the backward needs; None leaves torch's
            default (yes). Turn it off if blocks communicate, as experts on several ranks do.
        offload: Whether the inputs of the chosen blocks are held in host memory. They are copied unchanged on
            a separate stream: out while blocks run, and back before the backward needs them. On a CPU they
            are there already. Not with ``save``, nor for compiled blocks.

    Returns:
        FQNs of the checkpointed blocks, in forward order.

    Raises:
        TypeError: If ``ratio`` is neither a number nor a text, or a block neither an FQN nor a position.
        ValueError: If an argument is out of range, or if a block is unknown. With ``save``, also if a name
            matches no submodule of the chosen blocks. With ``offload``, also with ``save`` or if a block is
            compiled.
        UnsupportedModelError: If the model has no blocks. With ``save``, if parts of a block are sharded as
            groups of their own, as experts that ranks share out are. If the model is sharded later,
            ``shard_model`` raises it.

    Memory: Each checkpointed block keeps its inputs and what ``save`` keeps; the activations of one block at
    a time are recomputed. A block with a router also keeps its choice of experts, ``8 * tokens * top_k``
    bytes, because a recomputation that chose others would give a wrong gradient. With ``offload`` the inputs
    of at most two blocks are on the device, and those of all blocks in pinned host memory: for each block
    ``2 * tokens * hidden`` bytes in bfloat16, rounded up to a power of two, which are kept from step to step.

    Example:
        >>> fs.apply_sac(model, "1/2")
        ['model.layers.0', 'model.layers.2']
        >>> fs.apply_sac(model, 1, save=["sdpa", "mlp.gate_proj"])  # all but these
        ['model.layers.0', 'model.layers.1', 'model.layers.2', 'model.layers.3']
    """
    if offload and save is not None:
        raise ValueError("offload=True moves the inputs of blocks that are recomputed whole; leave out save=")
    chosen = _chosen_blocks(model, ratio, blocks, placement, save)
    if offload:
        refuse_compiled(chosen)
    preserve = draws_random_numbers(model) if preserve_rng_state == "auto" else preserve_rng_state
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve}
    options |= {} if early_stop is None else {"early_stop": early_stop}
    names = (save,) if isinstance(save, str) else None if save is None else tuple(save)
    if names is not None:  # of no block, as for a ratio of 0, a misspelt one is an error too
        kept_modules(chosen or find_blocks(model), names)
        refuse_inner_groups(model, list(chosen))
    remove_sac(model)
    if not chosen:
        return []
    recompute = (
        checkpoint_of(chosen, options) if names is None else checkpoint_keeping(chosen, names, options)
    )
    checkpoint_blocks(chosen, recompute, Offload() if offload else None)
    note_model(model, [] if names is None else list(chosen))
    return list(chosen)


def _chosen_blocks(
    model: nn.Module,
    ratio: Ratio | None,
    blocks: Iterable[int | str] | None,
    placement: Placement,
    save: str | Iterable[str] | None,
) -> dict[str, nn.Module]:
    """FQN to module of the blocks that the arguments of ``apply_sac`` choose."""
    if blocks is not None and ratio is None:
        return named_blocks(model, blocks)
    if blocks is not None or (ratio is None and save is None):
        raise ValueError("give either a ratio such as '1/3' or blocks=, a list of FQNs or positions")
    found = list(to_prepare(model, find_blocks(model)).items())
    wanted: Ratio = 1 if ratio is None else ratio
    return dict(found[i] for i in select_block_indices(len(found), wanted, placement=placement))


def named_blocks(model: nn.Module, blocks: Iterable[int | str]) -> dict[str, nn.Module]:
    """FQN to module of blocks that are listed by FQN or position, in forward order.

    Raises:
        TypeError: If an entry is neither an FQN nor a position.
        ValueError: If one is unknown or is never called.
    """
    entries = [blocks] if isinstance(blocks, str) else list(blocks)
    modules = dict(model.named_modules())
    fqns = {_fqn_of(model, entry, modules) for entry in entries}
    return {fqn: module for fqn, module in modules.items() if fqn in fqns}


def _fqn_of(model: nn.Module, entry: Any, modules: dict[str, nn.Module]) -> str:
    """FQN of a block that is given by FQN or position."""
    if isinstance(entry, bool) or not isinstance(entry, (int, str)):
        raise TypeError(f"blocks takes FQNs and positions, got {entry!r}")
    if isinstance(entry, int):
        found = list(find_blocks(model))
        if not -len(found) <= entry < len(found):
            raise ValueError(f"block {entry} does not exist: {type(model).__name__} has {len(found)} blocks")
        return found[entry]
    if not entry or entry not in modules:
        close = difflib.get_close_matches(entry, modules, n=3, cutoff=0.4) or list(find_blocks(model))[:3]
        raise ValueError(
            f"{type(model).__name__} has no module {entry!r} inside; did you mean one of {close}?"
        )
    if is_never_called(modules[entry]):
        raise ValueError(
            f"{entry!r} ({type(modules[entry]).__name__}) only holds other modules and is never called; name "
            "its elements"
        )
    return entry


def draws_random_numbers(model: nn.Module) -> bool:
    """Whether a training forward can draw random numbers: it has a positive dropout, drop path or jitter."""
    for module in model.modules():
        # torch's dropout modules have only a private base in common, but all have p, and this in their name.
        if "dropout" in type(module).__name__.lower() and getattr(module, "p", 0) > 0:
            return True
        # layerdrop, which skips whole layers, counts too: it is drawn in Python, but from torch's generator.
        config = getattr(getattr(module, "config", None), "__dict__", {})
        for name, value in [*vars(module).items(), *config.items()]:
            is_rate = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
            if is_rate and ("drop" in name or "jitter" in name):
                return True
    return False


# The blocks that a ratio selects, in exact arithmetic.


def parse_ratio(ratio: Ratio) -> Fraction:
    """The exact ratio that a number or a text such as ``"1/3"`` stands for.

    Args:
        ratio: Number or text. A float stands for the nearest fraction with a denominator up to 1000: stored
            in binary, 0.7 is a little less than 7/10 and would select 31 of 45 blocks instead of 32.

    Raises:
        TypeError: If it is neither a number nor a text.
        ValueError: If it cannot be read or lies outside [0, 1].
    """
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float, str, Fraction)):
        raise TypeError(f"ratio must be a number in [0, 1] or a text such as '1/3', got {ratio!r}")
    try:
        exact = Fraction(ratio).limit_denominator(1000) if isinstance(ratio, float) else Fraction(ratio)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(
            f"ratio must be a number in [0, 1] or a text such as '1/3', got {str(ratio)[:40]!r}"
        ) from error
    if not 0 <= exact <= 1:
        raise ValueError(f"ratio must be in [0, 1], got {ratio}; 0 checkpoints no block, and 1 every block")
    return exact


def select_block_indices(num_blocks: int, ratio: Ratio, *, placement: Placement = "even") -> list[int]:
    """Indices of the blocks that a ratio selects for checkpointing.

    ``"even"`` selects block ``i`` if ``floor((i + 1) * r + 1/2) > floor(i * r + 1/2)``, in exact arithmetic.
    That spreads the selected blocks evenly and selects ``floor(num_blocks * r + 1/2)`` of them. ``"prefix"``
    selects as many from the front. It lowers the peak further, because the first blocks' activations are held
    longest.

    Args:
        num_blocks: Number of blocks in the model.
        ratio: Fraction of blocks in [0, 1]: a number or a text such as ``"1/3"``.
        placement: ``"even"`` or ``"prefix"``.

    Returns:
        Indices from 0, ascending.

    Raises:
        TypeError: If ``ratio`` is neither a number nor a text.
        ValueError: If an argument is out of range.

    Example:
        >>> fs.select_block_indices(9, "1/3")
        [1, 4, 7]
        >>> fs.select_block_indices(9, "1/3", placement="prefix")
        [0, 1, 2]
    """
    if placement not in _PLACEMENTS:
        raise ValueError(f"placement must be one of {_PLACEMENTS}, got {placement!r}")
    numerator, denominator = parse_ratio(ratio).as_integer_ratio()

    def taken_before(i: int) -> int:  # floor(i * ratio + 1/2) in integers
        return (2 * i * numerator + denominator) // (2 * denominator)

    if placement == "prefix":
        return list(range(taken_before(num_blocks)))
    return [i for i in range(num_blocks) if taken_before(i + 1) > taken_before(i)]
