"""estimate_memory against what a simulated device has in use in a real step."""

import copy
import dataclasses
import functools
import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import fsdp_sft as fs
from fsdp_sft._process.gpus import gpu_named
from fsdp_sft.planner import MemoryEstimate
from tests.harness.composed import composed
from tests.harness.quantised_folders import mxfp4_folder
from tests.planner.families import FAMILIES, family_config
from tests.simulated.ranks import run_simulated

CASES = 20
Case = tuple[Any, dict[str, Any]]
# The CPU's kernels, and what only accelerators have: products of 16-bit matrices into float32.
SIMULATED = dataclasses.replace(gpu_named("cpu"), name="simulated")
LARGEST_ERROR = 0.01
# Ranks that share out experts gather and reduce them as groups of their own, in the middle of a block; the
# estimate has them gathered and reduced with the block. Eager experts add gradients of a whole stack to each
# other: autograd does that in place where nothing else holds the sum, but never on meta tensors: the estimate
# has one stack too many. Both are much in a model this small, and a hundredth or less in one of billions.
LARGEST_ERROR_OF_EXPERTS = 0.025
_ADAMW: dict[str, Any] = {
    "adamw_for_loop": functools.partial(torch.optim.AdamW, foreach=False),
    "adamw_foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "adamw_fused": functools.partial(torch.optim.AdamW, fused=True),
}
_OPTIMIZERS = {**_ADAMW, "adamw_stochastic": fs.StochasticAdamW}


def random_case(seed: int) -> Case:
    """A configuration of a family that the seed names, small enough to be run."""
    draw = random.Random(seed)
    num_gpus, replicas = draw.choice(((2, 1), (2, 1), (3, 1), (4, 2)))
    options: dict[str, Any] = {
        "num_gpus": num_gpus,
        "dp_replicate": replicas,
        "micro_batch_size": draw.choice((1, 2)),
        "seq_length": draw.choice((128, 256)),
        "loss_impl": draw.choice(("chunked", "logits")),
        "attention_mask": draw.random() < 0.5,
        "sac_ratio": draw.choice(("0", "1/3", "1/2", "1")),
        "grad_accum_steps": draw.choice((1, 1, 2, 3)),
        "grad_sync": draw.choice(("each", "last")),
        "reshard_after_forward": draw.random() < 0.75,
        "master_dtype": draw.choice((torch.float32, torch.float32, torch.bfloat16)),
        "optimizer": draw.choice(sorted(_ADAMW)),
    }
    config = family_config(
        FAMILIES[seed % len(FAMILIES)], draw, vocab=draw.choice((512, 8192)), hidden=256, layers=4
    )
    return config, options


def shared_case(seed: int) -> Case:
    """One of those, with ranks that share rows, and longer rows, which the ranks need not divide."""
    config, options = random_case(seed)
    draw = random.Random(f"shared {seed}")
    num_gpus, replicas, cp = draw.choice(((2, 1, 2), (4, 1, 2), (4, 2, 2), (4, 1, 4), (4, 1, 4)))
    length = draw.choice((512, 1023, 1024))
    return config, options | {"num_gpus": num_gpus, "dp_replicate": replicas, "cp": cp, "seq_length": length}


def stochastic_case(seed: int) -> Case:
    """In bfloat16 and rounded stochastically, of so few tokens that the update is the peak."""
    draw = random.Random(f"stochastic {seed}")
    config = family_config(FAMILIES[seed % len(FAMILIES)], draw, vocab=8192, hidden=256, layers=4)
    return config, random_case(seed)[1] | {
        "master_dtype": torch.bfloat16,
        "optimizer": "adamw_stochastic",
        "loss_impl": "chunked",
        "num_gpus": 2,
        "dp_replicate": 1,
        "grad_accum_steps": 1,
        "reshard_after_forward": True,
        "micro_batch_size": 1,
        "seq_length": 32,
        "sac_ratio": "1",
    }


def experts_case(seed: int) -> Case:
    """A mixture of many choices a token."""
    draw = random.Random(f"experts {seed}")
    config = tf.Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=draw.choice((128, 256)),
        moe_intermediate_size=draw.choice((64, 96)),
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=draw.choice((2, 8)),
        max_position_embeddings=4096,
    )
    config._experts_implementation = "grouped_mm"
    sizes = {"num_gpus": 2, "dp_replicate": 1, "micro_batch_size": 2, "seq_length": 512}
    return config, random_case(seed)[1] | sizes


