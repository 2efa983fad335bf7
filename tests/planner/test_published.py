"""The planner beside what others have published; benchmarks.published.compare writes the whole page."""

import statistics

import pytest

from benchmarks.published.compare import memory_rows, speed_rows
from benchmarks.published.evidence import FITS, SPEEDS
from fsdp_sft.planner.speed import step_time


def test_every_row_says_where_it_is_from() -> None:
    for row in (*FITS, *SPEEDS):
        assert row["source"].startswith("https://"), row
        assert row["quote"], row


@pytest.mark.slow
def test_most_answers_are_right() -> None:
    judged = [one for one in memory_rows() if "fits" in one]
    right = [one for one in judged if one["fits"] == one["row"]["answer"]]
    assert len(judged) >= 60
    assert len(right) >= 55
    plain = [
        one["peak"] / 2**30 / one["row"]["measured_gib"] - 1
        for one in judged
        if one["row"]["repo"] == "Lightning-AI/lightning-thunder" and one["row"]["measured_gib"]
    ]
    assert statistics.mean(map(abs, plain)) < 0.05


@pytest.mark.slow
def test_speeds_are_near() -> None:
    errors = []
    for row, setup, skeleton in speed_rows():
        tokens = setup.micro_batch_size * setup.seq_length / step_time(skeleton, setup).total
        errors.append(abs(tokens / row["tokens_per_second_per_gpu"] - 1))
    assert statistics.median(errors) < 0.15
