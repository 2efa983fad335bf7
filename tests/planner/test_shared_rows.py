"""Plans in which ranks share rows: their memory, when they are chosen, how long a row fits."""

from typing import Any

import pytest

from fsdp_sft import NoPlanError, Run, estimate_memory, plan_run
from tests.planner.families import QWEN_14B

LONG = {"num_gpus": 16, "micro_batch_size": 1, "seq_length": 32768, "attention_mask": False}


@pytest.mark.parametrize("options", [{}, {"sac_ratio": 1}, {"compile": True}, {"loss_impl": "logits"}])
def test_more_ranks_to_a_row_never_need_more(options: dict[str, Any]) -> None:
    found = {cp: estimate_memory(QWEN_14B, Run(**LONG, cp=cp, **options)) for cp in (1, 2, 4, 8)}
    peaks = [estimate.peak_bytes for estimate in found.values()]
    assert peaks == sorted(peaks, reverse=True)
    # What is exchanged is kept by nobody: a rank keeps its part of what one process would, or a little more.
    kept = [cp * estimate.activation_bytes / found[1].activation_bytes for cp, estimate in found.items()]
    assert 0.95 < min(kept) <= max(kept) <= 1.01


def test_rows_that_ranks_do_not_divide_are_filled_up() -> None:
    options = {**LONG, "cp": 8, "attention_mask": True}
    uneven, filled = (estimate_memory(QWEN_14B, Run(**{**options, "seq_length": n})) for n in (4089, 4096))
    assert uneven.peak_bytes == filled.peak_bytes


def test_a_row_that_does_not_fit_alone_is_shared() -> None:
    options: dict[str, Any] = {"num_gpus": 8, "gpu_memory_bytes": 76 * 10**9, "seq_length": 131072}
    options |= {"attention_mask": False, "compile": False}
    with pytest.raises(NoPlanError, match=r"What would fit: --cp 8;"):
        plan_run(QWEN_14B, **options, global_batch_size=8)
    plans = plan_run(QWEN_14B, **options, global_batch_size=8, cp=4)
    assert {(plan.run.cp, plan.run.micro_batch_size * plan.run.grad_accum_steps) for plan in plans} == {
        (4, 4)
    }
    assert plans[0].time.exchange > 0
    assert any("exchanges of 4 GPUs take" in text for text in plans[0].reasons)
    with pytest.raises(ValueError, match=r"no multiple of 2 groups of 4 GPUs.*4 would be"):
        plan_run(QWEN_14B, **options, global_batch_size=3, cp=4)
    with pytest.raises(NoPlanError, match="nothing fits on 8"):
        plan_run(QWEN_14B, **{**options, "seq_length": 1 << 20}, global_batch_size=8, cp=8)
