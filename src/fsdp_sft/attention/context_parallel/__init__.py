"""Exact context parallelism: each rank has a part of a row's tokens, and attention sees all of them."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_sft._compat.attention import attention_of, eager_attention_of, keep_rows_apart
from fsdp_sft._model.forward import forward_parameters, logits_tolerance, no_cache, probed, spread_positions
from fsdp_sft._model.sharded import compute_device, mesh_of
from fsdp_sft._model.twin import text_config
from fsdp_sft._model.view import kept_of, original_class, record_of, unwrapped
from fsdp_sft._ranks.agree import agreed, all_reduce_sum
from fsdp_sft._ranks.mesh import CP, cp_size
from fsdp_sft.attention.context_parallel.group import (
    PREFIX,
    SequenceGroup,
    WholeRows,
    key_heads,
    not_divisible,
    part_of_rows,
    rows_in_forward,
    sequence_group_in,
    show_whole_positions,
    to_heads,
    to_tokens,
)
from fsdp_sft.errors import UnsupportedModelError

__all__ = [
    "SequenceGroup",
    "WholeRows",
    "check_shareable",
    "part_of_rows",
    "sequence_group_in",
    "sequence_group_of",
    "share_attention",
    "use_context_parallel",
]

_WITHIN = ("sdpa", "eager", "sdpa_varlen")  # attention implementations that can be wrapped


def use_context_parallel(model: nn.Module, *, mesh: DeviceMesh) -> None:
    """Let the ranks along a mesh's ``cp`` axis share the tokens of each row, with exact results.

    From then on ``train_step``, ``evaluate``, ``causal_lm_loss`` and ``loss_sum`` take whole rows, the same
    on all ranks of a ``cp`` group. Each rank computes its part: 1/cp of the tokens in the layers, the loss
    and its gradients. Around attention two exchanges give each rank all tokens of 1/cp of the heads
    (Ulysses), so attention computes what it would on one process: packs, sliding and chunked windows, soft
    caps, sinks and latent attention work as they are. Rotary embeddings get the positions in the whole row.

    A model is compared with itself once, on random rows computed whole and in parts. That shows whether
    anything outside of attention mixes positions (recurrent states, convolutions over time, ALiBi).

    A forward outside of these functions is a plain one. Generation with the same inputs on every rank works
    as before; training by a plain forward is refused. Call ``use_varlen_attention`` before this function.

    Args:
        model: Causal language model of transformers with its weights, sharded on ``mesh``.
        mesh: Mesh from ``build_mesh(cp=...)``; with ``cp=1`` there is nothing to do.

    Raises:
        ValueError: If ``mesh`` is not the one that the model is sharded on, or ``cp`` does not divide the
            query heads; the message says which values would.
        UnsupportedModelError: If the model's attention cannot be wrapped, or the comparison shows a
            difference. The model is as before.
        TypeError: If the model is not one of transformers.

    Collective: all ranks of the mesh; either all raise or none.
    Memory: Attention holds queries, keys and values of all tokens for 1/cp of the heads. If there are fewer
        key heads than ``cp``, they are repeated.

    Example:
        >>> mesh = fs.build_mesh(cp=1)  # cp=8 on 8 ranks: each computes an eighth of every row
        >>> model = fs.load_pretrained(path, mesh=mesh)
        >>> fs.use_context_parallel(model, mesh=mesh)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> for window in fs.windows(loader, grad_accum_steps=2):
        ...     result = fs.train_step(model, window, optimizer)
    """
    inner = unwrapped(model)
    name = original_class(inner).__name__
    group = sequence_group_in(mesh)
    if group is None:
        return
    if not callable(getattr(inner, "set_attn_implementation", None)):
        raise TypeError(f"ranks can share rows of a transformers model only, got {name}")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{name} has parameters on the meta device: load its weights first")
    if mesh_of(inner) is not mesh:
        raise ValueError(
            f"{name} is not sharded on this mesh, and its gradients would not be summed over cp: hand the "
            "same mesh to shard_model or load_pretrained, before"
        )
    before = attention_of(inner)
    check_shareable(inner, group.size)
    try:
        with agreed("comparing a model under context parallelism with itself"):
            share_attention(inner)
            _verify(model, group)
    except BaseException:
        if attention_of(inner) != before:
            set_attention: Any = inner.set_attn_implementation
            set_attention(before)
        raise
    record_of(inner).keep(group)


def check_shareable(model: nn.Module, ranks: int) -> None:
    """Refuse a model whose rows cannot be shared by ``ranks`` ranks.

    Raises:
        ValueError: If the number of ranks does not divide that of query heads.
        UnsupportedModelError: If the model runs an attention implementation that cannot be wrapped.
    """
    name = original_class(model).__name__
    within = attention_of(model).removeprefix(PREFIX)
    if within not in _WITHIN:
        raise UnsupportedModelError(
            f"{name} runs {within} attention; context parallelism runs around {', '.join(_WITHIN)}. Set one "
            "by model.set_attn_implementation, or call use_varlen_attention, which runs torch's flash kernel"
        )
    heads = getattr(text_config(model), "num_attention_heads", None)
    if isinstance(heads, int) and heads % ranks:
        raise ValueError(not_divisible(f"{name} has", heads, ranks))


def share_attention(model: Any) -> None:
    """Wrap a model's attention, so that it can run on parts of rows.

    Raises:
        UnsupportedModelError: If transformers does not let the model run another attention, or if a rotary
            embedding inside a block depends on the length of the row.
    """
    before = attention_of(model)
    wanted = register(before.removeprefix(PREFIX))
    model.set_attn_implementation(wanted)
    show_whole_positions(model)
    if attention_of(model) != wanted:
        raise UnsupportedModelError(
            f"transformers does not let {original_class(model).__name__} run another attention than {before}"
        )


def sequence_group_of(model: nn.Module) -> SequenceGroup | None:
    """This rank's group of ranks that share the rows of a model; None without context parallelism.

    Raises:
        UnsupportedModelError: If the model is sharded on a mesh with ``cp``, but ``use_context_parallel`` was
            not called or its attention has been replaced since.
    """
    inner = unwrapped(model)
    mesh = mesh_of(inner)
    if mesh is None or CP not in (mesh.mesh_dim_names or ()):
        return None
    group = kept_of(inner, SequenceGroup)
    if group is None:
        raise UnsupportedModelError(
            f"{type(inner).__name__} is sharded on a mesh with cp={cp_size(mesh)}, whose ranks share rows: "
            "call use_context_parallel(model, mesh=mesh) first"
        )
    if not attention_of(inner).startswith(PREFIX):
        raise UnsupportedModelError(
            f"the attention of {type(inner).__name__} was set to {attention_of(inner)} after "
            "use_context_parallel: call that again"
        )
    return group


# A comparison that shows whether anything but attention mixes positions.

_TOKENS_EACH = 32  # tokens of a rank's part; more than the windows of local convolutions
# Largest share of positions that may differ in 16 bits, where rounding can make a router send a token to
# another expert, which is no small difference. A convolution over 4 tokens changes a tenth of a part.
_MOST_FLIPPED = 0.05


def _verify(model: nn.Module, group: SequenceGroup) -> None:
    """Compare this rank's part of the logits of random rows with the same part of a plain forward.

    The model is left as it was.

    Raises:
        UnsupportedModelError: If they differ.

    Collective: all ranks that hold the model; either all raise or none.
    """
    with probed(model):
        reason = "computes something else on parts of a row than on the whole"
        cause: Exception | None = None
        try:
            found = [_part_differs(model, group, padded=padded) for padded in (False, True)]
            differs = any(found)
        except Exception as error:
            reason = f"cannot run on parts of a row: {type(error).__name__}: {error}"
            differs, cause = True, error
        if not all_reduce_sum([differs])[0]:
            return
    raise UnsupportedModelError(
        f"{original_class(model).__name__} {reason if differs else 'differs on another rank'}. Under context "
        "parallelism positions, which count from 0, may meet in attention alone, by transformers' attention "
        "and mask interfaces: no recurrent state, convolution over time, ALiBi, mask of the model's own, or "
        "token that sees a later one. Train it without (cp=1)"
    ) from cause


def _part_differs(model: nn.Module, group: SequenceGroup, *, padded: bool) -> bool:
    """Whether the logits of this rank's part of a row differ by more than rounding.

    The plain forward is given no positions, and no filler, which no token of the row may see. A row that
    begins with padding shows a model that counts positions by the mask.

    Collective: all ranks of the group.
    """
    device, config = compute_device(model), text_config(model)
    spread_positions(model)
    most = getattr(config, "max_position_embeddings", None)
    each = min(_TOKENS_EACH, most // group.size) if isinstance(most, int) and most > 0 else _TOKENS_EACH
    length = max(each, 1) * group.size
    own = slice(group.rank * length // group.size, (group.rank + 1) * length // group.size)
    # Ids from the middle of the vocabulary, because padding, images and the like have theirs at the ends.
    low, high = config.vocab_size // 4, max(3 * config.vocab_size // 4, 1)
    ids = torch.randint(low, high, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.arange(length, device=device)[None] % (length - 1)  # the filler's is 0
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, -1] = False
    mask[:, : length // 4 if padded else 0] = False
    # The router's loss of a part is not that of the whole row, so neither forward is asked for it.
    options = no_cache(model)
    if "output_router_logits" in forward_parameters(model):
        options["output_router_logits"] = False
    given = {"attention_mask": mask[:, :-1].long()} if padded else {}
    plain = model(input_ids=ids[:, :-1], **given, **options).logits
    with part_of_rows(WholeRows(group, length, positions, None, mask if padded else None, filler=1)):
        given = {
            "position_ids": positions[:, own],
            "attention_mask": mask if padded else torch.ones_like(ids),
        }
        part = model(input_ids=ids[:, own], **given, **options).logits
    counts = mask[:, own]
    # In some models tokens that see no key become NaN, and make others of their row NaN.
    found, expected = (x[counts].nan_to_num().double() for x in (part, F.pad(plain, (0, 0, 0, 1))[:, own]))
    size = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    error = (found - expected).norm(dim=-1) / size.clamp_min(torch.finfo(torch.float32).tiny)
    # Norms compute in float32 even in a float64 model, hence the least tolerance.
    tolerance = max(logits_tolerance(model, device), 1e-6)
    flipped = float((error > tolerance).double().mean())
    return flipped > (_MOST_FLIPPED if tolerance > 1e-3 else 0.0)


# Attention over a sequence of which each rank has a part.


@dataclass(frozen=True, eq=False)
class SequenceMask:
    """Stand-in for the attention mask that tells attention that it sees a part of the tokens.

    As an argument of the layers it also reaches a recomputation, which another thread may run.

    Attributes:
        group: Ranks that have the parts of the sequence.
        inner: Mask of the whole sequence, in the form that the wrapped attention takes.
        position_ids: Positions of the whole sequence, ``(B, S)``.
    """

    group: SequenceGroup
    inner: Any
    position_ids: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model looks at {name!r} of its attention mask, which under context parallelism is that of "
            "tokens which other ranks have"
        )


def register(implementation: str) -> str:
    """Register attention over parts of a sequence, wrapped around ``implementation``; returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = PREFIX + implementation
    AttentionInterface.register(name, functools.partial(attend, implementation))
    AttentionMaskInterface.register(name, functools.partial(make_mask, implementation))
    return name


