"""Check that nothing but attention mixes positions: a row must give the same in parts as whole."""

from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.models import original_class
from fsdp_sft._model.adapters import forward_parameters
from fsdp_sft._model.inputs import no_cache, spread_positions
from fsdp_sft._model.preserved import preserved, uncompiled
from fsdp_sft._model.sharded import compute_device
from fsdp_sft._model.twin import text_config
from fsdp_sft._ranks.agree import all_reduce_sum
from fsdp_sft._tensors.rounding import logits_tolerance
from fsdp_sft.attention.context_parallel.group import SequenceGroup, WholeRows, part_of_rows
from fsdp_sft.errors import UnsupportedModelError

_TOKENS_EACH = 32  # tokens of a rank's part; more than the windows of local convolutions
# Largest share of positions that may differ in 16 bits, where rounding can make a router send a token to
# another expert, which is no small difference. A convolution over 4 tokens changes a tenth of a part.
_MOST_FLIPPED = 0.05


def verify(model: nn.Module, group: SequenceGroup) -> None:
    """Compare this rank's part of the logits of a random row with the same part of a plain forward.

    The model is left as it was.

    Raises:
        UnsupportedModelError: If they differ. Also if tokens see later ones, or if without ``position_ids``
            the model does not count from 0.

    Collective: all ranks that hold the model; either all raise or none.
    """
    with preserved(model), torch.no_grad(), uncompiled():
        model.eval()
        probe = _PartsProbe(model, group)
        reason, cause = "", None
        try:
            reason = probe.assumption_that_fails()
            wrong = probe.part_differs()
        except Exception as error:
            reason = f"cannot run on parts of a row: {type(error).__name__}: {error}"
            cause, wrong = error, True
        if not all_reduce_sum([wrong or bool(reason)])[0]:
            return
        if not any(all_reduce_sum([bool(reason)])):
            reason = "computes something else on parts of a row than on the whole"
    raise UnsupportedModelError(
        f"{_name(model)} {reason or 'differs on another rank'}. Under context parallelism positions may "
        "meet in attention alone, by transformers' attention and mask interfaces: no recurrent state, "
        "convolution over time, ALiBi, or mask of the model's own. Train it without (cp=1)"
    ) from cause


class _PartsProbe:
    """A random row that the model computes whole and in parts."""

    def __init__(self, model: nn.Module, group: SequenceGroup) -> None:
        self.model, self.group, self.device = model, group, compute_device(model)
        config = text_config(model)
        vocabulary = getattr(config, "vocab_size", None)
        if not isinstance(vocabulary, int) or vocabulary < 2:
            raise UnsupportedModelError(f"{_name(model)}'s config has no vocab_size to draw a probe from")
        taken = forward_parameters(model)
        spread_positions(model)
        if "position_ids" not in taken:
            raise UnsupportedModelError(
                f"{_name(model)} takes no position_ids, by which a part of a row knows where it lies; train "
                "it without context parallelism"
            )
        most = getattr(config, "max_position_embeddings", None)
        each = min(_TOKENS_EACH, most // group.size) if isinstance(most, int) and most > 0 else _TOKENS_EACH
        length = max(each, 1) * group.size
        # Ids from the middle of the vocabulary, because padding, images and the like have theirs at the ends.
        low, high = vocabulary // 4, max(3 * vocabulary // 4, 1)
        ids = torch.randint(low, high, (1, length), generator=torch.Generator().manual_seed(0))
        self.ids = ids.to(self.device)
        self.positions = torch.arange(length, device=self.device)[None]
        self.whole = WholeRows(group, length, self.positions, None, None)
        self.own = slice(group.rank * each, (group.rank + 1) * each)
        # The router's loss of a part is not that of the whole row, so neither forward is asked for it.
        self.options = no_cache(model)
        if "output_router_logits" in taken:
            self.options["output_router_logits"] = False
        # Norms compute in float32 even in a float64 model, hence the least tolerance.
        self.tolerance = max(logits_tolerance(model, self.device), 1e-6)
        self._most_flipped = _MOST_FLIPPED if self.tolerance > 1e-3 else 0.0

    def assumption_that_fails(self) -> str:
        """Why a plain forward is not what computing rows in parts assumes; empty if it is."""
        plain = self._plain().logits
        changed = self.ids.clone()
        changed[:, -1] += 1
        if self.differ(self._plain(changed).logits[:, :-1], plain[:, :-1]):
            return "lets tokens see later ones, and so would see the filler at the end of a row"
        alone = self.model(input_ids=self.ids, **self.options).logits
        if self.differ(alone, plain):
            return "counts positions otherwise than from 0, which a part of a row cannot"
        padded = torch.ones_like(self.ids)
        padded[:, : len(padded[0]) // 4] = 0
        seen = slice(len(padded[0]) // 4, None)
        # In some models tokens that see no key become NaN, and make others NaN.
        alone = self.model(input_ids=self.ids, attention_mask=padded, **self.options).logits.nan_to_num()
        placed = self._plain(attention_mask=padded).logits.nan_to_num()
        if self.differ(alone[:, seen], placed[:, seen]):
            return "counts positions by the attention mask, of which a part of a row has another count"
        return ""

    def part_differs(self) -> bool:
        """Whether the logits of this rank's positions differ by more than rounding."""
        with part_of_rows(self.whole):
            part = self.model(
                input_ids=self.ids[:, self.own],
                position_ids=self.positions[:, self.own],
                attention_mask=torch.ones_like(self.ids),
                **self.options,
            )
        return self.differ(part.logits, self._plain().logits[:, self.own])

    def differ(self, found: torch.Tensor | None, expected: torch.Tensor) -> bool:
        """Whether more positions of two tensors differ than rounding explains, or their shapes do."""
        if found is None or found.shape != expected.shape:
            return True
        found, expected = found.double(), expected.double()
        size = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
        error = (found - expected).norm(dim=-1) / size.clamp_min(torch.finfo(torch.float32).tiny)
        # The negation counts NaN as a difference.
        return float((~(error <= self.tolerance)).double().mean()) > self._most_flipped

    def _plain(self, ids: torch.Tensor | None = None, **inputs: Any) -> Any:
        """Output of a plain forward of the whole row."""
        ids = self.ids if ids is None else ids
        return self.model(input_ids=ids, position_ids=self.positions, **inputs, **self.options)


def _name(model: nn.Module) -> str:
    """Class name of a model, as it was before it was sharded."""
    return original_class(model).__name__
