"""The memory planner against published runs, against what real models save on a CPU, and in itself."""

import doctest
import math
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_sft as fs
from fsdp_sft import (
    NoPlanError,
    UnsupportedModelError,
    estimate_memory,
    longest_rows,
    plan_run,
    smallest_num_gpus,
)
from fsdp_sft.context_parallel import SequenceGroup, part_of_rows, share_attention
from fsdp_sft.loss.part import part_of
from fsdp_sft.planner import estimate, longest
from fsdp_sft.planner.__main__ import main

GIB = 1 << 30


def qwen(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **overrides: Any) -> Any:
    fields = {"vocab_size": 152064, "tie_word_embeddings": False, **overrides}
    return tf.Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **fields,
    )


QWEN_14B = qwen(5120, 13824, 48, 40, 8)
QWEN_72B = qwen(8192, 29568, 80, 64, 8)
TINY = qwen(64, 128, 4, 4, 2, vocab_size=256)
SMALL = {"num_gpus": 2, "micro_batch_size": 1, "seq_length": 64}

# Measured with max_memory_allocated: micro-batch 2, 4096 tokens, bf16 compute, float32 masters, AdamW, full
# logits, 64 GPUs, Qwen2.5-14B.
PUBLISHED = [
    ("a100", "1/2", True, 48.585),
    ("a100", "1/2", False, 61.288),
    ("h100", "1/2", True, 50.506),
    ("h100", "1/2", False, 63.209),
    ("gb200", 0, True, 82.146),
    ("gb200", 0, False, 107.428),
]


@pytest.mark.parametrize(("gpu", "ratio", "compiled", "measured"), PUBLISHED)
def test_published_runs(gpu: str, ratio: Any, compiled: bool, measured: float) -> None:
    found = estimate_memory(
        QWEN_14B,
        num_gpus=64,
        micro_batch_size=2,
        seq_length=4096,
        sac_ratio=ratio,
        compile=compiled,
        loss_impl="logits",
        gpu=gpu,
    )
    assert abs(found.peak_bytes / GIB / measured - 1) <= 0.003
    assert found.peak_phase == "loss"


@pytest.mark.parametrize(
    ("blocks", "measured"),
    [(fs.select_block_indices(8, "3/4"), 26.58), (range(6), 23.60), (range(2, 8), 29.8)],
    ids=["even", "prefix", "last"],
)
def test_placement_as_torchs_tracker_sees_it(blocks: Any, measured: float) -> None:
    """Eight blocks of 72B size, 3/4 of them checkpointed: evenly, the first ones, the last ones."""
    config = qwen(8192, 29568, 8, 64, 8)
    found = estimate_memory(
        config,
        num_gpus=64,
        micro_batch_size=2,
        seq_length=4096,
        sac_blocks=blocks,
        loss_impl="logits",
        gpu="cpu",
    )
    assert abs(found.peak_bytes / GIB / measured - 1) <= 0.005


@pytest.mark.parametrize("module", [estimate, longest])
def test_the_examples_of_docstrings_run(module: Any) -> None:
    done = doctest.testmod(module)
    assert done.attempted > 3
    assert not done.failed


# --- what real models save --------------------------------------------------------------------------------


def _architectures() -> dict[str, Any]:
    common = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {
        "llama": tf.LlamaConfig(**common),
        "qwen3": tf.Qwen3Config(**common, head_dim=32),
        "gemma2": tf.Gemma2Config(**common, head_dim=32, sliding_window=64),
        "gemma3": tf.Gemma3TextConfig(**common, head_dim=32, sliding_window=64),
        "mistral": tf.MistralConfig(**common, sliding_window=64),
        "phi": tf.PhiConfig(**common),
        "mixtral": tf.MixtralConfig(**common, num_local_experts=4),
        "gpt2": tf.GPT2Config(vocab_size=512, n_embd=256, n_layer=4, n_head=8, n_positions=512),
    }


