"""Mistakes in the step, the losses that a model adds, and several optimizers."""

from benchmarks.checks.mistakes.mistake import Mistake

MISTAKES: list[Mistake] = [
    Mistake(
        "the keys of batches not compared between ranks",
        "step/window.py",
        "compared = to_compare([len(keys), *digest(keys)])",
        "compared = to_compare([len(keys), *digest(len(keys))])",
        ("tests/step/test_keys.py",),
    ),
    Mistake(
        "a rank that has run out stands in with what it had last",
        "step/rounds.py",
        "if not are_equal(everyone, ranks):",
        "if not are_equal(everyone, ranks) and not stand_ins:",
        ("tests/step/test_keys.py",),
    ),
    Mistake(
        "a count of the caller's own left aside",
        "step/window.py",
        "counts = [counted(batch, count_fn) for batch in counted_ones]",
        "counts = [counted(batch, None) for batch in micro_batches]",
        ("tests/step/test_own_loss.py",),
    ),
    Mistake(
        "labels read where a batch has its targets",
        "loss/counting.py",
        'return isinstance(batch, Mapping) and batch.get("shift_labels") is not None',
        'return isinstance(batch, Mapping) and batch.get("labels") is None',
        ("tests/step/test_own_loss.py",),
    ),
    Mistake(
        "a router's loss computed by the model and dropped",
        "loss/additions.py",
        "return self.router.read() * aux",
        "return None",
        ("tests/loss/test_own.py",),
    ),
    Mistake(
        "every micro-batch of the router weighs the same",
        "step/train.py",
        "router = router * (tokens_of(seen, needs_ids=False) / max(tokens, 1) * weight)",
        "router = router * (weight / len(micro_batches) / (mesh.size() if mesh else 1))",
        ("tests/loss/test_own.py",),
    ),
    Mistake(
        "a model's own loss not compared",
        "loss/own.py",
        "if self.near(float(self.loss), self.expected):",
        "if True:",
        ("tests/loss/test_own.py",),
    ),
    Mistake(
        "labels that are shifted already not looked for",
        "step/labels.py",
        'meant, mistaken = (own, following) if name == "labels" else (following, own)',
        "meant, mistaken = following, own",
        ("tests/step/test_labels.py",),
    ),
    Mistake(
        "one verdict on labels for each micro-batch alone",
        "step/labels.py",
        "    if wrong + right < _FEWEST or wrong <= _SHARE * (wrong + right):",
        "    if (wrong + right) / max(len(batches), 1) < _FEWEST or wrong <= _SHARE * (wrong + right):",
        ("tests/step/test_labels.py",),
    ),
    Mistake(
        "a loss_fn that returns a mean is divided once more",
        "step/summed.py",
        "    if means and not sums:\n",
        "    if False:\n",
        ("tests/step/test_own_loss.py",),
    ),
    Mistake(
        "a pack with a mask is let through where the loss is the caller's",
        "step/acceptable.py",
        'knows_packs = not own_loss or attention_of(unwrapped(model)) != "its own"',
        "knows_packs = not own_loss",
        ("tests/compositions/test_compositions.py::test_a_composition_is_refused",),
    ),
    Mistake(
        "a look of the watchdog takes the square of the ranks",
        "watchdog/judge.py",
        "            if longest > beat.limit:\n",
        "            if max(allowed, default=0.0) > beat.limit:\n",
        ("tests/watchdog/test_watch.py",),
    ),
]
