"""What parity takes for rounding, and what not."""

import pytest

from fsdp_sft.check.checks import parity

EXACT = [(4.0, 4.0), (4.0, 3.0)]


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        ([(4.001, 4.1), (4.001, 3.1)], []),  # the other step of one process is as far off
        ([(4.1, 4.0), (4.0, 3.0)], ["loss 4.1, 4.002 in one process (bfloat16) and 4 in float32"]),
        ([(4.0, 4.0), (4.0, 2.0)], ["gradient norm 2, 3 in one process (bfloat16) and 3 in float32"]),
        ([(4.0, float("nan")), (4.0, 3.0)], ["gradient norm nan, 4.08"]),
    ],
)
def test_rounding_is_what_one_process_has(ours: list[tuple[float, float]], says: list[str]) -> None:
    found = parity._judge_rounded(ours, EXACT, [(4.002, 4.08), (4.002, 3.0)])
    assert len(found) == len(says)
    for one, text in zip(found, says, strict=True):
        assert text in one.text