def _saved_bytes(
    config: Any, *, padded: bool, ratio: Any = 0, backend: str | None = None, cp: int = 1
) -> int:
    """Storages that a real model's blocks save in a forward on the CPU, each once, without parameters."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    fs.apply_sac(model, ratio)
    if backend is not None:
        fs.compile_blocks(model, backend=backend)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, tuple[int, torch.Tensor]] = {}
    inside = [False]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if inside[0] and address not in parameters and address not in shared:
            saved[address] = (
                tensor.untyped_storage().nbytes(),
                tensor.detach(),
            )  # held, so that none is reused
        return tensor

    shared: set[int] = set()

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        inside[0] = True
        for value in kwargs.values():  # rotary tables and the mask belong to no block
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, torch.Tensor) and item.shape[-1] != config.hidden_size:
                    shared.add(item.untyped_storage().data_ptr())

    def leave(*_: Any) -> None:
        inside[0] = False

    for block in fs.find_blocks(model).values():
        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(leave)
    ids = torch.randint(3, 512, (2, 256))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    inputs: Any = {"input_ids": ids, "attention_mask": mask if padded else None, "labels": ids}
    forward: Any = nullcontext()
    if cp > 1:
        share_attention(model)
        inputs = part_of(
            {name: value for name, value in inputs.items() if value is not None}, _fake_group(cp)
        )
        forward = part_of_rows(inputs.whole)
    inputs = {name: value for name, value in inputs.items() if "labels" not in name}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), forward:
        output = model(**inputs, use_cache=False)
    assert output.logits.requires_grad
    return sum(size for size, _ in saved.values())


def _fake_group(cp: int) -> SequenceGroup:
    """Ranks of which this process is the first, and whose exchanges bring nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cp)
    return SequenceGroup(dist.group.WORLD.group_name, cp, 0, 0)


@pytest.fixture
def no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


FAMILIES = sorted(_architectures())


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "no-mask"])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_what_a_real_model_saves(family: str, padded: bool) -> None:
    config = _architectures()[family]
    measured = _saved_bytes(config, padded=padded)
    said = estimate_memory(
        config, num_gpus=1, micro_batch_size=2, seq_length=256, attention_mask=padded, gpu="cpu"
    ).activation_bytes
    print(f"{family}: measured {measured}, estimated {said}, {said / measured - 1:+.2%}")
    assert abs(said / measured - 1) <= 0.03


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mistral", "phi"])
def test_activations_of_compiled_blocks_are_what_the_partitioner_keeps(family: str) -> None:
    torch._dynamo.reset()
    config = _architectures()[family]
    # The partitioner that inductor uses, without the generation of code.
    measured = _saved_bytes(config, padded=True, backend="aot_eager_decomp_partition")
    said = estimate_memory(
        config, num_gpus=1, micro_batch_size=2, seq_length=256, gpu="cpu", compile=True
    ).activation_bytes
    print(f"{family}: measured {measured}, estimated {said}, {said / measured - 1:+.2%}")
    assert abs(said / measured - 1) <= 0.03


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "no-mask"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_activations_of_a_part_are_what_a_real_model_saves(
    family: str, padded: bool, no_group_left: None
) -> None:
    config = _architectures()[family]
    measured = _saved_bytes(config, padded=padded, cp=4)
    said = estimate_memory(
        config, num_gpus=4, micro_batch_size=2, seq_length=256, attention_mask=padded, gpu="cpu", cp=4
    ).activation_bytes
    print(f"{family}: measured {measured}, estimated {said}, {said / measured - 1:+.2%}")
    assert abs(said / measured - 1) <= 0.03


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi"])
def test_activations_of_compiled_parts_are_what_the_partitioner_keeps(
    family: str, no_group_left: None
) -> None:
    torch._dynamo.reset()
    config = _architectures()[family]
    measured = _saved_bytes(config, padded=True, backend="aot_eager_decomp_partition", cp=4)
    said = estimate_memory(
        config, num_gpus=4, micro_batch_size=2, seq_length=256, gpu="cpu", compile=True, cp=4
    ).activation_bytes
    print(f"{family}: measured {measured}, estimated {said}, {said / measured - 1:+.2%}")
    assert abs(said / measured - 1) <= 0.03


# --- in itself --------------------------------------------------------------------------------------------


def test_the_breakdown_adds_up_and_reads_well() -> None:
    found = estimate_memory(QWEN_14B, num_gpus=64, micro_batch_size=2, seq_length=4096)
    assert sum(found.breakdown.values()) == found.peak_bytes
    assert min(found.breakdown.values()) > 0
    text = str(found)
    assert f"{found.peak_bytes / GIB:.2f} GiB per GPU" in text
    assert all(name in text for name in found.breakdown)
    assert found.parameters == found.active_parameters == 14_770_033_664


