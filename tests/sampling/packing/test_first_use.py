"""A pack on a model that nobody has verified is verified when it first comes up, on all ranks or none."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft.sampling import verify
from tests.harness.device import mesh_here
from tests.harness.losses import with_loss
from tests.harness.models import VOCAB, oracle_loss, ragged_batches, tiny_model
from tests.harness.packs import drawn_rows, gradients_of_separate_rows
from tests.harness.ranks import on_ranks

DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}


def _pack(*lengths: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (1, sum(lengths)), generator=torch.Generator().manual_seed(sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def _leaking(**options: Any) -> Any:
    """ALiBi, which counts tokens from the start of the pack."""
    import transformers as tf

    torch.manual_seed(0)
    return tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4))


def _step(model: Any, *batches: Any, **options: Any) -> Any:
    return fs.train_step(model, list(batches), torch.optim.SGD(model.parameters(), lr=0.1), **options)


def _probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    lengths: list[int] = []
    measure = verify._measure

    def counted(model: Any, length: int) -> Any:
        lengths.append(length)
        return measure(model, length)

    monkeypatch.setattr(verify, "_measure", counted)
    return lengths


def test_an_unverified_model_that_leaks_is_refused_at_the_first_pack() -> None:
    model = _leaking()
    before = {name: p.clone() for name, p in model.named_parameters()}
    padded = {name: value for name, value in _pack(14).items() if name != "position_ids"}
    for call in (
        lambda: _step(model, _pack(5, 9)),
        lambda: _step(model, padded, _pack(5, 9)),
        lambda: _step(model, _pack(5, 9), padded),
        lambda: fs.evaluate(model, [_pack(5, 9)]),
        lambda: fs.causal_lm_loss(model, _pack(5, 9), num_targets=12),
    ):
        with pytest.raises(fs.PackingError, match=r"first pack for this model.*not kept apart.*check=False"):
            call()
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    _step(model, *ragged_batches(2))
    _step(model, {**_pack(14), "position_ids": torch.arange(14)[None]})  # a single row is no pack
    assert not _step(model, _pack(5, 9), check=False).skipped
    assert fs.evaluate(model, [_pack(5, 9)], check=False).num_targets == 12


def test_it_is_verified_once_for_a_model_and_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, model = _probes(monkeypatch), tiny_model("llama")
    _step(model, ragged_batches(1)[0])
    assert lengths == []
    expected, _ = gradients_of_separate_rows(model, rows := drawn_rows(4))
    result = _step(model, fs.PackedCollator(max_length=128)(rows))
    assert result.loss * result.num_targets == pytest.approx(expected, rel=1e-5)
    width = sum(len(row["input_ids"]) for row in rows)
    assert lengths == [max(width, 64)]
    _step(model, _pack(50, 60))
    fs.evaluate(model, [_pack(50, 60)])
    assert len(lengths) == 1, "verified for good"
    model.set_attn_implementation("eager")
    _step(model, _pack(5, 5))
    assert lengths[1:] == [64], "another attention is another model"
    fs.verify_packing(other := tiny_model("llama"), max_length=64)
    del lengths[:]
    _step(other, _pack(5, 9))
    assert lengths == [], "who has called verify_packing pays nothing"
    long = tiny_model("llama", max_position_embeddings=8192)
    monkeypatch.setattr("fsdp_sft.sampling.verify._LONGEST_PROBE", 90)
    _step(long, _pack(60, 60))
    assert lengths == [90], "no longer than that"


@pytest.mark.parametrize("values", ["ones", "padded"])
def test_a_pack_with_a_mask_is_refused(values: str) -> None:
    model, batch = tiny_model("llama"), _pack(5, 9)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if values == "padded":
        batch["attention_mask"][:, -2:] = 0
    for call in (
        lambda: _step(model, batch),
        lambda: fs.evaluate(model, [batch]),
        lambda: fs.loss_sum(model, batch),
        lambda: fs.causal_lm_loss(with_loss(model, impl="logits"), batch, num_targets=3),
    ):
        with pytest.raises(fs.PackingError, match="position_ids that begin anew"):
            call()
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
    model = tiny_model("llama", max_position_embeddings=64, dtype=dtype, **DYNAMIC)
    fs.verify_packing(model, max_length=64)
    for length in (65, 80, 200):
        with pytest.raises(fs.PackingError, match="the longest row of their pack"):
            fs.verify_packing(model, max_length=length)
    _step(model, _pack(40, 60))  # rows below the limit, although the pack is beyond it
    with pytest.raises(fs.PackingError, match="the longest row of their pack"):
        _step(model, _pack(10, 66))
    _step(model, _pack(40, 60))


@on_ranks(2)
def test_ranks_verify_together_although_one_has_a_pack() -> None:
    mesh, rank = mesh_here(), dist.get_rank()
    single = {**_pack(14), "position_ids": torch.arange(14)[None]}
    policy = MixedPrecisionPolicy()
    model = fs.shard_model(_leaking(), mesh=mesh, mp_policy=policy)
    for call in (
        lambda: _step(model, _pack(5, 9) if rank else single),
        lambda: fs.evaluate(model, [_pack(5, 9)] if rank else []),
        lambda: fs.causal_lm_loss(model, _pack(5, 9) if rank else single, num_targets=25),
    ):
        with pytest.raises(fs.PackingError, match="not kept apart"):
            call()
    with pytest.raises(fs.PackingError, match="begin anew"):
        _step(
            model,
            {**single, "attention_mask": torch.ones(1, 14)}
            if rank
            else {**_pack(5, 9), "attention_mask": torch.ones(1, 14)},
        )
    sound = fs.shard_model(
        tiny_model("llama", max_position_embeddings=64, **DYNAMIC), mesh=mesh, mp_policy=policy
    )
    assert not _step(sound, _pack(5, 9) if rank else single).skipped
    with fs.gradient_sync(sound, "none"):  # gradients that wait are there when a longer row is looked at
        fs.causal_lm_loss(sound, _pack(5, 9), num_targets=25).backward()
        with pytest.raises(fs.PackingError, match="longest row"):
            fs.causal_lm_loss(sound, _pack(5, 70) if rank else _pack(5, 9), num_targets=25)
    sound.zero_grad()
    with pytest.raises(fs.PackingError, match="longest row"):
        _step(sound, _pack(5, 70) if rank else _pack(5, 9))
    assert not _step(sound, single if rank else _pack(5, 9)).skipped
