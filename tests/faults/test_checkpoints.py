"""A small version of ``python -m tests.faults``: kills, flipped bits, a stopped rank, hostile checkpoints."""

from collections import Counter
from pathlib import Path

import pytest

from tests.faults import damage, disks, hostile, jobs, kills
from tests.faults.kills import is_bad
from tests.harness.ranks import run_distributed


@pytest.mark.parametrize("point", list(kills.POINTS))
def test_a_kill_at_a_named_moment(point: str, tmp_path: Path) -> None:
    index = list(kills.POINTS).index(point)
    trials = [trial for trial in kills.point_trials() if trial.point == point]
    outcome = kills.run_trial(trials[index % len(trials)], tmp_path)
    assert not is_bad(outcome), outcome
    assert outcome.inside
    assert outcome.loaded == ((3, 0) if point in ("after rename", "mid-prune") else (2, 0)), outcome


def test_a_kill_while_exporting(tmp_path: Path) -> None:
    assert kills.run_export_trial(tmp_path, everyone=True) == "exact"


def test_kills_at_random_moments(tmp_path: Path) -> None:
    for trial in list(kills.random_trials(16, seed=3))[::3]:
        outcome = kills.run_trial(trial, tmp_path)
        assert not is_bad(outcome), (trial, outcome)


def test_flipped_bits_never_load(tmp_path: Path) -> None:
    run_distributed(damage.save, 2, str(tmp_path))
    silent, touched, kinds = run_distributed(damage.flip_jobs, 2, str(tmp_path), 60)[0]
    assert (silent, touched, kinds.total()) == (0, 0, 60)


@pytest.mark.slow
def test_damaged_files_never_load(tmp_path: Path) -> None:
    results = damage.damage(tmp_path)
    assert [result for result in results if result[2] not in ("refused", "exact")] == []


@pytest.mark.parametrize("async_", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stopped_rank_ends_the_save_on_all_ranks(async_: bool, tmp_path: Path) -> None:
    ((_, _, raised, fine),) = disks.stopped(tmp_path, async_=async_)
    assert fine, raised


def test_hostile_checkpoints_are_refused(tmp_path: Path) -> None:
    results = run_distributed(hostile.run_attacks, 1, str(tmp_path), large=False)[0]
    assert len(results) > 25
    assert Counter(verdict for _, verdict, _, _ in results) == {"refused": len(results)}, results
    assert max(grown for *_, grown in results) < 200e6, results


def test_two_jobs_below_one_root(tmp_path: Path) -> None:
    for kill_after in (None, 0.05, 0.2):
        outcomes, wrong = jobs.two_jobs(tmp_path / str(kill_after), kill_after)
        assert not wrong, (outcomes, wrong)