def make_mask(
    implementation: str,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **others: Any,
) -> Any:
    """Function for transformers' mask interface: the mask of the whole sequence, in a ``SequenceMask``."""
    from transformers import AttentionMaskInterface

    whole = rows_in_forward()
    plain = functools.partial(AttentionMaskInterface()[implementation], batch_size=batch_size, **others)
    if whole is None:
        return plain(
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
        )
    part = whole.length // whole.group.size
    # A model that makes a cache although none is asked for takes the number of keys from the cache.
    if q_length != part or kv_length not in (part, whole.length):
        raise UnsupportedModelError(
            f"the model makes a mask of {q_length} queries and {kv_length} keys, where this rank has "
            f"{part} of {whole.length} tokens: it attends to something beside the text, which context "
            "parallelism cannot cut"
        )
    if whole.rows is not None:
        mask_function = keep_rows_apart(mask_function, whole.position_ids, whole.rows)
    inner = plain(
        q_length=whole.length,
        kv_length=whole.length,
        mask_function=mask_function,
        attention_mask=whole.padding,
        allow_is_causal_skip=allow_is_causal_skip and whole.rows is None,
    )
    if whole.filler and isinstance(inner, torch.Tensor) and inner.is_floating_point():
        # A token that may see no key (left padding) attends to all keys equally in such a mask. Filler must
        # not be among them.
        inner[..., -whole.filler :] = -math.inf
    return SequenceMask(whole.group, inner, whole.position_ids)