def shared_out_case(seed: int) -> Case:
    """Experts that ranks share out; every token goes to all of them, so that each rank gets what it sends."""
    config, options = experts_case(seed)
    num_gpus, ep_size = random.Random(f"shared out {seed}").choice(((2, 2), (4, 2), (4, 4)))
    config.num_experts = config.num_experts_per_tok = 4
    return config, options | {"num_gpus": num_gpus, "ep_size": ep_size, "grad_sync": "each"}


def cut_case(seed: int) -> Case:
    """Stacks of fewer experts than ranks, which are cut along another dimension and copied when gathered."""
    config = family_config("mixtral", random.Random(f"cut {seed}"), vocab=512, hidden=256, layers=2)
    config.num_local_experts = 2
    sizes = {"num_gpus": 4, "dp_replicate": 1, "micro_batch_size": 1, "seq_length": 64}
    way = {"sac_ratio": "1", "grad_accum_steps": 1, "reshard_after_forward": True}
    return config, random_case(seed)[1] | sizes | way


def _memory_of_the_last(steps: int, *of_a_step: Any, **options: Any) -> tuple[int, int]:
    """(bytes held after so many steps, most bytes in use in the last of them)."""
    for _ in range(steps):
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        fs.train_step(*of_a_step, **options, check=False)
    torch.accelerator.synchronize()
    stats = torch.accelerator.memory_stats()
    return stats["requested_bytes.all.current"], stats["requested_bytes.all.peak"]


def _peak(config: Any, options: dict[str, Any]) -> tuple[int, list[int]]:
    """(most bytes in use in a step of the steady state, devices touched)."""
    context = fs.init_distributed()
    torch.manual_seed(0)
    mesh = fs.build_mesh(dp_replicate=options["dp_replicate"], cp=options.get("cp", 1))
    shares = options.get("ep_size", 1)
    plain = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model = copy.deepcopy(plain).to("meta") if shares > 1 else plain
    fs.apply_sac(model, options["sac_ratio"])
    placed = {name: options[name] for name in ("master_dtype", "reshard_after_forward")}
    fs.shard_model(model, mesh=mesh, ep_size=shares, **placed)
    if shares > 1:
        model.to_empty(device=context.device)
        values = dict(plain.named_buffers())
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter.detach().to_local(), std=0.02)
    model.to(context.device)
    fs.use_context_parallel(model, mesh=mesh)
    optimizer = _OPTIMIZERS[options["optimizer"]](model.parameters(), lr=1e-5)
    ids = torch.randint(3, config.vocab_size, (options["micro_batch_size"], options["seq_length"]))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if options["attention_mask"]:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, -1] = 0  # transformers makes no mask of ones alone
    window = [batch] * options["grad_accum_steps"]
    fs.prepare_loss(model, impl=options["loss_impl"], router_loss="off")
    _, peak = _memory_of_the_last(3, model, window, optimizer, grad_sync=options["grad_sync"])
    return peak, torch.sim.touched()


@pytest.mark.timeout(660)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, CASES))])
@pytest.mark.parametrize(
    "draw", [random_case, shared_case, stochastic_case, cut_case, experts_case, shared_out_case]
)
def test_the_estimate_is_what_a_device_has_in_use(draw: Any, seed: int) -> None:
    config, options = draw(seed)
    found = run_simulated(_peak, options["num_gpus"], config, options, devices=4, timeout=600)
    assert [touched for _, touched in found] == [[index] for index in range(len(found))]
    expected = fs.estimate_memory(config, fs.Run(gpu=SIMULATED, logits_dtype=torch.float32, **options))
    bound = LARGEST_ERROR_OF_EXPERTS if draw in (experts_case, shared_out_case) else LARGEST_ERROR
    assert expected.peak_bytes == pytest.approx(found[0][0], rel=bound), (expected.peak_phase, options)


# --- packed frozen weights ---------------------------------------------------------------------------------

