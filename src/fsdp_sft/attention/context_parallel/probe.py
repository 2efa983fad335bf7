"""Check that nothing but attention mixes positions: a row must give the same in parts as whole."""

import torch
import torch.nn.functional as F
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
    """Compare this rank's part of the logits of random rows with the same part of a plain forward.

    The model is left as it was.

    Raises:
        UnsupportedModelError: If they differ.

    Collective: all ranks that hold the model; either all raise or none.
    """
    with preserved(model), torch.no_grad(), uncompiled():
        model.eval()
        reason = "computes something else on parts of a row than on the whole"
        cause: Exception | None = None
        try:
            differs = _part_differs(model, group)
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


def _part_differs(model: nn.Module, group: SequenceGroup) -> bool:
    """Whether the logits of this rank's part of two rows differ by more than rounding.

    The plain forward is given the rows and their mask alone. One row begins with padding, which shows a model
    that counts positions by the mask; filler at the end, which no token may see, one whose tokens see later
    ones.
    """
    device, config = compute_device(model), text_config(model)
    spread_positions(model)
    most = getattr(config, "max_position_embeddings", None)
    each = min(_TOKENS_EACH, most // group.size) if isinstance(most, int) and most > 0 else _TOKENS_EACH
    length = max(each, 1) * group.size
    own = slice(group.rank * length // group.size, (group.rank + 1) * length // group.size)
    # Ids from the middle of the vocabulary, because padding, images and the like have theirs at the ends.
    low, high = config.vocab_size // 4, max(3 * config.vocab_size // 4, 1)
    ids = torch.randint(low, high, (2, length), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    mask[0, : length // 4] = mask[:, -1] = 0
    positions = torch.arange(length, device=device).repeat(2, 1)
    positions[:, -1] = 0  # the filler's
    # The router's loss of a part is not that of the whole row, so neither forward is asked for it.
    options = no_cache(model)
    if "output_router_logits" in forward_parameters(model):
        options["output_router_logits"] = False
    plain = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], **options).logits
    with part_of_rows(WholeRows(group, length, positions, None, mask.bool(), filler=1)):
        given = {"input_ids": ids[:, own], "position_ids": positions[:, own], "attention_mask": mask}
        part = model(**given, **options).logits
    counts = mask[:, own].bool()
    # In some models tokens that see no key become NaN, and make others of their row NaN.
    found, expected = (x[counts].nan_to_num().double() for x in (part, F.pad(plain, (0, 0, 0, 1))[:, own]))
    size = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    error = (found - expected).norm(dim=-1) / size.clamp_min(torch.finfo(torch.float32).tiny)
    # Norms compute in float32 even in a float64 model, hence the least tolerance.
    tolerance = max(logits_tolerance(model, device), 1e-6)
    flipped = float((error > tolerance).double().mean())
    return flipped > (_MOST_FLIPPED if tolerance > 1e-3 else 0.0)
