"""Mistakes in labels, and in how the loss of a window weighs its tokens."""

from benchmarks.checks.mistakes.mistake import Mistake

ATTENTION_MASK = '"attention_mask": self._pad([ones * len(chat.input_ids) for chat in chats], length, 0),'
LABELS = '"labels": self._pad([chat.labels for chat in chats], length, IGNORE_INDEX),'
MISTAKES = [
    Mistake(
        "tokens that do not spell the text are taken for ones that do",
        "collate/tokens.py",
        'if b"".join(pieces) == text.encode() else None',
        "if True else None",
        ("tests/collate/test_tokens.py",),
    ),
    Mistake(
        "a backend that cuts texts off is asked as it stands",
        "_compat.py",
        "backend.truncation is None",
        "True",
        ("tests/collate/test_tokens.py",),
    ),
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
        "logits, targets = logits[:, :-1], targets[:, :-1]",
        "logits, targets = logits[:, :-2], targets[:, 1:-1]",
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
        "        targets, tokens, weight = all_reduce_sum(own)",
        "        targets, tokens, weight = (max(one, 1) * world_size() for one in own)",
        ("tests/test_parity.py", "tests/test_step.py"),
    ),
    Mistake(
        "targets counted before the shift",
        "loss/counting.py",
        "int((targets_of(batch) != IGNORE_INDEX).sum())",
        'int((batch["labels"] != IGNORE_INDEX).sum())',
        ("tests/loss/test_loss.py",),
    ),
    Mistake(
        "a reasoning that the template drops is taken for printed",
        "collate/layout.py",
        "            if leaf.message in wanted and number not in printed:",
        "            if leaf.in_call and leaf.message in wanted and number not in printed:",
        ("tests/collate/test_dropped.py",),
    ),
    Mistake(
        "nulls of a JSON row are stripped",
        "collate/nulls.py",
        "    if any(len({frozenset(item) for item in group}) > 1 for group in groups):",
        "    if False:",
        ("tests/collate/test_nulls.py",),
    ),
    Mistake(
        "an end of turn that is no token is not trained",
        "collate/template.py",
        "            first = end_of_turn = text",
        "            pass",
        ("tests/collate/test_end_of_turn.py",),
    ),
    Mistake(
        "an answer ends at the first of two closing tokens",
        "collate/template.py",
        "        is_later = eos and (eos in of_every_turn or (run is not None and eos in run[0]))",
        "        is_later = False",
        ("tests/collate/test_end_of_turn.py",),
    ),
    Mistake(
        "half a tag is a header",
        "collate/template.py",
        "            length = at\n",
        "            pass\n",
        ("tests/collate/test_end_of_turn.py",),
    ),
    Mistake(
        "the template is probed without the row's variables",
        "collate/encode.py",
        "    kwargs = {**(options.chat_template_kwargs or {}), **conversation.template_kwargs}",
        "    kwargs = dict(options.chat_template_kwargs or {})",
        ("tests/collate/test_template_kwargs.py",),
    ),
    Mistake(
        "the number of a later turn is trained",
        "collate/spans.py",
        'is_numbered = self.facts.prompt_varies and message["role"] == "assistant"',
        "is_numbered = False",
        ("tests/collate/test_end_of_turn.py::test_headers_that_number_the_turns",),
    ),
    Mistake(
        "a header that a token shares with the answer is not noted",
        "collate/tokens.py",
        "return index < tokens.first_from(position) and not tokens.is_added(index)",
        "return False",
        ("tests/collate/test_end_of_turn.py::test_a_header_that_ends_with_a_space_is_noted",),
    ),
    Mistake(
        "half of the tag that ends an answer",
        "collate/template.py",
        "return length + closed.end() if opened and closed else length",
        "return length",
        ("tests/collate/test_end_of_turn.py",),
    ),
]
