"""The memory planner against published runs, against what real models save on a CPU, and in itself."""

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_sft as fs
from fsdp_sft import estimate_memory
from fsdp_sft._model.blocks import towers_of
from fsdp_sft._process.gpus import GIB
from fsdp_sft.attention.context_parallel import SequenceGroup, part_of_rows, share_attention
from fsdp_sft.loss import Rows
from fsdp_sft.planner import model
from fsdp_sft.planner.model import build_skeleton
from fsdp_sft.planner.replay import INPUTS, replay
from fsdp_sft.planner.trace import trace
from tests.harness.multimodal import CONFIGS, TEXT, tiny
from tests.planner.families import LLAMA_8B, QWEN_14B, SMALL, TINY, qwen

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
MEASURED: Any = {"num_gpus": 64, "micro_batch_size": 2, "seq_length": 4096, "loss_impl": "logits"}


@pytest.fixture
def vocabulary_in_the_root() -> Iterator[None]:
    """Embedding and head lie in the root's group, as in the runs that were measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "own_vocabulary", lambda *_: (None, None))
        model._cached_skeleton.cache_clear()
        yield
    model._cached_skeleton.cache_clear()


@pytest.mark.usefixtures("vocabulary_in_the_root")
@pytest.mark.parametrize(("gpu", "ratio", "compiled", "measured"), PUBLISHED)
def test_published_runs(gpu: str, ratio: Any, compiled: bool, measured: float) -> None:
    found = estimate_memory(QWEN_14B, fs.Run(**MEASURED, sac_ratio=ratio, compile=compiled, gpu=gpu))
    assert (found.peak_bytes / GIB, found.peak_phase) == (pytest.approx(measured, rel=0.003), "loss")


@pytest.mark.usefixtures("vocabulary_in_the_root")
@pytest.mark.parametrize(("placement", "measured"), [("even", 26.58), ("prefix", 23.60)])
def test_placement_as_torchs_tracker_sees_it(placement: Any, measured: float) -> None:
    """Eight blocks of 72B size, 3/4 of them checkpointed: evenly, or the first ones."""
    run = fs.Run(**MEASURED, sac_ratio="3/4", sac_placement=placement, gpu="cpu")
    peak = estimate_memory(qwen(8192, 29568, 8, 64, 8), run).peak_bytes
    assert peak / GIB == pytest.approx(measured, rel=0.005)


# --- what real models save --------------------------------------------------------------------------------


COMMON: dict[str, Any] = {
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
ARCHITECTURES: dict[str, Any] = {
    "gemma2": lambda: tf.Gemma2Config(**COMMON, head_dim=32, sliding_window=64),
    "gemma3": lambda: tf.Gemma3TextConfig(**COMMON, head_dim=32, sliding_window=64),
    "gpt2": lambda: tf.GPT2Config(vocab_size=512, n_embd=256, n_layer=4, n_head=8, n_positions=512),
    "llama": lambda: tf.LlamaConfig(**COMMON),
    "mistral": lambda: tf.MistralConfig(**COMMON, sliding_window=64),
    "mixtral": lambda: tf.MixtralConfig(**COMMON, num_local_experts=4),
    "phi": lambda: tf.PhiConfig(**COMMON),
    "qwen3": lambda: tf.Qwen3Config(**COMMON, head_dim=32),
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
    others = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}  # held, so that no address is used again
    inside: list[nn.Module] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if inside and address not in others:
            saved[address] = tensor.detach()
        return tensor

    def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        inside.append(block)
        for value in kwargs.values():  # rotary tables and the mask belong to no block
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, torch.Tensor) and item.shape[-1] != config.hidden_size:
                    others.add(item.untyped_storage().data_ptr())

    for block in fs.find_blocks(model).values():
        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(lambda *_: inside.clear())
    ids = torch.randint(3, 512, (2, 256))
    inputs: Any = {"input_ids": ids, "labels": ids}
    if padded:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, -3:] = 0
    forward: Any = nullcontext()
    if cp > 1:
        share_attention(model)
        # Ranks of which this process is the first, and whose exchanges bring nothing.
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cp)
        inputs = Rows(SequenceGroup(dist.group.WORLD.group_name, cp, 0)).part(inputs)
        forward = part_of_rows(inputs.whole)
    inputs = {name: value for name, value in inputs.items() if "labels" not in name}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), forward:
        output = model(**inputs, use_cache=False)
    assert output.logits.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.fixture
def no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# The partitioner that inductor uses, without the generation of code.
COMPILED = {"backend": "aot_eager_decomp_partition"}


@pytest.mark.usefixtures("no_group_left")
@pytest.mark.parametrize(
    ("family", "way"),
    [
        *itertools.product(ARCHITECTURES, ({"padded": True}, {"padded": False})),
        *((family, {"padded": True, **COMPILED}) for family in ("llama", "gemma3", "mistral", "phi")),
        ("llama", {"padded": False, "cp": 4}),
        *((family, {"padded": True, "cp": 4}) for family in ("llama", "gemma3", "mixtral")),
        *((family, {"padded": True, "cp": 4, **COMPILED}) for family in ("qwen3", "phi")),
        *((family, {"padded": False, "ratio": "1/2"}) for family in ("llama", "gpt2")),
    ],
    ids=str,
)
def test_activations_are_what_a_real_model_saves(family: str, way: dict[str, Any]) -> None:
    torch._dynamo.reset()
    config = ARCHITECTURES[family]()
    measured = _saved_bytes(config, **way)
    run = fs.Run(
        num_gpus=way.get("cp", 1),
        micro_batch_size=2,
        seq_length=256,
        attention_mask=way["padded"],
        gpu="cpu",
        compile="backend" in way,
        cp=way.get("cp", 1),
        sac_ratio=way.get("ratio", 0),
    )
    assert estimate_memory(config, run).activation_bytes == pytest.approx(measured, rel=0.03)


# --- in itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq_length", [1024, 65536])
@pytest.mark.parametrize("ratio", [0, 1])
def test_no_part_is_less_than_nothing(seq_length: int, ratio: int) -> None:
    """Long rows under a mask peak in the backward, when much of what was there before is gone."""
    run = fs.Run(num_gpus=8, micro_batch_size=1, seq_length=seq_length, sac_ratio=ratio)
    found = estimate_memory(LLAMA_8B, run)
    assert sum(found.breakdown.values()) == found.peak_bytes
    assert min(found.breakdown.values()) > 0
    assert str(found).split()[-4:] == ["in", "all", f"{found.peak_bytes / GIB:.2f}", "GiB"]
    assert found.parameters == found.active_parameters


@pytest.mark.parametrize(
    ("part", "options", "bytes_each"),
    [
        ("parameters (shards)", {}, 4),
        ("parameters (shards)", {"master_dtype": torch.bfloat16}, 2),
        ("parameters (shards)", {"dp_replicate": 2}, 2 * 4),
        ("optimizer states", {}, 8),
        ("optimizer states", {"master_dtype": torch.bfloat16, "optimizer": "adamw_stochastic"}, 4),
        ("optimizer states", {"optimizer": "sgd"}, 0),
        ("optimizer states", {"optimizer": "sgd_momentum"}, 4),
    ],
)
def test_states_are_counted_from_the_parameters(part: str, options: dict[str, Any], bytes_each: int) -> None:
    run = fs.Run(num_gpus=8, micro_batch_size=1, seq_length=512, **options)
    assert estimate_memory(QWEN_14B, run).breakdown.get(part, 0) == bytes_each * (14_770_033_664 // 8)


@pytest.mark.parametrize("ranks", [1, 8, 32])
def test_8_bit_states_are_those_that_torchao_makes(ranks: int) -> None:
    """It leaves small shards, and those of broken blocks, in the master's dtype."""
    optim = pytest.importorskip("torchao.optim")
    config = tf.LlamaConfig(  # of SmolLM 135M
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in tf.LlamaForCausalLM(config).parameters()]
    optimizer = optim.AdamW8bit([torch.zeros(1)])
    shards = [torch.zeros(-(-shape[0] // ranks), *shape[1:]) for shape in shapes]
    states = [optimizer._new_buffer(shard, signed) for shard in shards for signed in (True, False)]
    parts = [part for s in states for part in ([s.codes, s.scale] if hasattr(s, "codes") else [s])]
    taken = sum(part.numel() * part.itemsize for part in parts)
    run = fs.Run(num_gpus=ranks, micro_batch_size=1, seq_length=64, optimizer="adamw8bit")
    assert estimate_memory(config, run).breakdown["optimizer states"] == taken


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"micro_batch_size": 8}, {"loss_impl": "logits", "micro_batch_size": 8}),
        (
            {"loss_impl": "logits", "micro_batch_size": 8},
            {"loss_impl": "logits", "logits_dtype": torch.float32, "micro_batch_size": 8},
        ),
        ({}, {"reshard_after_forward": False}),
        ({}, {"grad_accum_steps": 2}),
        ({"compile": True}, {}),
        ({"attention_mask": False}, {}),
        ({"sac_ratio": 1}, {"sac_ratio": "1/2"}),
        ({"sac_ratio": "1/2"}, {}),
        ({"optimizer": "adamw8bit"}, {}),
        ({"lora_rank": 16}, {}),
        # Gradients that wait for the last micro-batch are whole.
        ({"grad_accum_steps": 2}, {"grad_accum_steps": 2, "grad_sync": "last"}),
    ],
)
def test_what_costs_more_and_what_costs_less(less: dict[str, Any], more: dict[str, Any]) -> None:
    base = {"num_gpus": 16, "micro_batch_size": 1, "seq_length": 2048, "loss_impl": "chunked"}
    low, high = (estimate_memory(QWEN_14B, fs.Run(**{**base, **way})).peak_bytes for way in (less, more))
    assert high > low + 4 * 13_000_000_000 * ("grad_sync" in more)


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
    found = estimate_memory(config, fs.Run(**SMALL))
    assert found.parameters - found.active_parameters == 2 * 6 * 3 * 64 * 96


