"""Well-known mistakes of fine-tuning code, made one at a time in a copy of the library: do the tests notice?

    python -m benchmarks.checks.mutations

Each mistake is a change of one line in a copy of ``src``, against which the tests beside it are run. One
that leaves them green is reported, and the exit code is its number of such mistakes. Two of them were made in
print: labels that were the attention mask, and a loss divided by the world size under FSDP2.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mistake:
    """``old`` in a file becomes ``new``; at least one of the tests has to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


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
        "_cross_entropy_sum(logits[:, :-1], labels[:, 1:])",
        "_cross_entropy_sum(logits[:, :-2], labels[:, 2:])",
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
        "checked_labels(batch)[:, 1:] != IGNORE_INDEX",
        "checked_labels(batch) != IGNORE_INDEX",
        ("tests/loss/test_loss.py",),
    ),
    Mistake(
        "a packed row predicts the first token of the next",
        "packing/collator.py",
        "labels += [IGNORE_INDEX, *row_labels[1:]]",
        "labels += row_labels",
        ("tests/packing/test_packs.py",),
    ),
    Mistake(
        "positions that run on over packed rows",
        "packing/collator.py",
        "position_ids += range(len(ids))",
        "position_ids += range(len(position_ids), len(position_ids) + len(ids))",
        ("tests/packing/test_packs.py",),
    ),
    Mistake(
        "rows read off a mask that is not by rows",
        "varlen/rows.py",
        "if not bool(torch.stack(exact).all()):",
        "if False:",
        ("tests/varlen/test_varlen.py",),
    ),
    Mistake(
        "attention over the rows of a pack",
        "varlen/rows.py",
        "bounds = [*begins.flatten().nonzero().squeeze(1).tolist(), begins.numel()]",
        "bounds = [0, begins.numel()]",
        ("tests/varlen/test_varlen.py",),
    ),
    Mistake(
        "a sliding window forgotten, row by row",
        "varlen/attention.py",
        "if length > rows.window:",
        "if False:",
        ("tests/varlen/test_varlen.py",),
    ),
    Mistake(
        "a sliding window of one key more, in the kernel",
        "varlen/attention.py",
        "rows.window - 1, 0)",
        "rows.window, 0)",
        ("tests/varlen/test_varlen.py",),
    ),
]


def is_noticed(mistake: Mistake) -> bool:
    """Whether the tests fail; that the change was made and the library still imports is seen to first."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        path = copy / "fsdp_sft" / mistake.file
        text = path.read_text()
        if text.count(mistake.old) != 1:
            raise SystemExit(f"{mistake.name}: {mistake.file} has changed; bring this script up to date")
        path.write_text(text.replace(mistake.old, mistake.new))
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        where = "import fsdp_sft, pathlib; print(pathlib.Path(fsdp_sft.__file__).parent.parent)"
        found = subprocess.run(
            [sys.executable, "-c", where], env=environment, capture_output=True, text=True, check=True
        )
        assert Path(found.stdout.strip()).samefile(copy), "the copy is not what is imported"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mistake.tests]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{mistake.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        print(f"{mistake.name}: {failed[0][7:100] if failed else 'NOT NOTICED'}", flush=True)
        return done.returncode == 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="mistakes whose name has this in it")
    options = parser.parse_args()
    chosen = [mistake for mistake in MISTAKES if (options.only or "") in mistake.name]
    missed = sum(not is_noticed(mistake) for mistake in chosen)
    print(f"{len(chosen) - missed} of {len(chosen)} mistakes are noticed")
    raise SystemExit(missed)


if __name__ == "__main__":
    main()