def test_states_are_counted_from_the_parameters() -> None:
    def part(name: str, **options: Any) -> int:
        return estimate_memory(
            QWEN_14B, num_gpus=8, micro_batch_size=1, seq_length=512, **options
        ).breakdown.get(name, 0)

    shard = 14_770_033_664 // 8
    assert part("parameters (shards)") == 4 * shard
    assert part("parameters (shards)", master_dtype=torch.bfloat16) == 2 * shard
    assert part("optimizer states") == 8 * shard
    assert part("optimizer states", optimizer="sgd") == 0
    assert part("optimizer states", optimizer="sgd_momentum") == 4 * shard
    assert abs(part("optimizer states", optimizer="adamw8bit") / (2 * shard) - 1) < 0.04
    assert part("parameters (shards)", dp_replicate=2) == 2 * 4 * shard
    assert part("parameters (shards)", cpu_offload=True) == part("optimizer states", cpu_offload=True) == 0


def test_what_costs_more_and_what_costs_less() -> None:
    def peak(**options: Any) -> int:
        base = {"num_gpus": 16, "micro_batch_size": 1, "seq_length": 2048, "loss_impl": "chunked"}
        return estimate_memory(QWEN_14B, **{**base, **options}).peak_bytes

    plain = peak()
    assert peak(loss_impl="logits", micro_batch_size=8) > peak(micro_batch_size=8)
    wide = peak(loss_impl="logits", logits_dtype=torch.float32, micro_batch_size=8)
    assert wide > peak(loss_impl="logits", micro_batch_size=8)
    assert peak(reshard_after_forward=False) > plain
    assert peak(grad_accum_steps=2) > plain
    assert peak(grad_accum_steps=2, grad_sync="last") > peak(grad_accum_steps=2) + 4 * 13_000_000_000
    assert peak(compile=True) < plain
    assert peak(attention_mask=False) < plain
    assert peak(sac_ratio=1) < peak(sac_ratio="1/2") < plain
    assert peak(cpu_offload=True) < plain
    assert peak(optimizer="adamw8bit") < plain
    assert peak(trainable=r"layers\.4[0-7]\.") < peak(lora_rank=16) < plain  # no backward below block 40
    assert peak(sac_blocks=range(48)) == peak(sac_ratio=1)


def test_a_checkpointed_block_keeps_its_input_alone() -> None:
    tokens, hidden = 2 * 4096, 5120
    found = estimate_memory(QWEN_14B, num_gpus=64, micro_batch_size=2, seq_length=4096, sac_ratio=1)
    assert found.activation_bytes == 48 * 2 * tokens * hidden


def test_mixtures_of_experts_know_their_active_parameters() -> None:
    config = tf.MixtralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    found = estimate_memory(config, **SMALL)
    assert found.parameters - found.active_parameters == 2 * 6 * 3 * 64 * 96


def test_families_without_a_measurement_carry_a_note() -> None:
    assert not estimate_memory(TINY, **SMALL).notes
    config = tf.StableLmConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    assert "never compared" in estimate_memory(config, **SMALL).notes[0]


