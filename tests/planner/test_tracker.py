"""estimate_memory against FSDPMemTracker, which runs the real step on fake tensors."""

import random
from typing import Any

import pytest
import torch

from fsdp_sft import Run, estimate_memory
from fsdp_sft._tensors.sharding import shard_dim
from tests.planner.families import FAMILIES, family_config
from tests.planner.tracker import counts_what_is_written_in_place, tracked_peak

PHASES = ("loss", "backward", "optimizer")
PER_PHASE = 14  # of each, 42 in all


def random_case(phase: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """A configuration whose peak ought to lie in ``phase``; the test says whether it does."""
    draw = random.Random(f"{phase} {seed}")
    family = FAMILIES[seed % len(FAMILIES)]
    loss_impl = draw.choice(("chunked", "logits", "plain"))
    options: dict[str, Any] = {
        "loss_impl": loss_impl,
        "attention_mask": draw.random() < 0.5,
        "sac_ratio": draw.choice(("0", "1/4", "1/3", "1/2", "2/3", "1")),
        "sac_placement": draw.choice(("even", "prefix")),
        "grad_accum_steps": draw.choice((1, 1, 2, 3)),
        "master_dtype": draw.choice((torch.float32, torch.float32, torch.bfloat16)),
    }
    if phase == "loss":
        options |= {"num_gpus": draw.choice((2, 8, 32, 256)), "micro_batch_size": 2, "seq_length": 512}
        options["sac_ratio"] = draw.choice(("0", "1/3", "1/2"))
        config = family_config(
            family, draw, vocab=draw.choice((8192, 32000)), hidden=512, layers=draw.choice((6, 8))
        )
    elif phase == "backward":
        options |= {"num_gpus": draw.choice((2, 4, 16, 64)), "micro_batch_size": 1, "seq_length": 256}
        options["sac_ratio"] = draw.choice(("2/3", "1"))
        config = family_config(
            family, draw, vocab=512, hidden=draw.choice((512, 1024)), layers=draw.choice((2, 4))
        )
    else:  # short batches of a deep model in few shards: the optimizer's buffers are the largest thing
        options |= {"num_gpus": draw.choice((2, 4)), "micro_batch_size": 1, "seq_length": 32}
        options |= {"optimizer": "adamw_foreach", "master_dtype": torch.float32}
        options["loss_impl"] = "logits"
        config = family_config(family, draw, vocab=128, hidden=256, layers=14)
    if draw.random() < 0.25 and options["num_gpus"] >= 4:
        options["dp_replicate"] = 2
    return config, options


def _compare(phase: str, seed: int) -> tuple[float, str, str]:
    config, options = random_case(phase, seed)
    peak, where = tracked_peak(config, **options)
    plain = options["loss_impl"] == "plain"
    loss = {"loss_impl": "logits"} if plain else {"logits_dtype": torch.float32}
    found = estimate_memory(config, Run(gpu="cpu", **{**options, **loss}))
    print(
        f"{phase} {seed} {config.model_type} {options}: {peak} {where}, {found.peak_bytes} {found.peak_phase}"
    )
    return found.peak_bytes / peak - 1, where, found.peak_phase


@pytest.mark.parametrize(("phase", "seed"), [(phase, seed) for phase in PHASES for seed in (0, 1)])
def test_the_estimate_is_what_the_tracker_sees(phase: str, seed: int) -> None:
    if phase == "optimizer" and counts_what_is_written_in_place():
        pytest.skip("this torch's tracker counts in-place foreach operations on DTensors as new memory")
    error, where, said = _compare(phase, seed)
    assert abs(error) <= 0.02, f"{error:+.2%}"
    assert said == where


def test_copies_of_parameters_cut_along_another_dimension_are_counted() -> None:
    config = family_config("mixtral", random.Random(3), vocab=512, hidden=512, layers=2)
    options: dict[str, Any] = {"num_gpus": 16, "micro_batch_size": 1, "seq_length": 64, "sac_ratio": "1"}
    peak, where = tracked_peak(config, attention_mask=False, **options)
    found = estimate_memory(
        config, Run(gpu="cpu", attention_mask=False, logits_dtype=torch.float32, **options)
    )
    assert shard_dim((4, 1024, 512), 16) == 1
    assert abs(found.peak_bytes / peak - 1) <= 0.005
    assert found.peak_phase == where


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_forty_random_configurations_with_their_peaks_in_all_phases() -> None:
    errors, phases, wrong = [], [], []
    if counts_what_is_written_in_place():
        pytest.skip("this torch's tracker counts in-place foreach operations on DTensors as new memory")
    for phase in PHASES:
        for seed in range(PER_PHASE):
            error, where, said = _compare(phase, seed)
            errors.append(error)
            phases.append(where)
            if abs(error) > 0.02 or (said != where and abs(error) > 1e-3):
                wrong.append((phase, seed, f"{error:+.2%}", where, said))
    counts = {phase: phases.count(phase) for phase in PHASES}
    print(f"{len(errors)} configurations, peaks in {counts}, largest error {max(map(abs, errors)):.3%}")
    assert not wrong, wrong
    assert min(counts.values()) >= 8, counts
