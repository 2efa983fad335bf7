"""Causal-LM loss in which every target token of an optimizer step weighs the same.

The loss is a float32 sum. It is divided by the number of targets of the whole window (all ranks, all
micro-batches), never by a rank's own, and the averaging that FSDP2 does over ranks is cancelled. The mean of
per-rank means would be another number as soon as ranks hold unequal numbers of targets.

``counting`` counts targets, ``forward`` computes the loss of one forward, and ``causal`` what it counts in a
window. Where it is proven to give the same result, the loss is computed without holding the logits:
``linear_cross_entropy`` and ``products`` compute it, ``head`` calls it inside the model's forward, ``probe``
proves it and ``prepare`` decides. ``own`` compares the model's own loss with it, and ``additions``
adds a router's loss or refuses what else a model adds. ``tokens`` and ``distillation`` are what losses of
one's own are made of; losses without logits share ``chunks``.
"""

from fsdp_sft.loss.additions import RouterLoss as RouterLoss, check_router_loss as check_router_loss
from fsdp_sft.loss.causal import causal_lm_loss as causal_lm_loss, loss_sum as loss_sum
from fsdp_sft.loss.counting import (
    LABEL_KEYS as LABEL_KEYS,
    LOSS_KEYS as LOSS_KEYS,
    WEIGHTS_KEY as WEIGHTS_KEY,
    Batch as Batch,
    checked_batch as checked_batch,
    count_targets as count_targets,
    is_shifted as is_shifted,
    num_targets as num_targets,
    num_tokens as num_tokens,
    scale_for_backward as scale_for_backward,
    scaled_for_averaging as scaled_for_averaging,
    target_weight as target_weight,
    weight_of as weight_of,
)
from fsdp_sft.loss.distillation import distillation_loss as distillation_loss
from fsdp_sft.loss.forward import loss_parts as loss_parts
from fsdp_sft.loss.head import HeadChecks as HeadChecks, checked_later as checked_later
from fsdp_sft.loss.linear_cross_entropy import linear_cross_entropy_sum as linear_cross_entropy_sum
from fsdp_sft.loss.part import (
    BatchPart as BatchPart,
    loss_of_whole_rows as loss_of_whole_rows,
    own_part as own_part,
    part_on_device as part_on_device,
    tokens_of as tokens_of,
)
from fsdp_sft.loss.prepare import (
    LossImpl as LossImpl,
    prepare_loss as prepare_loss,
)
from fsdp_sft.loss.probe import (
    ProbeError as ProbeError,
    evaluating as evaluating,
    guarded as guarded,
)
from fsdp_sft.loss.same_rows import (
    refuse_different_rows as refuse_different_rows,
    to_compare_rows as to_compare_rows,
)
from fsdp_sft.loss.terms import PLAIN as PLAIN, Terms as Terms
from fsdp_sft.loss.tokens import token_losses as token_losses
