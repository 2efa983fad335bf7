"""Mistakes in losses of one's own: of tokens, from a teacher, with metrics and weights."""

from benchmarks.checks.mistakes.mistake import Mistake

TOKENS = ("tests/loss/test_tokens.py",)
DISTILLED = ("tests/loss/test_distillation.py",)
STEPS = ("tests/step/test_losses_of_tokens.py",)

MISTAKES = [
    Mistake(
        "losses of tokens aligned with positions and not with labels",
        "loss/tokens.py",
        "    if not is_shifted(batch):\n        values",
        "    if is_shifted(batch):\n        values",
        TOKENS,
    ),
    Mistake(
        "the gradient of a frozen head's losses forgets their weights",
        "loss/linear_token_losses.py",
        "factor = (grad_output[0] * (scale / ctx.gain)).unsqueeze(1)",
        "factor = (grad_output[0].abs() * (scale / ctx.gain)).unsqueeze(1)",
        TOKENS,
    ),
    Mistake(
        "an entropy's gradient without the entropy",
        "loss/linear_token_losses.py",
        "logits.mul_(logs.add_(entropies).mul_(-own[1]).add_(own[0]))",
        "logits.mul_(logs.mul_(-own[1]).add_(own[0]))",
        TOKENS,
    ),
    Mistake(
        "the teacher's probabilities are not divided by the temperature",
        "loss/linear_divergence.py",
        "p = torch.log_softmax(teacher.to(q.dtype).div_(self.temperature), -1)",
        "p = torch.log_softmax(teacher.to(q.dtype), -1)",
        DISTILLED,
    ),
    Mistake(
        "the reverse divergence's gradient without the divergence",
        "loss/linear_divergence.py",
        "student.mul_(ratio.sub_(divergence))",
        "student.mul_(ratio)",
        DISTILLED,
    ),
    Mistake(
        "a loss of whole rows counts once for each rank that shares them",
        "step/own_loss.py",
        "            summed = summed / group.size\n",
        "",
        STEPS,
    ),
    Mistake(
        "targets of whole rows counted by each rank that shares them",
        "step/own_loss.py",
        "count = count if once or not whole else 0",
        "count = count",
        STEPS,
    ),
    Mistake(
        "the loss of a part taken for that of whole rows",
        "loss/causal.py",
        "    refuse_part_in_whole(group)\n",
        "",
        STEPS,
    ),
    Mistake(
        "metrics of the last batch alone",
        "step/own_metrics.py",
        "self._sums[name] = self._sums[name] + value if name in self._sums else value",
        "self._sums[name] = value",
        STEPS,
    ),
]
