"""Kullback-Leibler divergence of two linear heads, holding the logits of one chunk of rows at a time.

It is the loop of ``linear_cross_entropy`` with the teacher's probabilities in place of the target's: the
student's gradients are computed in the forward, while the logits of a chunk exist.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from fsdp_sft.loss.chunks import (
    Head,
    HeadGradients,
    as_computed,
    blocks_of_logits,
    default_chunk_size,
    gradients_of_sum,
    wide_dtype,
)
from fsdp_sft.loss.products import products_for

Kind = Literal["forward", "reverse"]

# Slopes of the reverse divergence are p * (log(p / q) - D), whose size the difference of logits bounds.
_MOST = {"forward": 1.0, "reverse": 128.0}


@dataclass(frozen=True)
class Divergence:
    """A divergence of a student's distribution over the vocabulary from a teacher's.

    With p the teacher's probabilities and q the student's, each a softmax of logits divided by the
    temperature, ``"forward"`` is ``sum(p * log(p / q))`` and ``"reverse"`` is ``sum(q * log(q / p))``.

    Attributes:
        kind: ``"forward"`` or ``"reverse"``.
        temperature: Divisor of both models' logits.
    """

    kind: Kind
    temperature: float

    def of(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Divergences of rows ``(N,)`` from logits ``(N, V)``, differentiable."""
        q = (student / self.temperature).log_softmax(-1)
        p = (teacher.to(student.dtype) / self.temperature).log_softmax(-1)
        mean, other = (p, q) if self.kind == "forward" else (q, p)
        return (mean.exp() * (mean - other)).sum(-1)

    def slopes_(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Divergences of rows ``(C, 1)``; overwrites ``student`` by their gradient times the temperature."""
        q = torch.log_softmax(student.div_(self.temperature), -1)
        p = torch.log_softmax(teacher.to(q.dtype).div_(self.temperature), -1)
        torch.exp(q, out=student)
        if self.kind == "forward":  # d/dx_j = q_j - p_j
            likely = p.exp()
            divergence = p.sub_(q).mul_(likely).sum(-1, keepdim=True)
            student.sub_(likely)
        else:  # d/dx_j = q_j (log(q_j / p_j) - D)
            ratio = q.sub_(p)
            divergence = (student * ratio).sum(-1, keepdim=True)
            student.mul_(ratio.sub_(divergence))
        return divergence


def divergence_of_heads(
    hidden: torch.Tensor,
    head: Head,
    teacher_hidden: torch.Tensor,
    teacher: Head,
    *,
    positions: torch.Tensor,
    weights: torch.Tensor | None,
    divergence: Divergence,
) -> torch.Tensor:
    """The divergence summed over rows, a float32 scalar (float64 for float64 hidden states).

    Args:
        hidden: The student's hidden states ``(N, H)``.
        head: The student's head.
        teacher_hidden: The teacher's hidden states ``(N, H')``, which get no gradient.
        teacher: The teacher's head, of as many rows as the student's.
        positions: Indices of the rows that count.
        weights: Factors of all rows' divergences, ``(N,)``; None is 1.
        divergence: What is summed.
    """
    hidden, weight, bias = as_computed(hidden, head.weight, head.bias)
    teacher_hidden, known, known_bias = as_computed(teacher_hidden, teacher.weight, teacher.bias)
    teacher = Head(known.detach(), known_bias, teacher.softcap, teacher.scale)
    options = (head.softcap, head.scale, divergence, torch.is_grad_enabled())
    with torch.autocast(hidden.device.type, enabled=False):
        result: torch.Tensor = _DivergenceOfHeads.apply(
            hidden, weight, bias, teacher_hidden, teacher, positions, weights, options
        )
    return result


class _DivergenceOfHeads(torch.autograd.Function):
    """The divergence, with the student's gradients computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        teacher_hidden: torch.Tensor,
        teacher: Head,
        positions: torch.Tensor,
        weights: torch.Tensor | None,
        options: tuple[float | None, float, Divergence, bool],
    ) -> torch.Tensor:
        softcap, scale, divergence, grad_enabled = options
        wanted = [needed and grad_enabled for needed in ctx.needs_input_grad[:3]]
        head = Head(weight, bias, softcap, scale)
        chunk_size = default_chunk_size(hidden.shape[-1], hidden.dtype)
        rows = min(chunk_size, len(positions))
        products, others = products_for(weight, rows), products_for(teacher.weight, rows)
        gain: float | torch.Tensor = products.gain
        if products.gain != 1:
            gain = products.gain / _MOST[divergence.kind]
            if weights is not None and len(positions):
                gain = gain / weights[positions].float().amax().clamp_min(1)
        ctx.gradients = HeadGradients(hidden, head, wanted, gain)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        # Blocks are cut by device and vocabulary, so those of the two heads are of the same rows.
        both = zip(
            blocks_of_logits(
                hidden, head, positions, chunk_size, products, labels=None, gradients=ctx.gradients
            ),
            blocks_of_logits(teacher_hidden, teacher, positions, chunk_size, others, labels=None),
            strict=True,
        )
        for (index, logits), (_, known) in both:
            tanh = head.transform_(logits, keep=any(wanted))
            teacher.transform_(known, keep=False)
            divergences = divergence.slopes_(logits, known)
            if tanh is not None:
                logits.mul_(tanh.square_().neg_().add_(1))
            if weights is not None:
                factors = weights[index, None].to(logits.dtype)
                divergences *= factors
                logits.mul_(factors)
            total += divergences.sum(dtype=torch.float64)
        ctx.factor = scale / (divergence.temperature * gain)
        ctx.dtype = hidden.dtype
        return total.to(wide_dtype(hidden))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*gradients_of_sum(ctx, "distillation_loss", grad_output), *(None,) * 5)
