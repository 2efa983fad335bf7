"""The divergence of a student from a teacher over the whole vocabulary, without the logits of either.

Both heads have to be gathered at once. So the student's forward runs inside of the teacher's: where that has
come to its head, whose parameters stay gathered until it returns.
"""

import math
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_sft._model.inputs import no_cache
from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft.attention.context_parallel import SequenceGroup
from fsdp_sft.loss.choice import LossChoice
from fsdp_sft.loss.chunks import Head
from fsdp_sft.loss.counting import Batch, CheckedBatch, targets_of, weights_of, without_labels
from fsdp_sft.loss.head import loss_at_head
from fsdp_sft.loss.linear_divergence import Divergence, Kind, divergence_of_heads
from fsdp_sft.loss.linear_head import num_logits
from fsdp_sft.loss.part import whole_rows
from fsdp_sft.loss.prepare import choice_for
from fsdp_sft.loss.tokens import forward_of, logits_of, part_for
from fsdp_sft.targets import IGNORE_INDEX


def distillation_loss(
    student: nn.Module,
    teacher: nn.Module,
    batch: Batch,
    *,
    temperature: float = 1.0,
    kind: Kind = "forward",
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Kullback-Leibler divergence between a teacher's and a student's predictions, summed over targets.

    With p the teacher's probabilities and q the student's, softmax of their logits over ``temperature``, a
    target adds ``sum(p * log(p / q))`` over the vocabulary, or ``sum(q * log(q / p))``. The gradient is the
    student's; the teacher runs under ``no_grad``. To keep its size at any temperature, multiply by
    ``temperature ** 2`` (https://arxiv.org/abs/1503.02531).

    Args:
        student: Decoder-only language model, sharded or not.
        teacher: Another one with the same tokens, sharded on the same mesh or another, or not at all. It is
            run in the mode that it is in: call ``teacher.eval()`` before.
        batch: Batch of the form that ``loss_sum`` takes, padded or packed, which both models get. Targets are
            the positions whose label, after the shift, is not -100. ``loss_weights`` are factors of theirs.
        temperature: Divisor of the logits of both, above 0.
        kind: ``"forward"`` (the student covers what the teacher does) or ``"reverse"`` (it seeks the
            teacher's modes).
        vocab_size: Number of ids that count, from 0 on. It has to be given if the heads have unequal numbers
            of rows, as padding of a vocabulary makes them; None takes all.

    Returns:
        A float32 scalar (float64 for float64 models), connected to the student's parameters even if the batch
        has no target. Under context parallelism each rank of a group gets the sum over the whole rows, which
        counts as ``token_losses`` do.

    Raises:
        ValueError: If an option is out of range, if the heads' rows differ and ``vocab_size`` is not given,
            if both models are one, or if ranks share rows of the teacher in another way than the student's.
        ModelLossError: As ``token_losses``, of either model.
        RuntimeError: In a second backward, or one that is to be derived itself.

    Collective: all ranks of both models' meshes, by their forwards.
    Memory: ``chunk_size * V`` logits of each model, and until the backward the gradients of the student's
    hidden states and head in float32. If the head of a model is no single product (``prepare_loss`` says so),
    the full logits of both exist.

    Example:
        >>> teacher = fs.load_pretrained(path, mesh=fs.build_mesh()).eval()
        >>> loss = fs.distillation_loss(model, teacher, batch, temperature=2.0)
        >>> loss.dtype, loss.requires_grad
        (torch.float32, True)
    """
    divergence = _checked(kind, temperature, vocab_size)
    if unwrapped(student) is unwrapped(teacher):
        raise ValueError(
            "distillation_loss: student and teacher are the same model, which cannot run inside of itself: "
            "load the teacher a second time"
        )
    part, group = part_for(student, batch)
    with torch.no_grad():
        taught, other = part_for(teacher, batch)
    _refuse_other_sharing(group, other)
    computed = _divergence if not torch.compiler.is_compiling() else torch.compiler.disable(_divergence)
    own: torch.Tensor = computed(
        _Pair(student, teacher, part, taught, group if other is None else None, vocab_size), divergence
    )
    return own if group is None else whole_rows(own.reshape(1), group).sum()


def _checked(kind: Kind, temperature: float, vocab_size: int | None) -> Divergence:
    """The divergence of the arguments, which are checked."""
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be 'forward' or 'reverse', got {kind!r}")
    is_number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if not is_number or not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a number above 0, got {temperature!r}")
    is_count = isinstance(vocab_size, int) and not isinstance(vocab_size, bool) and vocab_size > 0
    if vocab_size is not None and not is_count:
        raise ValueError(f"vocab_size must be a number of ids or None, got {vocab_size!r}")
    return Divergence(kind, float(temperature))


def _refuse_other_sharing(group: SequenceGroup | None, other: SequenceGroup | None) -> None:
    """Refuse a teacher whose rows are shared in another way than the student's; it may have whole ones."""
    if other is None:
        return
    if group is None or (group.size, group.rank, group.share) != (other.size, other.rank, other.share):
        cp = 1 if group is None else group.size
        raise ValueError(
            f"ranks share the teacher's rows with cp={other.size} and the student's with cp={cp}: shard the "
            "teacher on the student's mesh, or on one without cp"
        )


@dataclass(frozen=True)
class _Pair:
    """Both models with what each gets.

    Attributes:
        student: The student.
        teacher: The teacher.
        part: The student's batch, or this rank's part of it.
        taught: The teacher's.
        cut: Ranks that share the student's rows, if the teacher has whole ones.
        vocab_size: Number of ids that count; None for all.
    """

    student: nn.Module
    teacher: nn.Module
    part: Batch
    taught: Batch
    cut: SequenceGroup | None
    vocab_size: int | None

    def ids(self, of_student: int, of_teacher: int) -> int:
        """Number of ids that count, of heads with so many rows.

        Raises:
            ValueError: If they differ and nobody has said how many count, or a head has fewer.
        """
        if self.vocab_size is None and of_student != of_teacher:
            raise ValueError(
                f"the student's head has {of_student} rows and the teacher's {of_teacher}: if both know the "
                f"same tokens and the rest is padding, say how many count, such as "
                f"vocab_size={min(of_student, of_teacher)}; if not, their predictions cannot be compared"
            )
        if self.vocab_size is not None and self.vocab_size > min(of_student, of_teacher):
            raise ValueError(
                f"vocab_size={self.vocab_size} exceeds the rows of a head: the student's has {of_student}, "
                f"the teacher's {of_teacher}"
            )
        return of_student if self.vocab_size is None else self.vocab_size

    def targets(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(positions that count in the flattened part, weights of all of its positions or None)."""
        weights = weights_of(self.part)
        weights = None if weights is None else weights.detach().flatten().to(device)
        known = self.part.targets if isinstance(self.part, CheckedBatch) else None
        if known is not None:
            return known.positions, weights
        return (targets_of(self.part).flatten() != IGNORE_INDEX).nonzero().squeeze(1).to(device), weights

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's part of the teacher's values ``(B, S, ...)``, flattened to rows."""
        if self.cut is not None:
            each = targets_of(self.part).shape[1]
            values = F.pad(values, (0, 0, 0, each * self.cut.size - values.shape[1]))
            values = values[:, self.cut.rank * each : (self.cut.rank + 1) * each]
        return values.flatten(0, 1)


def _divergence(pair: _Pair, divergence: Divergence) -> torch.Tensor:
    """The divergence of this rank's part, by the implementations chosen for the models."""
    choice = choice_for(pair.student, "auto")
    with torch.no_grad():
        other = choice_for(pair.teacher, "auto")
    head = choice.head() if choice.head is not None else None
    taught = other.head() if other.head is not None else None
    if head is None or taught is None:
        return _from_logits(pair, divergence)
    ids = pair.ids(num_logits(head), num_logits(taught))
    return _at_heads(pair, divergence, (choice, head), (other, taught), ids)


def _at_heads(
    pair: _Pair,
    divergence: Divergence,
    of_student: tuple[LossChoice, nn.Module],
    of_teacher: tuple[LossChoice, nn.Module],
    ids: int,
) -> torch.Tensor:
    """The divergence, computed where both forwards have come to their heads."""
    (choice, head), (other, taught) = of_student, of_teacher
    wants_gradient = torch.is_grad_enabled()
    found: list[torch.Tensor] = []

    def at_teacher(hidden: torch.Tensor, **operands: Any) -> torch.Tensor:
        known, known_head = pair.own(hidden), _first_rows(ids, **operands)

        def at_student(hidden: torch.Tensor, **operands: Any) -> torch.Tensor:
            positions, weights = pair.targets(hidden.device)
            if hidden.device != known.device:
                raise ValueError(
                    f"the student computes on {hidden.device}, the teacher on {known.device}: use one device"
                )
            return divergence_of_heads(
                hidden.flatten(0, 1),
                _first_rows(ids, **operands),
                known,
                known_head,
                positions=positions,
                weights=weights,
                divergence=divergence,
            )

        with torch.set_grad_enabled(wants_gradient), forward_of(pair.student, pair.part):
            inputs = {**without_labels(pair.part), **no_cache(pair.student)}
            at_head = choice.at(head, at_student)
            found.append(loss_at_head(pair.student, head, inputs, at_head, choice.transform)[0])
        return hidden.new_zeros((), dtype=torch.float32)

    with torch.no_grad(), forward_of(pair.teacher, pair.taught):
        inputs = {**without_labels(pair.taught), **no_cache(pair.teacher)}
        zero, _ = loss_at_head(pair.teacher, taught, inputs, other.at(taught, at_teacher), other.transform)
    # NaN instead of 0 if the teacher's forward has changed, which is told when the gradient's norm is read.
    return found[0] + zero.detach()


def _first_rows(
    ids: int, *, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float | None
) -> Head:
    """A head of the first ``ids`` rows of a weight and a bias."""
    if ids < weight.shape[0]:
        weight, bias = weight[:ids], None if bias is None else bias[:ids]
    return Head(weight, bias, softcap, scale)


def _from_logits(pair: _Pair, divergence: Divergence) -> torch.Tensor:
    """The divergence from the full logits of both."""
    with torch.no_grad():
        known = logits_of(pair.teacher, pair.taught)
    logits = logits_of(pair.student, pair.part)
    ids = pair.ids(logits.shape[-1], known.shape[-1])
    positions, weights = pair.targets(logits.device)
    rows = divergence.of(
        logits.flatten(0, 1)[positions, :ids], pair.own(known)[positions, :ids].to(logits.device)
    )
    rows = rows if weights is None else rows * weights[positions].to(rows.dtype)
    return rows.sum()
