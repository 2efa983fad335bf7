"""verify_packing: models that keep rows apart pass, all others are refused, on all ranks alike."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as tf
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft.sampling import verify
from tests.harness.device import mesh_here
from tests.harness.models import VOCAB, full, tiny_model
from tests.harness.packs import assert_same
from tests.harness.ranks import run_distributed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "mixtral"])
def test_models_that_keep_rows_apart_pass(family: str, attention: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, attn_implementation=attention, use_cache=True).to(dtype)
    report = fs.verify_packing(model, max_length=100)
    assert report.error < (2e-6 if dtype == torch.float32 else 3e-2)
    assert report.leak == 0 or report.leak < 4 * report.noise
    assert report.unpacked > 0.5


def fresh(cls: str, **config: Any) -> Any:
    """A model as its class initialises it: the smallest signal there is."""
    torch.manual_seed(0)
    config_cls = getattr(tf, cls.replace("ForCausalLM", "") + "Config")
    return getattr(tf, cls)(config_cls(vocab_size=VOCAB, **config))


SMALL = {"hidden_size": 32, "num_hidden_layers": 3}
HEADS = {**SMALL, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
LEAKING = {
    "state (Mamba)": lambda: fresh("MambaForCausalLM", **SMALL),
    "state (Mamba 2)": lambda: fresh("Mamba2ForCausalLM", **SMALL, num_heads=8, head_dim=8, n_groups=2),
    "state (RWKV)": lambda: fresh("RwkvForCausalLM", **SMALL, attention_hidden_size=32),
    "some layers with a state (Jamba)": lambda: fresh(
        "JambaForCausalLM", **HEADS, attn_layer_period=2, attn_layer_offset=1, num_experts=2
    ),
    "ALiBi (Bloom)": lambda: fresh("BloomForCausalLM", hidden_size=32, n_layer=3, n_head=4),
    "ALiBi (Falcon)": lambda: fresh("FalconForCausalLM", **SMALL, num_attention_heads=4, alibi=True),
}
if tf.__version__ >= "5.24":  # counts by row there
    del LEAKING["ALiBi (Falcon)"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LEAKING)
def test_models_that_do_not_keep_rows_apart_are_refused(kind: str, dtype: torch.dtype) -> None:
    model = LEAKING[kind]().to(dtype)
    with pytest.raises(fs.PackingError, match=f"not kept apart by {type(model).__name__} with .* attention"):
        fs.verify_packing(model, max_length=64)


class Wrapped(tf.LlamaForCausalLM):
    """Llama with another way to call it."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool = True, **inputs: Any) -> Any:
        return super().forward(input_ids, **self.changed(input_ids, {"use_cache": use_cache, **inputs}))


class Deaf(Wrapped):
    def changed(self, input_ids: torch.Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "position_ids": None}


class Caching(Wrapped):
    def changed(self, input_ids: torch.Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "use_cache": True}


