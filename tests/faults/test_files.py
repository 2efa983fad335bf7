"""Files changed at random, in small numbers; `python -m tests.faults --mutations 10000` is the whole."""

from pathlib import Path

from tests.faults.mutated import READERS, is_bad, run_trials
from tests.harness.ranks import run_distributed


def test_a_changed_file_is_refused_or_read_as_written(tmp_path: Path) -> None:
    (results,) = run_distributed(run_trials, 1, 25, 7, str(tmp_path))
    assert [(name, outcome) for name, outcome, *_ in results if is_bad(name, outcome)] == []
    assert {name for name, *_ in results} == set(READERS)
    assert sum(outcome == "refused" for _, outcome, *_ in results) > 120, "the changes do no harm"
