"""Mistakes of a caller that are told or refused, made silent again."""

from tests.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "a pass goes on although its sampler was moved",
        "step/loader.py",
        "            if moved and window:",
        "            if False:",
        ("tests/step/test_batches.py",),
    ),
    Mistake(
        "nothing is said of parameters without an optimizer",
        "step/checks.py",
        "    if left_out and first_time(",
        "    if False and first_time(",
        ("tests/test_mistakes.py",),
    ),
    Mistake(
        "labels of padding are trained without a word",
        "step/checks.py",
        "    if padding and this_rank() == 0:",
        "    if False:",
        ("tests/test_mistakes.py",),
    ),
    Mistake(
        "a model left in eval mode is trained without a word",
        "step/checks.py",
        "    if not model.training and first_time(",
        "    if False and first_time(",
        ("tests/test_mistakes.py",),
    ),
    Mistake(
        "an optimizer that was left behind begins anew without a word",
        "dcp_io/checkpoint.py",
        "LoadedStep(manifest.step, has_loaded)",
        "LoadedStep(manifest.step, None)",
        ("tests/test_mistakes.py",),
    ),
    Mistake(
        "a step without gradients ends in what torch says",
        "step/checks.py",
        "    if not torch.is_grad_enabled():",
        "    if False:",
        ("tests/test_mistakes.py",),
    ),
    Mistake(
        "the home folder is a folder of that name",
        "_tensors/disk.py",
        "Path(path).expanduser().absolute()",
        "Path(path).absolute()",
        ("tests/test_mistakes.py",),
    ),
    Mistake(
        "a word of another library is like any other unknown one",
        "_process/words.py",
        "kwargs.keys() - known.keys()",
        "()",
        ("tests/process/test_words.py",),
    ),
]
