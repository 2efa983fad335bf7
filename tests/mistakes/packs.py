"""Mistakes in packs, and in attention by rows."""

from tests.mistakes.mistake import Mistake

HYBRID = ("tests/attention/test_hybrid.py",)

MISTAKES = [
    Mistake(
        "a packed row predicts the first token of the next",
        "sampling/collator.py",
        "chain.from_iterable([IGNORE_INDEX, *chat.labels[1:]] for chat in chats)",
        "chain.from_iterable(chat.labels for chat in chats)",
        ("tests/sampling/packing/test_packs.py",),
    ),
    Mistake(
        "positions that run on over packed rows",
        "sampling/collator.py",
        "torch.cat([torch.arange(size) for size in [*lengths, length - total]])",
        "torch.arange(length)",
        ("tests/sampling/packing/test_packs.py",),
    ),
    Mistake(
        "rows read off a mask that is not by rows",
        "attention/varlen/attention.py",
        "if not bool(told):",
        "if False:",
        ("tests/attention/varlen/test_varlen.py",),
    ),
    Mistake(
        "attention over the rows of a pack",
        "attention/varlen/attention.py",
        "bounds = [*edges.nonzero().squeeze(1).tolist(), begins.numel()]",
        "bounds = [0, begins.numel()]",
        ("tests/attention/varlen/test_varlen.py",),
    ),
    Mistake(
        "a sliding window forgotten, row by row",
        "attention/varlen/attention.py",
        "if length > rows.sliding_window:",
        "if False:",
        ("tests/attention/varlen/test_varlen.py",),
    ),
    Mistake(
        "a sliding window of one key more, in the kernel",
        "attention/varlen/attention.py",
        "rows.sliding_window - 1, 0)",
        "rows.sliding_window, 0)",
        ("tests/attention/varlen/test_varlen.py",),
    ),
    Mistake(
        "recurrences run on over the rows of a pack",
        "attention/hybrid.py",
        "    if not begins.any():\n",
        "    if True:\n",
        HYBRID,
    ),
    Mistake(
        "a layer that calls an unknown function taken for one that keeps rows apart",
        "attention/hybrid.py",
        "if called - _ALONG_TIME.keys() - _ONE_TOKEN or",
        "if False or",
        HYBRID,
    ),
    Mistake(
        "a layer that convolves by itself taken for one that keeps rows apart",
        "attention/hybrid.py",
        "(convolves and called.isdisjoint(_ALONG_TIME))",
        "False",
        HYBRID,
    ),
    Mistake(
        "a kernel that takes boundaries gets none",
        "attention/hybrid.py",
        'kwargs.setdefault("cu_seqlens", kwargs.get("cu_seq_lens_q"))',
        "kwargs = {k: v for k, v in kwargs.items() if k not in _BOUNDARIES}",
        HYBRID,
    ),
    Mistake(
        "rows of two sequences of a batch that have one number are one row",
        "attention/hybrid.py",
        "for row in seq_idx for n in",
        "for row in seq_idx.view(1, -1) for n in",
        HYBRID,
    ),
]