def test_a_model_that_cannot_be_followed_is_refused() -> None:
    encoder_decoder = tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    with pytest.raises(ValueError, match="encoder-decoder"):
        estimate_memory(encoder_decoder, **SMALL)
    with pytest.raises(ValueError, match="no causal language model"):
        estimate_memory(tf.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2), **SMALL)
    with pytest.raises(TypeError, match="config must be"):
        estimate_memory({"hidden_size": 3}, **SMALL)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gpus": 0}, "num_gpus must be an integer of at least 1, got 0"),
        ({"micro_batch_size": True}, "micro_batch_size"),
        ({"seq_length": 1.5}, "seq_length"),
        ({"gpu": "v100"}, "gpu must be one of a100, h100, h200, gb200, cpu"),
        ({"dp_replicate": 3}, "dp_replicate must divide num_gpus"),
        ({"loss_impl": "fused"}, "loss_impl must be one of 'chunked', 'logits'"),
        ({"optimizer": "lion"}, "optimizer must be one of 'adamw'"),
        ({"grad_sync": "never"}, "grad_sync must be one of"),
        ({"sac_ratio": 7}, r"ratio must be in \[0, 1\], got 7"),
        ({"sac_placement": "odd"}, "placement must be one of"),
        ({"sac_blocks": [4]}, r"sac_blocks must lie in \[0, 4\)"),
        ({"compile": "yes"}, "compile must be one of True, False"),
        ({"master_dtype": torch.int8}, "master_dtype must be one of"),
        ({"trainable": "no_such_name"}, "matches no parameter"),
        ({"lora_rank": 4, "lora_targets": ["no_such_layer"]}, "names no linear layer"),
        ({"chunk_size": 0}, "chunk_size must be an integer of at least 1"),
        ({"cp": 0}, "cp must be an integer of at least 1"),
        ({"num_gpus": 6, "cp": 4}, r"dp_replicate x cp must divide num_gpus, got 1 x 4 of 6"),
        ({"num_gpus": 4, "dp_replicate": 2, "cp": 4}, "dp_replicate x cp must divide"),
        (
            {"num_gpus": 3, "cp": 3},
            r"Qwen2ForCausalLM has 4 query heads, which cp=3 does not divide.*\[2, 4\]",
        ),
        ({"cp": 2, "loss_impl": "logits", "logits_dtype": torch.bfloat16}, "computed in torch.float32"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_memory(TINY, **{**SMALL, **options})


def test_the_estimate_leaves_the_model_and_the_config_alone() -> None:
    before = TINY.to_dict()
    first = estimate_memory(TINY, **SMALL)
    estimate_memory(TINY, **SMALL, loss_impl="logits", sac_ratio=1)
    assert estimate_memory(TINY, **SMALL) == first
    assert TINY.to_dict() == before


def test_the_chunk_size_is_the_losses() -> None:
    from fsdp_sft.loss import linear_cross_entropy
    from fsdp_sft.planner import kernels

    assert kernels.default_chunk_size is linear_cross_entropy.default_chunk_size
    rows = [kernels.default_chunk_size(width, torch.bfloat16) for width in (64, 300, 896, 5120)]
    assert rows == [128, 300, 896, 1024]


SHAPES = [(896, 4864, 24, 14, 2), (1536, 8960, 28, 12, 2), (3584, 18944, 28, 28, 4), (5120, 13824, 48, 40, 8)]


@pytest.mark.parametrize("seed", range(12))
def test_more_gpus_never_need_more(seed: int) -> None:
    draw = random.Random(seed)
    config = qwen(*draw.choice(SHAPES), tie_word_embeddings=draw.random() < 0.5)
    options = {
        "micro_batch_size": draw.choice((1, 2, 4)),
        "seq_length": draw.choice((512, 4096)),
        "sac_ratio": draw.choice((0, "1/3", 1)),
        "sac_placement": draw.choice(("even", "prefix")),
        "compile": draw.random() < 0.5,
        "loss_impl": draw.choice(("chunked", "logits")),
        "grad_accum_steps": draw.choice((1, 4)),
        "grad_sync": draw.choice(("each", "last")),
        "reshard_after_forward": draw.random() < 0.5,
        "gpu": draw.choice(("a100", "h100", "cpu")),
    }
    # Up to where a rank's shard of the hidden size is whole rows: beyond that FSDP2 pads, and a note says so.
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if config.hidden_size % n == 0]
    peaks = [estimate_memory(config, num_gpus=n, **options).peak_bytes for n in counts]
    assert peaks == sorted(peaks, reverse=True)


def test_padding_of_shards_is_counted_and_noted() -> None:
    options = {"micro_batch_size": 1, "seq_length": 512}
    even, padded = (estimate_memory(qwen(*SHAPES[0]), num_gpus=n, **options) for n in (128, 512))
    assert not even.notes
    assert "FSDP2 pads by 8%" in padded.notes[0]
    assert padded.breakdown["gathered parameters"] > even.breakdown["gathered parameters"]


@pytest.mark.parametrize("seed", range(8))
def test_more_memory_never_gives_a_slower_plan(seed: int) -> None:
    draw = random.Random(seed)
    config = qwen(*draw.choice(SHAPES))
    num_gpus = draw.choice((8, 16, 64))
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


# --- rows that ranks share --------------------------------------------------------------------------------


LONG = {"num_gpus": 16, "micro_batch_size": 1, "seq_length": 32768, "attention_mask": False}


