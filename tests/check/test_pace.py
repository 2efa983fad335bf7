"""Which ranks are slow, by the means of their trials and by their fastest calls."""

from unittest import mock

import pytest

from fsdp_sft.check import pace
from tests.harness.clusters import cluster_of


@pytest.mark.parametrize(
    ("means", "bests", "slow", "trials"),
    [
        ((9.0, 10.0, 8.0), (9.0, 10.0, 8.0), [], 1),
        ((10.0, 5.0, 10.0), (10.0, 10.0, 10.0), [1], 7),  # held back
        ((5.0, 5.0, 4.0), (10.0, 4.9, 10.0), [1], 7),  # something else runs on all
        ((10.0, 6.5, 10.0), (10.0, 10.0, 10.0), [], 7),  # in doubt to the end, and not named
        ((10.0, 4.0), (10.0, 4.0), [1], 7),
    ],
)
def test_a_rank_is_slow_by_its_mean_or_at_its_best(
    means: tuple[float, ...], bests: tuple[float, ...], slow: list[int], trials: int
) -> None:
    cluster = cluster_of(*["a"] * len(means))
    everyone = mock.patch.object(
        pace, "all_gather_objects", return_value=list(zip(means, bests, strict=True))
    )
    turns = mock.patch.object(pace, "in_turns", return_value=pace._Timed(10, 1.0, 0.1))
    with everyone, turns as measured:
        rates, found = pace.slow_ranks(cluster, lambda: None, 1.0, "timing", at_least=0.1, warns=0.95)
    assert rates == list(means)
    assert [one.rank for one in found] == slow
    assert measured.call_count == trials * 3


def test_the_median_of_trials_counts_and_the_fastest_call_of_all() -> None:
    trials = [pace._Timed(10, 1.0, 0.05), pace._Timed(10, 100.0, 0.1), pace._Timed(10, 2.0, 0.02)]
    with (
        mock.patch.object(pace, "_TRIALS_SHARED", 3),
        mock.patch.object(pace, "in_turns", side_effect=[one for one in trials for _ in range(3)]),
        mock.patch.object(pace, "all_gather_objects", side_effect=lambda own: [own, (1e9, 1e9)]) as gathered,
    ):
        pace.slow_ranks(cluster_of("a", "a"), lambda: None, 1.0, "timing", at_least=0.1, warns=0.95)
    told = [call.args[0] for call in gathered.call_args_list]
    assert told[-1] == (5.0, pytest.approx(50.0))
    assert told[0] == (10.0, pytest.approx(20.0))