def test_what_an_estimate_rests_on_is_noted() -> None:
    unknown = tf.StableLmConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    packing = {"lora_rank": 8, "frozen_dtype": "nf4"}
    assert not estimate_memory(TINY, fs.Run(**SMALL)).notes
    for config, options, says in (
        (unknown, {}, "never compared"),
        (BITSANDBYTES, packing, "packs frozen matrices anew (nf4)"),
    ):
        assert says in estimate_memory(config, fs.Run(**SMALL, **options)).notes[0]


def _quantised(**settings: Any) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    return tf.LlamaConfig(**sizes, quantization_config=settings)


def _experts(**options: Any) -> Any:
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    routed = {"num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 64}
    config = tf.Qwen3MoeConfig(**{**sizes, **heads, **routed, **options})
    config._experts_implementation = "grouped_mm"
    return config


EXPERTS = _experts()
BITSANDBYTES = _quantised(quant_method="bitsandbytes", load_in_4bit=True)
BLOOM = tf.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=256)
BAMBA = tf.BambaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=256, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=32,
)  # fmt: skip
ENCODER_DECODER = tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
PICTURES = tf.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
ODD_EXPERTS = _experts(moe_intermediate_size=60)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (TINY, {"num_gpus": 0}, "num_gpus must be an integer of at least 1, got 0"),
        (TINY, {"micro_batch_size": True}, "micro_batch_size"),
        (TINY, {"seq_length": 1.5}, "seq_length"),
        (TINY, {"gpu": "v100"}, "gpu must be one of gb200, gb300, b200"),
        (TINY, {"dp_replicate": 3}, "dp_replicate x cp x ep_size must divide num_gpus"),
        (TINY, {"loss_impl": "fused"}, "loss_impl must be one of 'chunked', 'logits'"),
        (TINY, {"optimizer": "lion"}, "optimizer must be one of 'adamw'"),
        (TINY, {"grad_sync": "never"}, "grad_sync must be one of"),
        (TINY, {"sac_ratio": 7}, r"ratio must be in \[0, 1\], got 7"),
        (TINY, {"sac_placement": "odd"}, "placement must be one of"),
        (TINY, {"master_dtype": torch.int8}, "master_dtype must be one of"),
        (TINY, {"logits_dtype": torch.int64}, "logits_dtype must be one of"),
        (TINY, {"frozen_dtype": torch.int8}, "frozen_dtype must be one of"),
        (TINY, {"lora_targets": ["q_proj"]}, "give lora_rank too"),
        (TINY, {"lora_rank": 4, "lora_targets": ["no_such_layer"]}, "names no linear layer"),
        (TINY, {"cp": 0}, "cp must be an integer of at least 1"),
        (TINY, {"num_gpus": 6, "cp": 4}, r"must divide num_gpus, got 1 x 4 x 1 of 6"),
        (TINY, {"num_gpus": 3, "cp": 3}, r"has 4 query heads, which cp=3 does not divide.*\[2, 4\]"),
        (LLAMA_8B, {"frozen_dtype": "nf4"}, "no matrix in a block is frozen: give lora_rank"),
        (LLAMA_8B, {"frozen_dtype": "stored", "lora_rank": 8}, "the config has no quantization_config"),
        (LLAMA_8B, {"frozen_dtype": "int4", "lora_rank": 8}, "must be one of .*'stored', 'nf4', 'fp8'"),
        (
            BITSANDBYTES,
            {"frozen_dtype": "stored", "lora_rank": 8},
            r"config \(bitsandbytes\) does not say .* 'nf4' or 'fp8' packs them anew",
        ),
    ],
)
def test_bad_arguments_are_refused(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_memory(config, fs.Run(**{**SMALL, **options}))


@pytest.mark.parametrize(
    ("config", "options", "error", "message"),
    [
        (BLOOM, {"cp": 2}, fs.UnsupportedModelError, "^transformers does not let Bloom.* another attention"),
        (BAMBA, {"cp": 2}, fs.UnsupportedModelError, "cp=1"),
        (ENCODER_DECODER, {}, ValueError, "encoder-decoder"),
        (PICTURES, {}, ValueError, "AutoModelForCausalLM"),
        (ODD_EXPERTS, {}, fs.UnsupportedModelError, "multiple of 16 bytes"),
        (_quantised(quant_method="torchao"), {}, fs.CheckpointFormatError, "torchao"),
        (EXPERTS, {"ep_size": 3}, ValueError, "ep_size=3 does not divide the 16 experts"),
        (EXPERTS, {"ep_size": 4}, ValueError, "dp_replicate x cp x ep_size must divide num_gpus"),
        (EXPERTS, {"ep_size": 2, "cp": 2}, ValueError, "one of cp and ep_size has to be 1"),
        (TINY, {"ep_size": 2}, fs.UnsupportedModelError, "no plan by which ranks share out experts"),
    ],
)
def test_a_model_that_cannot_be_followed_is_refused(
    config: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        estimate_memory(config, fs.Run(**{**SMALL, "num_gpus": 6}, **options))


def test_the_estimate_leaves_the_model_and_the_config_alone() -> None:
    before = TINY.to_dict()
    first, *_, again = (
        estimate_memory(TINY, fs.Run(**SMALL, **options))
        for options in ({}, {"loss_impl": "logits", "sac_ratio": 1}, {"cp": 2}, {})
    )
    assert (again, TINY.to_dict()) == (first, before)


def test_checkpointed_blocks_keep_the_masks_that_they_get() -> None:
    """Gemma 2 has windows in every other block: two masks, of which a checkpointed block keeps its own."""
    config = tf.Gemma2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=128,
    )  # fmt: skip
    setup = fs.Run(num_gpus=2, micro_batch_size=1, seq_length=256, sac_ratio="1/4", sac_placement="prefix")
    skeleton = build_skeleton(config, setup)
    seen = trace(skeleton, setup)
    (phase, alone, _), (both_phase, both, _) = (
        replay(skeleton, seen, dataclasses.replace(setup, sac_ratio=ratio)) for ratio in ("1/4", "1/2")
    )
    assert phase == both_phase  # what is held of the masks differs between phases
    assert alone[INPUTS] <= both[INPUTS] - 256**2


# --- vision-language models: what text uses, with towers that are only held --------------------------------

RUN = fs.Run(num_gpus=2, micro_batch_size=2, seq_length=64)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_planned(family: str) -> None:
    model, config = tiny(family), CONFIGS[family]()
    skeleton = build_skeleton(config, RUN)
    towers = {p for name in towers_of(model) for p in model.get_submodule(name).parameters()}
    planned = [one for group in skeleton.towers for one in group.parameters]
    assert not any(one.trained for one in planned)
    found = (sum(one.elements for one in planned), skeleton.parameters, len(skeleton.blocks))
    assert found == (
        *(sum(p.numel() for p in of) for of in (towers, model.parameters())),
        config.get_text_config().num_hidden_layers,
    )
    assert estimate_memory(config, RUN).peak_bytes > 0


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_blocks_may_return_more_than_hidden_states_and_read_weights(lora_rank: int) -> None:
    assert estimate_memory(
        tf.GlmMoeDsaConfig(num_hidden_layers=6, hidden_size=64, vocab_size=100, n_routed_experts=8),
        dataclasses.replace(RUN, lora_rank=lora_rank),
    ).peak_bytes


def test_it_is_the_text_model_and_shards_of_the_tower() -> None:
    config = CONFIGS["llava"]()
    whole, text = (estimate_memory(each, RUN).breakdown for each in (config, tf.LlamaConfig(**TEXT)))
    towers = sum(one.elements for group in build_skeleton(config, RUN).towers for one in group.parameters)
    more = {name: size - text.get(name, 0) for name, size in whole.items()}
    assert more.pop("parameters (shards)") == pytest.approx(towers * 2 / RUN.num_gpus, rel=0.05)
    assert not any(more.values()), more


# --- experts, beside what a real layer of them keeps -------------------------------------------------------

EXPERTS_JOB: dict[str, Any] = {
    "num_gpus": 2,
    "micro_batch_size": 1,
    "seq_length": 512,
    "attention_mask": False,
}


def test_checkpointed_blocks_keep_what_their_routers_chose() -> None:
    each = 512 * (128 * 2 + 8 * 8)  # the input in bfloat16, and eight indices of a token
    said, dense = (
        estimate_memory(_experts(mlp_only_layers=layers), fs.Run(**EXPERTS_JOB, sac_ratio=1))
        for layers in ([], [0, 1, 2, 3])
    )
    assert (said.activation_bytes, dense.activation_bytes) == (4 * each, 4 * 512 * 128 * 2)
    assert said.breakdown["activations of checkpointed blocks"] % each == 0


def test_ranks_that_share_out_experts_gather_fewer_of_them() -> None:
    run = {**EXPERTS_JOB, "num_gpus": 4, "sac_ratio": 1}
    alone, shared = (estimate_memory(EXPERTS, fs.Run(**run, ep_size=n)).breakdown for n in (1, 4))
    assert shared["parameters (shards)"] == alone["parameters (shards)"]
    assert shared["gathered parameters"] < alone["gathered parameters"]
    plans = fs.plan_run(EXPERTS, num_gpus=4, seq_length=512, global_batch_size=8, gpu="h100", ep_size=4)
    assert all(plan.run.ep_size == 4 and plan.time.exchange > 0 for plan in plans)
    assert "ep_size=4" in plans[0].code()