def test_parameters_are_sharded_over_ranks_that_share_rows() -> None:
    alone, shared = (estimate_memory(QWEN_14B, **LONG, cp=cp).breakdown for cp in (1, 8))
    for part in ("parameters (shards)", "optimizer states"):
        assert alone[part] == shared[part]
    replicas = estimate_memory(QWEN_14B, **LONG, cp=4, dp_replicate=2).breakdown
    assert replicas["parameters (shards)"] == 2 * shared["parameters (shards)"]


@pytest.mark.parametrize("options", [{}, {"sac_ratio": 1}, {"compile": True}, {"loss_impl": "logits"}])
def test_more_ranks_to_a_row_never_need_more(options: dict[str, Any]) -> None:
    found = [estimate_memory(QWEN_14B, **LONG, cp=cp, **options) for cp in (1, 2, 4, 8)]
    peaks = [estimate.peak_bytes for estimate in found]
    assert peaks == sorted(peaks, reverse=True)
    # What is exchanged is kept by nobody: a rank keeps its part of what one process would, or a little more.
    kept = [
        cp * estimate.activation_bytes / found[0].activation_bytes
        for cp, estimate in zip((1, 2, 4, 8), found, strict=True)
    ]
    assert max(kept) <= 1.01
    assert min(kept) > 0.95


def test_rows_that_ranks_do_not_divide_are_filled_up() -> None:
    options = {**LONG, "cp": 8, "attention_mask": True}
    uneven, filled = (estimate_memory(QWEN_14B, **{**options, "seq_length": n}) for n in (4089, 4096))
    assert uneven.peak_bytes == filled.peak_bytes


def test_key_heads_that_ranks_do_not_divide_are_repeated() -> None:
    few, many = (qwen(5120, 13824, 4, 40, keys) for keys in (1, 8))
    more = [
        estimate_memory(config, **LONG, cp=8).activation_bytes
        - estimate_memory(config, **LONG, cp=1).activation_bytes / 8
        for config in (few, many)
    ]
    assert more[0] > more[1]


def test_the_mask_is_that_of_the_whole_row() -> None:
    length = 65536
    padded, plain = (
        estimate_memory(
            QWEN_14B, **{**LONG, "attention_mask": mask, "seq_length": length}, sac_ratio=1, cp=8
        ).peak_bytes
        for mask in (True, False)
    )
    assert padded - plain > 0.9 * 3 * length**2  # of bools, and what the kernel makes of them in bfloat16


def test_a_model_whose_ranks_cannot_share_rows_is_refused() -> None:
    config = tf.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=256)
    with pytest.raises(UnsupportedModelError, match="run another attention than eager"):
        estimate_memory(config, **SMALL, cp=2)
    mixed = tf.BambaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=32,
    )
    with pytest.raises(UnsupportedModelError, match="cp=1"):
        estimate_memory(mixed, **SMALL, cp=2)
    plans = plan_run(config, num_gpus=2, gpu_memory_bytes=GIB, seq_length=64, global_batch_size=2)
    assert {plan.cp for plan in plans} == {1}
    assert [row.cp for row in longest_rows(config, num_gpus=2, gpu_memory_bytes=GIB)] == [1]


def test_the_model_attends_as_before_after_a_trace_of_a_part() -> None:
    before = estimate_memory(TINY, **SMALL)
    estimate_memory(TINY, **SMALL, cp=2)
    assert estimate_memory(TINY, **SMALL) == before


def test_a_row_that_does_not_fit_alone_is_shared() -> None:
    options = {"num_gpus": 8, "gpu_memory_bytes": 80 * 10**9, "seq_length": 131072, "attention_mask": False}
    assert {plan.cp for plan in plan_run(QWEN_14B, **options, global_batch_size=8)} == {2, 4, 8}
    options["sac_offload"] = False
    plans = plan_run(QWEN_14B, **options, global_batch_size=8)
    assert {plan.cp for plan in plans} == {4, 8}
    assert all(plan.micro_batch_size * plan.grad_accum_steps == plan.cp for plan in plans)
    first = next(plan for plan in plans if plan.cp == 4)
    assert any("4 GPUs share each row, since nothing fits with fewer" in text for text in first.reasons)
    few = plan_run(QWEN_14B, **options, global_batch_size=1)
    assert {plan.cp for plan in few} == {8}
    assert any("too few sequences" in text for text in few[0].reasons)
    asked = plan_run(QWEN_14B, **options, global_batch_size=8, cp=8)
    assert {plan.cp for plan in asked} == {8}
    assert asked[0].time.exchange > 0
    with pytest.raises(ValueError, match=r"no multiple of 2 groups of 4 GPUs.*4 would be"):
        plan_run(QWEN_14B, **options, global_batch_size=3, cp=4)
    with pytest.raises(NoPlanError, match="8 GPUs to a row"):
        plan_run(QWEN_14B, **{**options, "seq_length": 1 << 20}, global_batch_size=8)


