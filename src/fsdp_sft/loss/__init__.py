"""Causal-LM loss in which every target token of an optimizer step weighs the same.

The loss is a float32 sum. It is divided by the number of targets of the whole window (all ranks, all
micro-batches), never by a rank's own, and the averaging that FSDP2 does over ranks is cancelled. The mean of
per-rank means would be another number as soon as ranks hold unequal numbers of targets.

``plain`` is the definition, from full logits: read it first. ``linear`` computes the same of a head, a block
of logits at a time (``blocks``, ``products``). ``head`` calls it inside the model's forward where that is
proved to give the same result. ``counting`` counts targets. ``prepare`` holds the model's own loss against
this one, and adds a router's. ``causal`` puts these together, and ``part`` cuts batches where ranks share
rows.
"""

from fsdp_sft.loss.causal import (
    LossParts as LossParts,
    causal_lm_loss as causal_lm_loss,
    loss_parts as loss_parts,
    loss_sum as loss_sum,
    token_losses as token_losses,
)
from fsdp_sft.loss.counting import (
    LABEL_KEYS as LABEL_KEYS,
    LOSS_KEYS as LOSS_KEYS,
    WEIGHTS_KEY as WEIGHTS_KEY,
    Batch as Batch,
    CheckedBatch as CheckedBatch,
    count_targets as count_targets,
    counted_tokens as counted_tokens,
    facts_of as facts_of,
    is_shifted as is_shifted,
    num_targets as num_targets,
    num_tokens as num_tokens,
    scale_for_backward as scale_for_backward,
    scaled_for_averaging as scaled_for_averaging,
    targets_of as targets_of,
    weight_of as weight_of,
)
from fsdp_sft.loss.linear import linear_cross_entropy_sum as linear_cross_entropy_sum
from fsdp_sft.loss.part import (
    OF_WHOLE_ROWS as OF_WHOLE_ROWS,
    BatchPart as BatchPart,
    Rows as Rows,
    rows_of as rows_of,
)
from fsdp_sft.loss.prepare import (
    LossImpl as LossImpl,
    RouterLoss as RouterLoss,
    prepare_loss as prepare_loss,
)