def attend(
    implementation: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Function for transformers' attention interface; tensors are ``(B, heads, S / n, head size)``."""
    function = _attention(implementation, module)
    if not isinstance(attention_mask, SequenceMask):
        _refuse_alone(module)
        return function(module, query, key, value, attention_mask, **others)  # type: ignore[no-any-return]
    group, inner = attention_mask.group, attention_mask.inner
    heads = query.shape[1]
    if heads % group.size:
        raise UnsupportedModelError(not_divisible(f"{type(module).__name__} has", heads, group.size))
    keys = key_heads(heads, key.shape[1], group.size)
    if keys.repeats > 1:
        key, value = key.repeat_interleave(keys.repeats, 1), value.repeat_interleave(keys.repeats, 1)
    own = _OwnHeads(heads, group)
    query, key, value = to_heads((query, key, value), group)
    others = {name: own.of(argument) for name, argument in others.items()}
    if others.get("position_ids") is not None:
        others["position_ids"] = attention_mask.position_ids
    seen: Any = module
    if keys.repeats > 1 or any(own.has(tensor) for tensor in module.parameters(recurse=False)):
        seen = _ModuleOfRank(module, own, keys.groups)
    out, _ = function(seen, query, key, value, own.of(inner), **others)
    return to_tokens(out, group), None


@dataclass(frozen=True)
class _OwnHeads:
    """Narrows tensors with an entry per query head, such as sinks and biases, to this rank's heads."""

    heads: int
    group: SequenceGroup

    def has(self, value: Any) -> bool:
        """Whether ``value`` has one entry per query head: ``(heads,)`` or ``(B, heads, S, S)``."""
        if not isinstance(value, torch.Tensor) or value.ndim not in (1, 4) or not value.is_floating_point():
            return False
        return bool(value.shape[0 if value.ndim == 1 else 1] == self.heads)

    def of(self, value: Any) -> Any:
        """The entries of this rank's heads; anything without an entry per head is returned as it is."""
        if not self.has(value):
            return value
        each = self.heads // self.group.size
        return value.narrow(0 if value.ndim == 1 else 1, self.group.rank * each, each)


class _ModuleOfRank:
    """An attention module as the wrapped attention function sees it: with this rank's heads only."""

    def __init__(self, module: nn.Module, own: _OwnHeads, groups: int) -> None:
        self.module, self.own, self.num_key_value_groups = module, own, groups

    def __getattr__(self, name: str) -> Any:
        return self.own.of(getattr(self.module, name))


def _attention(implementation: str, module: nn.Module) -> Callable[..., Any]:
    """The wrapped attention function; that of ``"eager"`` is in the file of the module's class."""
    if implementation != "eager":
        from transformers import AttentionInterface

        return AttentionInterface()[implementation]  # type: ignore[no-any-return]
    function: Callable[..., Any] | None = eager_attention_of(module)
    if function is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no eager attention of its own to run within context parallelism"
        )
    return function


def _refuse_alone(module: nn.Module) -> None:
    """Refuse a plain forward in training: every rank of a group would compute the whole rows.

    For generation that is right, and it is allowed.
    """
    if rows_in_forward() is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends without the mask that transformers made for the model, "
            "which says what other ranks have"
        )
    if module.training and torch.is_grad_enabled():
        raise UnsupportedModelError(
            "a model under context parallelism was called by itself in training: every rank of a group would "
            "compute the whole rows. Call train_step, causal_lm_loss or loss_sum, which cut them; a loss_fn "
            "is made of token_losses or loss_sum"
        )
