#!/usr/bin/env bash
# torch 2.13.0, DataLoader; 2.15.0 does the same.
#
# One would expect: a loader without shuffle=True has nothing random, so that reading a validation set between two epochs
#   changes nothing of the training: torch.manual_seed(0) at the start fixes the order of its epochs.
# What happens: each iterator of any DataLoader, shuffled or not, with workers or without, draws a seed for workers from the
#   default generator, from which shuffle=True takes the order of its next epoch too. A run that evaluates sees other orders
#   from the second epoch on than one that does not, as does one that evaluates more often; on a CPU dropout changes as well.
#   With generator=torch.Generator() given to the validation loader, or to the training's, the orders are the same.
# Who is hit: comparisons of "the same seed" in which one run evaluates; a resume that leaves the evaluation out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy 2>/dev/null
cat > "$folder/program.py" <<'PY'
import sys

import torch
from torch.utils.data import DataLoader


def orders(evaluations, **options):
    """The orders of three epochs, with so many passes over a validation set after each."""
    torch.manual_seed(0)
    training, validation, seen = DataLoader(range(8), shuffle=True), DataLoader(range(4), **options), []
    for _ in range(3):
        seen.append([int(row) for row in training])
        for _ in range(evaluations):
            assert [int(row) for row in validation] == [0, 1, 2, 3]
    return seen


print("torch", torch.__version__)
without, once, twice = map(orders, range(3))
apart = orders(1, generator=torch.Generator())
for name, seen in (("none", without), ("one", once), ("two", twice), ("one, with its own generator", apart)):
    print(f"evaluations after each epoch: {name}: {seen}")
first = without[0] == once[0] == twice[0]
holds = first and without[1:] != once[1:] != twice[1:] and without == apart
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
"$folder/venv/bin/python" "$folder/program.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