def test_rows_are_not_shared_where_that_saves_nothing() -> None:
    options = {"num_gpus": 8, "seq_length": 4096, "global_batch_size": 64}
    plans = plan_run(QWEN_14B, gpu_memory_bytes=192 * 10**9, **options)
    assert plans[0].sac_ratio == 0
    assert {plan.cp for plan in plans} == {1}


def test_exchanges_between_nodes_are_slower() -> None:
    def seconds(cp: int) -> float:
        options = {
            "num_gpus": 64,
            "gpu_memory_bytes": 1000 * GIB,
            "seq_length": 32768,
            "global_batch_size": 64,
        }
        return plan_run(QWEN_72B, **options, cp=cp, micro_batch_size=cp)[0].time.exchange

    assert seconds(16) > 4 * seconds(8) > 4 * seconds(2) > 0


def test_the_longest_row_fits_and_the_next_does_not() -> None:
    options = {"num_gpus": 8, "attention_mask": False}
    rows = longest_rows(QWEN_14B, gpu_memory_bytes=80 * 10**9, **options)
    assert [row.cp for row in rows] == [1, 2, 4, 8]
    for row in rows:
        more = {**options, "micro_batch_size": 1, "cp": row.cp, "sac_ratio": row.sac_ratio}
        this, following = (
            estimate_memory(
                QWEN_14B, **more, seq_length=row.seq_length + step, sac_placement=row.sac_placement
            )
            for step in (0, 1024)
        )
        assert this.peak_bytes == row.peak_bytes <= 0.9 * 80 * 10**9 < following.peak_bytes
        assert row.largest_part in this.breakdown
    assert rows[-1].seq_length > 7.9 * rows[0].seq_length


def test_the_longest_row_under_a_mask_is_found_too() -> None:
    (row,) = longest_rows(QWEN_14B, num_gpus=8, gpu_memory_bytes=80 * 10**9, cp=8, multiple_of=4096)
    options = {"num_gpus": 8, "micro_batch_size": 1, "cp": 8, "sac_ratio": row.sac_ratio}
    longer = estimate_memory(QWEN_14B, **options, seq_length=row.seq_length + 4096)
    assert row.seq_length % 4096 == 0
    assert row.peak_bytes <= 0.9 * 80 * 10**9 < longer.peak_bytes


def test_longest_rows_refuse_what_cannot_be() -> None:
    with pytest.raises(NoPlanError, match="not even 1024 tokens fit on 8 GPUs"):
        longest_rows(QWEN_72B, num_gpus=8, gpu_memory_bytes=80 * 10**9)
    with pytest.raises(TypeError, match="finds seq_length"):
        longest_rows(TINY, num_gpus=2, gpu_memory_bytes=GIB, seq_length=3)
    with pytest.raises(ValueError, match="multiple_of must be"):
        longest_rows(TINY, num_gpus=2, gpu_memory_bytes=GIB, multiple_of=0)


# --- plans ------------------------------------------------------------------------------------------------


def _llama() -> tf.LlamaConfig:
    """The shape of Llama 3.1 8B."""
    return tf.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )


def test_what_waits_on_the_host_is_not_on_the_device() -> None:
    options = {"num_gpus": 8, "micro_batch_size": 1, "seq_length": 16384, "attention_mask": False}
    for ratio, placement in (("1/4", "even"), ("1/2", "prefix"), (1, "even")):
        chosen = {**options, "sac_ratio": ratio, "sac_placement": placement}
        here = fs.estimate_memory(_llama(), **chosen)
        away = fs.estimate_memory(_llama(), **chosen, sac_offload=True)
        blocks = 32 * Fraction(ratio)
        block = 2 * 16384 * 4096
        assert (here.host_bytes, away.host_bytes) == (0, blocks * block), "a whole number of chunks each"
        assert here.activation_bytes - away.activation_bytes == (blocks - 1) * block
        assert away.peak_bytes < here.peak_bytes
        assert away.breakdown["activations of checkpointed blocks"] >= 0
    on_cpu = fs.estimate_memory(_llama(), **options, sac_ratio=1, gpu="cpu", sac_offload=True)
    assert on_cpu == fs.estimate_memory(_llama(), **options, sac_ratio=1, gpu="cpu")


