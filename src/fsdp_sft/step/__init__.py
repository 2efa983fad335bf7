"""One optimizer step, and evaluation: what belongs between a data loader and an optimizer under FSDP2.

``loader`` groups a loader's batches into windows, and ``window`` makes the ranks agree on one. ``train`` is
the step: prepare, agree, forward and backward, norm, update, result. ``update`` chooses the collectives of
its backwards, clips, and steps the optimizers. ``evaluation`` computes the loss without a step.
"""

from fsdp_sft.step.evaluation import EvalResult as EvalResult, evaluate as evaluate
from fsdp_sft.step.loader import windows as windows
from fsdp_sft.step.train import (
    GradSync as GradSync,
    StepResult as StepResult,
    train_step as train_step,
)
from fsdp_sft.step.update import SyncMode as SyncMode, gradient_sync as gradient_sync
