"""Mistakes in losses of one's own: of tokens, with metrics and weights."""

from tests.mistakes.mistake import Mistake

TOKENS = ("tests/loss/test_loss.py",)
STEPS = ("tests/step/test_own_loss.py",)

MISTAKES = [
    Mistake(
        "losses of tokens aligned with positions and not with labels",
        "loss/causal.py",
        "return values if is_shifted(batch) else",
        "return values if not is_shifted(batch) else",
        TOKENS,
    ),
    Mistake(
        "the gradient of a frozen head's losses forgets their weights",
        "loss/linear.py",
        "grad_output.reshape(-1, 1) if grad_output.ndim else",
        "grad_output.abs().reshape(-1, 1) if grad_output.ndim else",
        TOKENS,
    ),
    Mistake(
        "a loss of whole rows counts once for each rank that shares them",
        "step/objective.py",
        "summed = rows.share(loss.reshape(()))",
        "summed = loss.reshape(())",
        STEPS,
    ),
    Mistake(
        "targets of whole rows counted by each rank that shares them",
        "step/window.py",
        "targets = targets if first or objective.knows_accuracy else 0.0",
        "targets = targets",
        STEPS,
    ),
    Mistake(
        "a loss_sum of a part taken for that of whole rows",
        "loss/causal.py",
        "    if OF_WHOLE_ROWS.get():",
        "    if False:",
        STEPS,
    ),
    Mistake(
        "metrics of the last batch alone",
        "step/objective.py",
        "self.metrics[name] = self.metrics[name] + value if name in self.metrics else value",
        "self.metrics[name] = value",
        STEPS,
    ),
]