def test_plans_offload_what_spares_recomputation() -> None:
    job: dict[str, Any] = {"num_gpus": 8, "gpu_memory_bytes": 80 * 10**9, "attention_mask": False, "cp": 1}
    job |= {"seq_length": 131072, "global_batch_size": 8}
    with pytest.raises(fs.NoPlanError, match="- sac_offload=True"):
        fs.plan_run(_llama(), **job, sac_offload=False)
    plans = fs.plan_run(_llama(), **job)
    assert all(plan.sac_offload and plan.estimate.host_bytes and plan.time.offload for plan in plans)
    assert any("GiB of host memory per GPU" in reason for reason in plans[0].reasons)
    rows = {
        offload: fs.longest_rows(
            _llama(), num_gpus=8, gpu_memory_bytes=80 * 10**9, attention_mask=False, sac_offload=offload
        )[0]
        for offload in (False, True)
    }
    assert rows[True].seq_length > 1.5 * rows[False].seq_length
    assert rows[True].estimate.host_bytes > 0


def test_plans_fit_and_are_sorted_by_speed() -> None:
    plans = plan_run(
        QWEN_14B, num_gpus=64, gpu_memory_bytes=80 * 10**9, seq_length=4096, global_batch_size=512
    )
    assert plans[0].relative_speed == 1.0
    speeds = [plan.relative_speed for plan in plans]
    assert speeds == sorted(speeds, reverse=True)
    for plan in plans:
        assert plan.micro_batch_size * plan.grad_accum_steps * 64 == 512
        again = estimate_memory(
            QWEN_14B,
            num_gpus=64,
            micro_batch_size=plan.micro_batch_size,
            seq_length=4096,
            grad_accum_steps=plan.grad_accum_steps,
            sac_ratio=plan.sac_ratio,
            sac_placement=plan.sac_placement,
            sac_offload=plan.sac_offload,
            reshard_after_forward=plan.reshard_after_forward,
        )
        assert again.peak_bytes == plan.peak_bytes <= 0.9 * 80 * 10**9
        assert plan.reasons


def test_a_larger_micro_batch_bought_with_checkpointing_is_not_faster_where_compute_binds() -> None:
    def seconds(micro: int, ratio: Any) -> float:
        return plan_run(
            QWEN_14B,
            num_gpus=8,
            gpu_memory_bytes=1000 * GIB,
            seq_length=4096,
            global_batch_size=64,
            micro_batch_size=micro,
            sac_ratio=ratio,
        )[0].time.total

    assert seconds(8, 1) > seconds(2, 0)


def test_a_plan_takes_less_than_a_second() -> None:
    estimate_memory(TINY, **SMALL)  # imports
    best = min(_planning_seconds(vocab) for vocab in (152064, 152128, 152192))
    assert best < 1.0


def _planning_seconds(vocab: int) -> float:
    config = qwen(8192, 29568, 80, 64, 8, vocab_size=vocab)  # never seen, so that nothing comes from a cache
    start = time.process_time()
    plan_run(config, num_gpus=64, gpu_memory_bytes=80 * 10**9, seq_length=4096, global_batch_size=512)
    return time.process_time() - start


def test_where_nothing_fits_the_error_says_what_would() -> None:
    with pytest.raises(NoPlanError, match=r"nothing fits on 8 x 74\.5 GiB") as caught:
        plan_run(QWEN_72B, num_gpus=8, gpu_memory_bytes=80 * 10**9, seq_length=4096, global_batch_size=8)
    text = str(caught.value)
    fewest = smallest_num_gpus(QWEN_72B, gpu_memory_bytes=80 * 10**9, seq_length=4096)
    assert f"- {fewest} GPUs of this kind" in text
    assert fewest is not None
    plans = plan_run(
        QWEN_72B, num_gpus=fewest, gpu_memory_bytes=80 * 10**9, seq_length=4096, global_batch_size=fewest
    )
    assert plans
    with pytest.raises(NoPlanError):
        plan_run(
            QWEN_72B, num_gpus=fewest // 2, gpu_memory_bytes=80 * 10**9, seq_length=4096, global_batch_size=64
        )
    assert smallest_num_gpus(QWEN_72B, gpu_memory_bytes=1 << 28, seq_length=4096) is None