class CountsByIndex(Wrapped):
    """Keeps rows apart, but position 0 is that of the pack."""

    def changed(self, input_ids: torch.Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        if (positions := inputs.get("position_ids")) is None:
            return inputs
        starts = (positions == 0).cumsum(-1)
        seen = (starts[:, :, None] == starts[:, None]).tril()[:, None]
        index = torch.arange(input_ids.shape[1])[None]
        return {**inputs, "position_ids": index**2 // 16, "attention_mask": seen}


@pytest.mark.parametrize(
    ("cls", "match"),
    [
        (Deaf, "not kept apart by Deaf"),
        (Caching, "not kept apart by Caching"),
        (CountsByIndex, "not kept apart by CountsByIndex"),
    ],
)
def test_what_a_forward_may_do_wrong_is_found(cls: type, match: str) -> None:
    model = tiny_model("llama")
    model.__class__ = cls
    with pytest.raises(fs.PackingError, match=match):
        fs.verify_packing(model, max_length=16)


def test_an_effect_that_only_long_packs_have_is_found_at_their_length() -> None:
    # Llama 4 scales the attention of its layers without rotation by a token's index, from floor_scale on.
    options = {**HEADS, "num_hidden_layers": 4, "head_dim": 8, "floor_scale": 96, "attn_scale": 2.0}
    torch.manual_seed(0)
    config = tf.Llama4TextConfig(vocab_size=VOCAB, intermediate_size_mlp=48, num_local_experts=2, **options)
    model = tf.Llama4ForCausalLM(config)
    assert fs.verify_packing(model, max_length=64).error < 1e-5
    with pytest.raises(fs.PackingError, match="shorter max_length if only long packs fail"):
        fs.verify_packing(model, max_length=400)


def test_weights_that_are_not_finite_are_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with pytest.raises(fs.PackingError, match=r"alone nan.*not finite"):
        fs.verify_packing(model, max_length=64)


def test_a_pack_may_be_longer_than_the_positions_a_model_has() -> None:
    model = tiny_model("gpt2")
    assert fs.verify_packing(model, max_length=1000).error < 1e-5, "128 positions, rows of at most 128"


def state_of(model: Any) -> dict[str, Any]:
    return {
        "parameters": {n: full(p.detach()).clone() for n, p in model.named_parameters()},
        "gradients": {
            n: None if p.grad is None else full(p.grad).clone() for n, p in model.named_parameters()
        },
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "lengths": {n: getattr(m, "max_seq_len_cached", None) for n, m in model.named_modules()},
        "random": torch.get_rng_state(),
        "cache": model.config.use_cache,
    }


class Counting(Wrapped):
    def changed(self, input_ids: torch.Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        self.calls.add_(1)
        return inputs


def test_the_model_is_left_as_it_was() -> None:
    # Dynamic frequencies are buffers that a long forward replaces; dropout is random.
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = tiny_model("llama", rope_parameters=rope, attention_dropout=0.5, max_position_embeddings=64)
    model.model.layers[1].eval()
    model(input_ids=torch.randint(0, VOCAB, (1, 9))).logits.sum().backward()
    before = state_of(model)
    model.model.rotary_emb(torch.zeros(1, 90, 8), torch.arange(90)[None])
    assert not torch.equal(model.model.rotary_emb.inv_freq, before["buffers"]["model.rotary_emb.inv_freq"])
    model.model.rotary_emb(torch.zeros(1, 9, 8), torch.arange(9)[None])
    before = state_of(model)
    fs.verify_packing(model, max_length=64)
    assert_same(state_of(model), before)
    model.register_buffer("calls", torch.zeros(()))
    model.__class__ = Counting
    before = state_of(model)
    fs.verify_packing(model, max_length=64)
    assert_same(state_of(model), before)
    model.__class__ = Caching
    with pytest.raises(fs.PackingError):
        fs.verify_packing(model, max_length=64)
    assert_same(state_of(model), before)


def verify_sharded(family: str, dtype: torch.dtype | None, attention: str) -> dict[str, float]:
    model = tiny_model(family, attn_implementation=attention, use_cache=True)
    fs.apply_sac(model, "1/3")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    fs.shard_model(model, mesh=mesh_here(), mp_policy=policy)
    before = state_of(model)
    report = fs.verify_packing(model, max_length=100)
    assert_same(state_of(model), before)
    return vars(report)


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("mixtral", "eager"), ("gpt2", "sdpa")])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_sharded_models_are_verified_in_the_dtype_in_which_they_compute(
    family: str, attention: str, dtype: torch.dtype | None
) -> None:
    report, other = run_distributed(verify_sharded, 2, family, dtype, attention)
    assert report == other
    assert report["tolerance"] == (6e-2 if dtype else 1e-4)


def refuse_sharded(broken_rank: int) -> tuple[str, str]:
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here())
    if torch.distributed.get_rank() == broken_rank:
        forward = model.forward
        model.forward = lambda *args, position_ids=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(fs.PackingError) as caught:
        fs.verify_packing(model, max_length=64)
    return str(caught.value), "".join(caught.value.__notes__)


@pytest.mark.parametrize("broken_rank", [0, 2])
def test_all_ranks_reach_one_verdict(broken_rank: int) -> None:
    first, *others = run_distributed(refuse_sharded, 3, broken_rank)
    assert others == [first] * 2
    assert "not kept apart by LlamaForCausalLM" in first[0]
    assert f"rank {broken_rank} failed first" in first[1]


def test_a_refusal_leaves_the_process_able_to_compile() -> None:
    """``torch.compiler.set_stance`` counts at once, not from ``with`` on."""
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert len(compiled) == 1
    for model in (torch.nn.Linear(2, 2), LEAKING["state (RWKV)"]()):
        with pytest.raises((fs.PackingError, TypeError)):
            fs.verify_packing(model, max_length=64)
    torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("error", "leak", "tolerance", "sound"),
    [
        (0.4, 0.0, 6e-2, True),  # a rounding has sent a token to another expert, and no row moves another
        (0.4, 1e-3, 6e-2, False),
        (1.6, 0.0, 6e-2, False),  # as much as wrong positions make
        (0.4, 0.0, 1e-4, False),  # float32 does not round so far
    ],
)
def test_a_token_of_another_expert_is_told_from_wrong_positions(
    error: float, leak: float, tolerance: float, sound: bool
) -> None:
    report = verify.PackingReport(error, tolerance, leak, 0.0, unpacked=1.7)
    with nullcontext() if sound else pytest.raises(fs.PackingError, match="not kept apart"):
        verify._judge(tiny_model("mixtral"), report)
