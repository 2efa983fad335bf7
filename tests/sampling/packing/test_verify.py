"""verify_packing: models that keep rows apart pass, all others are refused, on all ranks alike."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft.sampling import verify
from tests.harness.device import mesh_here
from tests.harness.losses import with_loss
from tests.harness.models import FLOAT32, VOCAB, oracle_loss, ragged_batches, tiny_model
from tests.harness.packs import drawn_rows, gradients_of_separate_rows
from tests.harness.ranks import on_ranks, run_distributed


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


def refused(model: Any, match: str, max_length: int = 64) -> None:
    with pytest.raises(fs.PackingError, match=match):
        fs.verify_packing(model, max_length=max_length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LEAKING)
def test_models_that_do_not_keep_rows_apart_are_refused(kind: str, dtype: torch.dtype) -> None:
    model = LEAKING[kind]().to(dtype)
    refused(model, f"not kept apart by {type(model).__name__} with .* attention")


def _counts_by_index(ids: torch.Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
    """Rows are kept apart, but position 0 is that of the pack."""
    if (positions := inputs.get("position_ids")) is None:
        return {}
    starts = (positions == 0).cumsum(-1)
    seen = (starts[:, :, None] == starts[:, None]).tril()[:, None]
    return {"position_ids": torch.arange(ids.shape[1])[None] ** 2 // 16, "attention_mask": seen}


# What a forward puts in the place of its inputs.
WRONG: dict[str, Callable[[torch.Tensor, dict[str, Any]], dict[str, Any]]] = {
    "deaf": lambda ids, inputs: {"position_ids": None},
    "caching": lambda ids, inputs: {"use_cache": True},
    "counts by index": _counts_by_index,
}


@pytest.mark.parametrize("how", WRONG)
def test_what_a_forward_may_do_wrong_is_found(how: str) -> None:
    model = tiny_model("llama")
    forward = model.forward
    model.forward = lambda input_ids, **inputs: forward(input_ids, **inputs | WRONG[how](input_ids, inputs))
    refused(model, "not kept apart by LlamaForCausalLM", max_length=16)


def test_an_effect_that_only_long_packs_have_is_found_at_their_length() -> None:
    # Llama 4 scales the attention of its layers without rotation by a token's index, from floor_scale on.
    options = {**HEADS, "num_hidden_layers": 4, "head_dim": 8, "floor_scale": 96, "attn_scale": 2.0}
    torch.manual_seed(0)
    config = tf.Llama4TextConfig(vocab_size=VOCAB, intermediate_size_mlp=48, num_local_experts=2, **options)
    model = tf.Llama4ForCausalLM(config)
    assert fs.verify_packing(model, max_length=64).error < 1e-5
    refused(model, "shorter max_length if only long packs fail", max_length=400)


def test_weights_that_are_not_finite_are_refused() -> None:
    model = tiny_model("llama")
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    refused(model, r"alone nan.*not finite")


def test_a_pack_may_be_longer_than_the_positions_a_model_has() -> None:
    report = fs.verify_packing(tiny_model("gpt2"), max_length=1000)
    assert report.error < 1e-5, "128 positions, rows of at most 128"


def verify_sharded(family: str, dtype: torch.dtype | None, attention: str) -> dict[str, float]:
    model = tiny_model(family, attn_implementation=attention, use_cache=True)
    fs.apply_sac(model, "1/3")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    fs.shard_model(model, mesh=mesh_here(), mp_policy=policy)
    return vars(fs.verify_packing(model, max_length=100))


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("mixtral", "eager"), ("gpt2", "sdpa")])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_sharded_models_are_verified_in_the_dtype_in_which_they_compute(
    family: str, attention: str, dtype: torch.dtype | None
) -> None:
    report, other = run_distributed(verify_sharded, 2, family, dtype, attention)
    assert (other, report["tolerance"]) == (report, 6e-2 if dtype else 1e-4)


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
    (error, notes), *others = run_distributed(refuse_sharded, 3, broken_rank)
    assert others == [(error, notes)] * 2
    assert "not kept apart by LlamaForCausalLM" in error
    assert f"rank {broken_rank} failed first" in notes


def test_a_refusal_leaves_the_process_able_to_compile() -> None:
    """``torch.compiler.set_stance`` counts at once, not from ``with`` on."""
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    for model in (torch.nn.Linear(2, 2), LEAKING["state (RWKV)"]()):
        assert len(compiled) == 1
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
    error: float, leak: float, tolerance: float, sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = verify.PackingReport(error, tolerance, leak, 0.0, unpacked=1.7)
    monkeypatch.setattr(verify, "_measure", lambda model, length: report)
    with nullcontext() if sound else pytest.raises(fs.PackingError, match="not kept apart"):
        fs.verify_packing(tiny_model("mixtral"), max_length=64)


# --- a pack on a model that nobody has verified is verified when it first comes up, on all ranks or none ----

DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}


def _pack(*lengths: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (1, sum(lengths)), generator=torch.Generator().manual_seed(sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def _step(model: Any, *batches: Any, **options: Any) -> Any:
    return fs.train_step(model, list(batches), torch.optim.SGD(model.parameters(), lr=0.1), **options)


def _are_refused(match: str, *calls: Callable[[], Any]) -> None:
    for call in calls:
        with pytest.raises(fs.PackingError, match=match):
            call()


def test_an_unverified_model_that_leaks_is_refused_at_the_first_pack() -> None:
    model = LEAKING["ALiBi (Bloom)"]()
    before = {name: p.clone() for name, p in model.named_parameters()}
    padded = {name: value for name, value in _pack(14).items() if name != "position_ids"}
    _are_refused(
        r"first pack for this model.*not kept apart.*check=False",
        lambda: _step(model, _pack(5, 9)),
        lambda: _step(model, padded, _pack(5, 9)),
        lambda: _step(model, _pack(5, 9), padded),
        lambda: fs.evaluate(model, [_pack(5, 9)]),
        lambda: fs.causal_lm_loss(model, _pack(5, 9), num_targets=12),
    )
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    _step(model, *ragged_batches(2))
    _step(model, {**_pack(14), "position_ids": torch.arange(14)[None]})  # a single row is no pack
    assert not _step(model, _pack(5, 9), check=False).skipped
    assert fs.evaluate(model, [_pack(5, 9)], check=False).num_targets == 12


def test_it_is_verified_once_for_a_model_and_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, model = Mock(wraps=verify._measure), tiny_model("llama")
    monkeypatch.setattr(verify, "_measure", probe)
    _step(model, ragged_batches(1)[0])
    assert not probe.called
    rows = drawn_rows(4)
    expected, _ = gradients_of_separate_rows(model, rows)
    result = _step(model, fs.PackedCollator(max_length=128)(rows))
    assert result.loss * result.num_targets == pytest.approx(expected, rel=1e-5)
    _step(model, _pack(50, 60))
    fs.evaluate(model, [_pack(50, 60)])
    assert probe.call_count == 1, "verified for good"
    model.set_attn_implementation("eager")
    _step(model, _pack(5, 5))
    assert probe.call_count == 2, "another attention is another model"
    other = tiny_model("llama")
    fs.verify_packing(other, max_length=64)
    _step(other, _pack(5, 9))
    assert probe.call_count == 3, "who has called verify_packing pays nothing"
    monkeypatch.setattr("fsdp_sft.sampling.verify._LONGEST_PROBE", 90)
    _step(tiny_model("llama", max_position_embeddings=8192), _pack(60, 60))
    first = max(sum(len(row["input_ids"]) for row in rows), 64)
    assert [call.args[1] for call in probe.call_args_list] == [first, 64, 64, 90], "tokens of each probe"


@pytest.mark.parametrize("values", ["ones", "padded"])
def test_a_pack_with_a_mask_is_refused(values: str) -> None:
    model, batch = tiny_model("llama"), _pack(5, 9)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if values == "padded":
        batch["attention_mask"][:, -2:] = 0
    _are_refused(
        "position_ids that begin anew",
        lambda: _step(model, batch),
        lambda: fs.evaluate(model, [batch]),
        lambda: fs.loss_sum(model, batch),
        lambda: fs.causal_lm_loss(with_loss(model, impl="logits"), batch, num_targets=3),
    )
    # Left padding with positions that count from the first token is no pack.
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    ids = torch.arange(3, 15).view(2, 6)
    padded = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    padded["labels"][0, 2] = -100  # predicted from padding
    padded["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    total, _ = fs.loss_sum(model, padded)
    alone = [
        oracle_loss(model, [{k: v[i : i + 1, 2 * (1 - i) :] for k, v in padded.items()}]) for i in (0, 1)
    ]
    assert float(total.detach()) == pytest.approx(float(alone[0] * 3 + alone[1] * 5), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_that_depend_on_the_longest_row_are_told_in_any_dtype(dtype: torch.dtype) -> None:
    sizes = {"max_position_embeddings": 64, "attention_dropout": 0.5}
    model = tiny_model("llama", dtype=dtype, **sizes, **DYNAMIC)
    fs.verify_packing(model, max_length=64)
    for length in (65, 80, 200):
        refused(model, "the longest row of their pack", length)
    _step(model, _pack(40, 60))  # rows below the limit, although the pack is beyond it
    _are_refused("the longest row of their pack", lambda: _step(model, _pack(10, 66)))
    _step(model, _pack(40, 60))


@on_ranks(2)
def test_ranks_verify_together_although_one_has_a_pack() -> None:
    mesh, rank = mesh_here(), dist.get_rank()
    single = {**_pack(14), "position_ids": torch.arange(14)[None]}
    model = fs.shard_model(LEAKING["ALiBi (Bloom)"](), mesh=mesh, mp_policy=FLOAT32)
    _are_refused(
        "not kept apart",
        lambda: _step(model, _pack(5, 9) if rank else single),
        lambda: fs.evaluate(model, [_pack(5, 9)] if rank else []),
        lambda: fs.causal_lm_loss(model, _pack(5, 9) if rank else single, num_targets=25),
    )
    masked = {**(single if rank else _pack(5, 9)), "attention_mask": torch.ones(1, 14)}
    _are_refused("begin anew", lambda: _step(model, masked))
    dynamic = tiny_model("llama", max_position_embeddings=64, **DYNAMIC)
    sound = fs.shard_model(dynamic, mesh=mesh, mp_policy=FLOAT32)
    mine = _pack(5, 70) if rank else _pack(5, 9)
    assert not _step(sound, _pack(5, 9) if rank else single).skipped
    with fs.gradient_sync(sound, "none"):  # gradients that wait are there when a longer row is looked at
        fs.causal_lm_loss(sound, _pack(5, 9), num_targets=25).backward()
        _are_refused("longest row", lambda: fs.causal_lm_loss(sound, mine, num_targets=25))
    sound.zero_grad()
    _are_refused("longest row", lambda: _step(sound, mine))
    assert not _step(sound, single if rank else _pack(5, 9)).skipped