LENGTH, RANK = 256, 8
# Matmuls of bfloat16 take forty times as long as float32's on CPUs without AVX-512: few tokens, small layers.
BATCHES = {"dense": 1, "sparse": 2, "oss": 2}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
COMMON = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
MIXED = {**COMMON, "num_experts_per_tok": 2, "head_dim": 64, "vocab_size": 512}
MODELS = {
    "dense": tf.LlamaConfig(intermediate_size=768, vocab_size=256, **COMMON),
    "sparse": tf.Qwen3MoeConfig(moe_intermediate_size=128, num_experts=6, **MIXED),
    "oss": tf.GptOssConfig(intermediate_size=128, num_local_experts=6, **MIXED),
}

# (model, how frozen weights are kept, replicas, further options)
PACKED_CASES: list[tuple[str, Any, int, dict[str, Any]]] = [
    ("dense", None, 1, {}),
    ("dense", "nf4", 1, {}),
    ("dense", "nf4", 1, {"reshard_after_forward": False}),
    ("dense", "nf4", 2, {"sac_ratio": "1"}),
    ("dense", "fp8", 1, {"sac_ratio": "1/2"}),
    ("sparse", "nf4", 1, {}),
    ("sparse", "nf4", 2, {"reshard_after_forward": False}),
    ("sparse", "nf4", 1, {"ep_size": 2}),
    ("oss", "stored", 1, {}),
    ("oss", None, 1, {"sac_ratio": "1"}),
    ("oss", "stored", 1, {"sac_ratio": "1"}),
]


def _use(folder: Path, cases: list[Any]) -> list[tuple[int, int]]:
    """(bytes held between two steps, most bytes in use in a step), for each case."""
    import peft

    fs.init_distributed()
    found = []
    for name, kind, replicas, options in cases:
        lora = peft.LoraConfig(r=RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
        mesh = fs.build_mesh(dp_replicate=replicas)
        model = composed(folder / name, mesh=mesh, peft_config=lora, frozen_dtype=kind, **options)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
        ids = torch.arange(BATCHES[name] * LENGTH).view(-1, LENGTH) % (MODELS[name].vocab_size - 12) + 3
        found.append(_memory_of_the_last(2, model, [{"input_ids": ids, "labels": ids}], optimizer))
        del model, optimizer
        gc.collect()
    return found


def _folders(root: Path) -> None:
    """The models in bfloat16, and the experts of gpt-oss in MXFP4."""
    for name, config in MODELS.items():
        torch.manual_seed(0)
        if name == "oss":
            mxfp4_folder(root / name, config)
        else:
            tf.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(root / name)


def _expected(root: Path, case: Any, ranks: int) -> MemoryEstimate:
    name, kind, replicas, options = case
    run = {
        "num_gpus": ranks,
        "dp_replicate": replicas,
        "micro_batch_size": BATCHES[name],
        "seq_length": LENGTH,
        "lora_rank": RANK,
        "lora_targets": TARGETS,
        "frozen_dtype": kind,
        "attention_mask": False,
    }
    setup = fs.Run(gpu=SIMULATED, logits_dtype=torch.float32, **run, **options)
    return fs.estimate_memory(root / name, setup)


@pytest.mark.timeout(660)
@pytest.mark.parametrize(
    ("cases", "ranks"), [(PACKED_CASES, 4), (PACKED_CASES[4:5] + PACKED_CASES[-2:], 2)], ids=["all", "some"]
)
def test_packed_weights_take_what_the_estimate_says(cases: list[Any], ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="adapters need the 'peft' extra")
    _folders(tmp_path)
    found = run_simulated(_use, ranks, tmp_path, cases, devices=4, timeout=600)[0]
    memory = [_expected(tmp_path, case, ranks) for case in cases]
    for case, (held, peak), estimated in zip(cases, found, memory, strict=True):
        kept = sum(estimated.breakdown.get(part, 0) for part in ("parameters (shards)", "optimizer states"))
        assert kept == pytest.approx(held, rel=1e-3, abs=1024), case
        # gpt-oss's experts take some more in their backward than planned, whatever they are stored in.
        if case not in PACKED_CASES[-2:]:
            assert estimated.peak_bytes == pytest.approx(peak, rel=LARGEST_ERROR), case
    (_, plain), (_, packed) = found[-2:]
    assert plain - packed == pytest.approx(memory[-2].peak_bytes - memory[-1].peak_bytes, abs=1e-4 * plain)
