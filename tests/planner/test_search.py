"""Plans: they fit, the fastest first, on GPUs by name; the command line that prints them."""

import random
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, Qwen3VLMoeConfig

from fsdp_sft import NoPlanError, Run, estimate_memory, plan_run
from fsdp_sft._process.gpus import GIB, MIB, gpu_named
from fsdp_sft.commands import main
from fsdp_sft.planner.command import plan_table
from fsdp_sft.planner.estimate import budget_of
from tests.planner.families import LLAMA_8B, QWEN_14B, QWEN_72B, SHAPES, TINY, qwen

SMALL_JOB: dict[str, Any] = {"num_gpus": 2, "seq_length": 64, "global_batch_size": 4, "gpu": "h100"}
MIXTURE = MixtralConfig(
    vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=8,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_more_memory_never_gives_a_slower_plan(seed: int) -> None:
    draw = random.Random(seed)
    config, num_gpus = qwen(*draw.choice(SHAPES)), draw.choice((8, 16, 64))
    options = {
        "num_gpus": num_gpus,
        "seq_length": draw.choice((1024, 4096)),
        "global_batch_size": num_gpus * draw.choice((2, 4, 8)),
        "gpu": draw.choice(("a100", "h100")),
        "compile": draw.random() < 0.5,
    }
    seconds = []
    for memory in (24, 32, 40, 48, 64, 80, 96, 141, 192):
        try:
            seconds.append(plan_run(config, gpu_memory_bytes=memory * GIB, **options)[0].time.total)
        except NoPlanError:
            assert not seconds, f"a plan fits into less, but none into {memory} GiB"
    assert seconds
    assert seconds == sorted(seconds, reverse=True)


def test_plans_fit_and_are_sorted_by_speed() -> None:
    plans = plan_run(
        QWEN_14B, num_gpus=64, gpu_memory_bytes=80 * 10**9, seq_length=4096, global_batch_size=512
    )
    assert plans[0].relative_speed == 1.0
    assert plans == sorted(plans, key=lambda plan: (plan.is_tight, -plan.relative_speed))
    for plan in plans:
        assert plan.run.micro_batch_size * plan.run.grad_accum_steps * (64 // plan.run.cp) == 512
        assert estimate_memory(QWEN_14B, plan.run).peak_bytes == plan.peak_bytes <= 0.96 * 80 * 10**9
        assert plan.reasons


def test_a_larger_micro_batch_bought_with_checkpointing_is_not_faster_where_compute_binds() -> None:
    job = {"num_gpus": 8, "gpu_memory_bytes": 1000 * GIB, "seq_length": 4096, "global_batch_size": 64}
    large, small = (
        plan_run(QWEN_14B, **job, micro_batch_size=micro, sac_ratio=ratio)[0]
        for micro, ratio in ((8, 1), (2, 0))
    )
    assert large.time.total > small.time.total


def test_the_first_plan_leaves_a_margin_and_others_are_called_tight() -> None:
    """With 76.3 of 76.4 GiB at the peak, 15 GiB of that were an update that makes copies."""
    config = qwen(5120, 27648, 64, 40, 8)
    job = {"num_gpus": 8, "gpu": "h100", "global_batch_size": 64}
    first = plan_run(config, **job, seq_length=6144)[0]
    assert first.left_bytes >= 0.05 * first.usable_bytes
    assert (first.is_tight, first.run.optimizer) == (False, "adamw_fused")
    assert "fused=True" in first.code("m")
    plain = plan_run(config, **job, seq_length=6144, optimizer="adamw")
    assert "(tight)" in plan_table(plain)
    small = plan_run(qwen(3584, 18944, 28, 28, 4), **job, seq_length=4096)
    assert {plan.run.optimizer for plan in (*plain, *small)} == {"adamw"}
    tight = [plan for plan in small if plan.is_tight]
    assert tight == small[-len(tight) :]
    assert all(plan.time.total < small[0].time.total for plan in tight)


def test_where_nothing_fits_the_error_says_what_would() -> None:
    job: dict[str, Any] = {"gpu_memory_bytes": 80 * 10**9, "seq_length": 4096}
    with pytest.raises(NoPlanError, match=r"nothing fits on 8 x 74\.5 GiB") as caught:
        plan_run(QWEN_72B, num_gpus=8, global_batch_size=8, **job)
    advice = r"; num_gpus=(\d+) \(--gpus \1\), with a global batch that \1 divides; "
    (fewest,) = map(int, re.findall(advice, str(caught.value)))
    assert plan_run(QWEN_72B, num_gpus=fewest, global_batch_size=fewest, **job)
    with pytest.raises(NoPlanError):
        plan_run(QWEN_72B, num_gpus=fewest // 2, global_batch_size=64, **job)
    with pytest.raises(NoPlanError, match="What would fit: GPUs with "):
        plan_run(QWEN_72B, num_gpus=8, global_batch_size=8, **{**job, "gpu_memory_bytes": 1 << 28})


@pytest.mark.parametrize(
    ("option", "given", "leanest"),
    [
        ("micro_batch_size", {"micro_batch_size": 64}, "micro-batch 64, every block"),
        ("sac_ratio", {"sac_ratio": 0, "seq_length": 16384}, "micro-batch 1, 0 of the blocks"),
    ],
)
def test_what_would_fit_beside_what_is_given(option: str, given: dict[str, Any], leanest: str) -> None:
    job: dict[str, Any] = {"num_gpus": 8, "gpu": "h100", "seq_length": 4096, "global_batch_size": 512}
    with pytest.raises(NoPlanError, match=rf"(?s)\({leanest} .*What would fit: {option}=1 \(--"):
        plan_run(QWEN_14B, **{**job, **given})
    assert plan_run(QWEN_14B, **{**job, **given, option: 1})


def test_what_is_given_is_not_searched() -> None:
    given: dict[str, Any] = {
        "micro_batch_size": 2,
        "sac_ratio": Fraction(2, 3),
        "sac_placement": "prefix",
        "reshard_after_forward": True,
    }
    job = {"num_gpus": 64, "gpu_memory_bytes": 80 * 10**9, "seq_length": 4096, "global_batch_size": 256}
    run = plan_run(QWEN_14B, **job, **given)[0].run
    assert {name: getattr(run, name) for name in given} == given
    assert run.grad_accum_steps == 2


@pytest.mark.parametrize(
    ("num_gpus", "options", "error", "message"),
    [
        (64, {"global_batch_size": 100}, ValueError, "100 is no multiple of 64 GPUs.*128 would be"),
        (1, {"micro_batch_size": 3}, ValueError, "micro_batch_size 3 does not divide the 4 sequences"),
        (1, {"no_such_option": 3}, TypeError, "no_such_option"),
        (1, {"grad_accum_steps": 2}, TypeError, "grad_accum_steps"),
    ],
)
def test_plans_refuse_what_cannot_be(
    num_gpus: int, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    job = {"gpu_memory_bytes": 80 * GIB, "seq_length": 512, "global_batch_size": 4, **options}
    with pytest.raises(error, match=message):
        plan_run(TINY, num_gpus=num_gpus, **job)


# --- the command line -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    qwen(256, 512, 6, 4, 2, vocab_size=4096).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _arguments(folder: Path, *more: str) -> list[str]:
    job = "--gpus 8 --gpu h100 --seq 256 --global-batch 32"
    return ["plan", "--model", str(folder), *job.split(), *more]


def test_the_command_line_prints_plans_and_bars(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_arguments(folder, "--plans", "3")) == 0
    text = capsys.readouterr().out
    parts = ("8 x h100 (79.6 GiB each)", "micro batch", "█", "GPU-hours")
    assert [part for part in parts if part not in text] == []
    assert (text.count("\n1."), text.count("\n4.")) == (1, 0)


def test_the_command_line_says_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code, says in (
        (_arguments(folder.parent), 2, "does not read the config"),
        (_arguments(folder, "--gpu", "h100-many"), 2, "gpu must be one of gb200"),
        (_arguments(folder, "--gpu", "mine=0.05,989,3350"), 1, "What would fit"),
    ):
        assert main(words) == code
        assert says in "".join(capsys.readouterr())


def test_plans_in_which_ranks_share_out_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job: dict[str, Any] = {"num_gpus": 2, "seq_length": 128, "ep_size": 2, "attention_mask": False}
    with pytest.raises(ValueError, match="no multiple of 2 GPUs"):
        plan_run(MIXTURE, global_batch_size=1, gpu="4090", **job)
    with pytest.raises(NoPlanError, match="nothing fits on 2"):
        plan_run(MIXTURE, global_batch_size=2, gpu="mine=0.6,165,1008", **job)
    MIXTURE.save_pretrained(tmp_path)
    assert main(_arguments(tmp_path, "--gpus", "2", "--ep", "2")) == 0
    assert "ep_size=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ["fs.init_distributed()", "torch.optim.AdamW(model.parameters(), lr=...)"]),
        (
            {"param_dtype": torch.float16},
            [
                "fs.init_distributed()",
                "MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)",
            ],
        ),
        (
            {"lora_rank": 4, "frozen_dtype": torch.float32},
            ["import peft\nfs.init_distributed()\nmesh = fs.build_mesh()\n", "frozen_dtype=torch.float32"],
        ),
        ({"optimizer": "adamw8bit"}, ["import torchao.optim\nfs.init_distributed()\n"]),
        (
            {"optimizer": "adamw_stochastic", "master_dtype": torch.bfloat16},
            ["fs.init_distributed()", "fs.StochasticAdamW"],
        ),
        (
            {"sac_placement": "prefix", "sac_ratio": "1/2", "compile": False},
            ["fs.init_distributed()", "mesh=mesh)\nfs.apply_sac(model, '1/2', placement='prefix')\n"],
        ),
        (  # a mask of packs under another attention would be one of S x S
            {"attention_mask": False, "cp": 2},
            [
                "",
                "fs.use_varlen_attention(model)\nfs.use_context",
                "max_length=256)\ncollate = fs.PackedCollator(max_length=256)",
            ],
        ),
    ],
)
def test_the_code_of_a_plan_has_all_that_its_estimate_rests_on(
    options: dict[str, Any], parts: list[str]
) -> None:
    code = plan_run(TINY, **SMALL_JOB, **options)[0].code()
    assert code.startswith(parts[0])
    assert all(part in code for part in parts)
    assert ("mp_policy" in code, "frozen_dtype" in code) == ("param_dtype" in options, "lora_rank" in options)


VISION = Qwen3VLMoeConfig(
    text_config={
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 64,
    },
    vision_config={
        "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64,
    },
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "options", "there", "absent"),
    [
        (MIXTURE, {"lora_rank": 4, "ep_size": 2}, "target_modules=['q_proj', 'k_proj',", "all-linear"),
        (VISION, {"ep_size": 2}, "freeze_towers(model)\nfs.shard_model(model, mesh=mesh, frozen_", "peft"),
        (VISION, {"frozen_dtype": torch.float32}, "frozen_dtype=torch.float32", "ep_size"),
        (
            GptOssConfig(num_hidden_layers=2, num_local_experts=4),
            {"attention_mask": False},
            "ResumableSampler",
            "varlen",
        ),
        (
            GptOssConfig(num_hidden_layers=2, num_local_experts=4),
            {"attention_mask": False, "cp": 2},
            "PackedSampler",
            "varlen",
        ),
    ],
    ids=["experts are not adapted", "towers are frozen", "as given", "no packs", "packs of shared rows"],
)
def test_the_code_of_a_plan_trains_what_is_planned(
    config: Any, options: dict[str, Any], there: str, absent: str
) -> None:
    assert there in (code := plan_run(config, **SMALL_JOB, **options, compile=False)[0].code())
    assert absent not in code


def test_a_plan_of_all_logits_has_the_memory_of_its_code() -> None:
    assert plan_run(TINY, **SMALL_JOB, loss_impl="logits")[0].run.logits_dtype == torch.float32


def test_a_group_that_shares_rows_takes_its_share_of_the_batch() -> None:
    with pytest.raises(NoPlanError, match="What would fit: GPUs with"):  # cp=8 would accumulate 8 gradients
        plan_run(
            LLAMA_8B, num_gpus=8, seq_length=131072, global_batch_size=8, gpu="4090", attention_mask=False
        )


# --- GPUs by name, and how much of their memory tensors can have -------------------------------------------


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("h100", 81559 / 1024),
        ("H100 ", 81559 / 1024),
        ("h100-96gb", 97871 / 1024),
        ("a100", 80),
        ("a100-40gb", 40),
        ("4090", 24564 / 1024),
        ("mine=48,362,864", 48),
    ],
)
def test_sizes(name: str, gib: float) -> None:
    assert gpu_named(name).memory_bytes == pytest.approx(gib * GIB, rel=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        *("v100", "h100-", "h100-80gb", "", 5),
        *("=48,1,1", "mine=", "mine=48", "mine=48,1", "mine=48,1,1,1", "mine=-1,1,1", "mine=nan,1,1"),
        *("mine=48,1,1,lonk=3", "mine=48,1,1,link=0", "mine=48,inf,1", "mine=48,1,1,per_node=0.5"),
        *("mine=48,1,1,per_node=2.5", "mine=1e-12,1,1"),
    ],
)
def test_what_is_not_known_is_refused(name: str) -> None:
    described = "a GPU is described as NAME=GiB,TFLOPs,GB/s"
    with pytest.raises(ValueError, match=described if "=" in str(name) else "gpu must be one of gb200"):
        gpu_named(name)