def test_what_is_given_is_not_searched() -> None:
    plans = plan_run(
        QWEN_14B,
        num_gpus=64,
        gpu_memory_bytes=80 * 10**9,
        seq_length=4096,
        global_batch_size=256,
        micro_batch_size=2,
        sac_ratio="2/3",
        sac_placement="prefix",
        reshard_after_forward=True,
    )
    (plan,) = plans
    assert (plan.micro_batch_size, plan.grad_accum_steps, plan.sac_ratio) == (2, 2, Fraction(2, 3))
    assert (plan.sac_placement, plan.reshard_after_forward) == ("prefix", True)


def test_plans_refuse_what_cannot_be() -> None:
    options = {"gpu_memory_bytes": 80 * GIB, "seq_length": 512}
    with pytest.raises(ValueError, match=r"global_batch_size 100 is no multiple of 64 GPUs.*128 would be"):
        plan_run(TINY, num_gpus=64, global_batch_size=100, **options)
    with pytest.raises(ValueError, match="micro_batch_size 3 does not divide the 4 sequences"):
        plan_run(TINY, num_gpus=1, global_batch_size=4, micro_batch_size=3, **options)
    with pytest.raises(TypeError, match="no_such_option"):
        plan_run(TINY, num_gpus=1, global_batch_size=4, no_such_option=3, **options)
    with pytest.raises(TypeError, match="grad_accum_steps"):
        plan_run(TINY, num_gpus=1, global_batch_size=4, grad_accum_steps=2, **options)
    for nothing in (0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            plan_run(TINY, num_gpus=1, global_batch_size=4, seq_length=512, gpu_memory_bytes=nothing)


# --- the command line -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    qwen(256, 512, 6, 4, 2, vocab_size=4096).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_command_line_finds_the_longest_row(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(folder), "--gpus", "4", "--gpu", "h100-1gib", "--no-padding"]
    assert main([*given, "--longest"]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    lengths = {line[0]: int(line[1]) for line in lines if len(line) > 6 and line[0] in ("1", "2", "4")}
    assert set(lengths) == {"1", "2", "4"}
    assert lengths["4"] > 3.5 * lengths["1"]
    assert "the config gives the model 32768 positions" in text
    assert "█" in text
    assert main(given) == 2
    assert "--seq and --global-batch are needed, or --longest" in capsys.readouterr().err
    image = pytest.importorskip("matplotlib.image")
    target = tmp_path / "rows.png"
    assert main([*given, "--longest", "--png", str(target)]) == 0
    pixels = image.imread(target)
    assert pixels.shape[1] > 1000
    assert pixels[..., :3].min() < 0.2 < 0.9 < pixels[..., :3].max()


def _arguments(folder: Path, *more: str) -> list[str]:
    return [
        "--model",
        str(folder),
        "--gpus",
        "8",
        "--gpu",
        "h100-80gb",
        "--seq",
        "256",
        "--global-batch",
        "32",
        *more,
    ]


def test_the_command_line_prints_plans_and_bars(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_arguments(folder, "--plans", "3")) == 0
    text = capsys.readouterr().out
    assert "8 x h100-80gb (74.5 GiB each)" in text
    assert "micro batch" in text
    assert "█" in text
    assert "Fewest such GPUs" in text
    assert text.count("\n1.") == 1
    assert "\n4." not in text


def test_the_command_line_draws(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("matplotlib.image")
    target = tmp_path / "plans.png"
    assert main(_arguments(folder, "--png", str(target))) == 0
    pixels = image.imread(target)
    assert pixels.shape[1] > 1000
    assert pixels[..., :3].min() < 0.2 < 0.9 < pixels[..., :3].max()


def test_the_command_line_calibrates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_arguments(folder, "--calibrate")) == 0
    text = capsys.readouterr().out
    factor = float(text.partition("(factor ")[2].partition(")")[0])
    assert abs(factor - 1) <= 0.03


def test_the_command_line_says_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_arguments(folder.parent)) == 2
    assert main([*_arguments(folder), "--gpu", "h100-many"]) == 2
    assert "write it as h100-80gb" in capsys.readouterr().err
    assert main([*_arguments(folder), "--gpu", "h100-0.05gib"]) == 1
    assert "What would fit" in capsys.readouterr().out
