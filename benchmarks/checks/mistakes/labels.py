"""Mistakes in labels, and in how the loss of a window weighs its tokens."""

from benchmarks.checks.mistakes.mistake import Mistake

ATTENTION_MASK = '"attention_mask": self._pad([ones * len(chat.input_ids) for chat in chats], length, 0),'
LABELS = '"labels": self._pad([chat.labels for chat in chats], length, IGNORE_INDEX),'
MISTAKES = [
    Mistake(
        "labels are the attention mask",
        "collate/collator.py",
        f"{ATTENTION_MASK}\n            {LABELS}",
        LABELS.replace('"labels"', '"attention_mask"')
        + ATTENTION_MASK.replace('"attention_mask"', '"labels"'),
        ("tests/collate/test_collator.py",),
    ),
    Mistake(
        "labels are the ids",
        "collate/collator.py",
        LABELS,
        '"labels": self._pad([chat.input_ids for chat in chats], length, IGNORE_INDEX),',
        ("tests/collate/test_collator.py",),
    ),
    Mistake(
        "padding told by token id",
        "collate/collator.py",
        ATTENTION_MASK,
        '"attention_mask": self._pad([c.input_ids for c in chats], length, 0).ne(pad_token_id) * 1,',
        ("tests/collate/test_collator.py",),
    ),
    Mistake(
        "the shift made twice",
        "loss/counting.py",
        "return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)",
        "return F.pad(labels[:, 2:], (0, 2), value=IGNORE_INDEX)",
        ("tests/loss/test_loss.py",),
    ),
    Mistake(
        "the shift not made",
        "loss/counting.py",
        "return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)",
        "return labels",
        ("tests/loss/test_loss.py",),
    ),
    Mistake(
        "the shift made twice, with full logits",
        "loss/causal.py",
        "_cross_entropy_sum(logits[:, :-1], targets[:, :-1])",
        "_cross_entropy_sum(logits[:, :-2], targets[:, 1:-1])",
        ("tests/test_parity.py", "tests/loss/test_loss.py"),
    ),
    Mistake(
        "divided by the world size",
        "loss/counting.py",
        "return loss * (ranks / num_targets)",
        "return loss / num_targets",
        ("tests/test_parity.py",),
    ),
    Mistake(
        "a mean of each rank's own mean",
        "loss/counting.py",
        "        return int(all_reduce_sum([own])[0])",
        "        return max(own, 1) * (dist.get_world_size() if dist.is_initialized() else 1)",
        ("tests/test_parity.py", "tests/test_step.py"),
    ),
    Mistake(
        "targets counted before the shift",
        "loss/counting.py",
        "int((targets_of(batch) != IGNORE_INDEX).sum())",
        'int((batch["labels"] != IGNORE_INDEX).sum())',
        ("tests/loss/test_loss.py",),
    ),
]