def test_a_description() -> None:
    mine = gpu_named("mine=48,362,864,link=100,per_node=4,network=25")
    expected = {
        "memory_bytes": 48 * GIB,
        "flops_per_second": 362e12,
        "memory_bytes_per_second": 864e9,
        "node_bytes_per_second": 100e9,
        "bytes_per_second": 25e9,
        "gpus_per_node": 4,
    }
    assert {name: getattr(mine, name) for name in expected} == expected
    run = Run(num_gpus=4, micro_batch_size=1, seq_length=512, gpu="mine=48,362,864")
    assert any("mine was never compared" in note for note in estimate_memory(LLAMA_8B, run).notes)


def test_what_is_taken_is_named() -> None:
    one, eight, many = (budget_of(gpu_named("h100"), count) for count in (1, 8, 64))
    assert one.usable_bytes > eight.usable_bytes > many.usable_bytes > 0.93 * 81559 * MIB
    assert [name for name, _ in one.taken] == ["driver", "CUDA context", "fragments"]
    assert "NCCL" in str(eight)
    assert eight.memory_bytes - eight.usable_bytes == sum(size for _, size in eight.taken)


# --- plans in which ranks share rows -----------------------------------------------------------------------

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
    job: dict[str, Any] = {
        "num_gpus": 8,
        "gpu_memory_bytes": 76 * 10**9,
        "seq_length": 131072,
        "global_batch_size": 8,
        "attention_mask": False,
        "compile": False,
    }
    plans = plan_run(QWEN_14B, **job, cp=4)
    shares = {(plan.run.cp, plan.run.micro_batch_size * plan.run.grad_accum_steps) for plan in plans}
    assert shares == {(4, 4)}
    assert plans[0].time.exchange > 0
    assert any("exchanges of 4 GPUs take" in text for text in plans[0].reasons)
    for options, error, message in (
        ({}, NoPlanError, r"What would fit: cp=8 \(--cp 8\);"),
        ({"cp": 4, "global_batch_size": 3}, ValueError, r"no multiple of 2 groups of 4 GPUs.*4 would be"),
        ({"cp": 8, "seq_length": 1 << 20}, NoPlanError, "nothing fits on 8"),
    ):
        with pytest.raises(error, match=message):
            plan_run(QWEN_14B, **{**job, **options})
