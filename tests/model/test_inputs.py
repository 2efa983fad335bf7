"""Inputs: packs of vision-language models, caches that a forward does not name, ids without a row."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_sft as fs
from fsdp_sft._model.forward import check_ids, no_cache, rows_of as rows_known
from tests.harness.long_rows import PACKED, batch_of, plain_gradients, rows_of
from tests.harness.models import FLOAT32, VOCAB, full, largest_error, ragged_batches, tiny_model
from tests.harness.multimodal import CONFIGS, tiny
from tests.harness.ranks import device_here, mesh_here, on_ranks

LENGTHS = [6, 15, 1, 9]


def _spread_out(family: str) -> Any:
    """A model whose weights are so large that rows which see each other show."""
    model = tiny(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_rows_are_kept_apart(family: str) -> None:
    model = _spread_out(family)
    assert no_cache(model) == {"use_cache": False}
    report = fs.verify_packing(model, max_length=64)
    assert report.error < report.tolerance < report.unpacked
    pack = batch_of(rows_of(LENGTHS), PACKED)
    ids, positions = pack["input_ids"], pack["position_ids"]
    together = model.eval()(input_ids=ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(input_ids=row, use_cache=False).logits for row in ids.split(LENGTHS, 1)], 1)
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-4), "in a loop of one's own too"


def test_models_of_text_are_left_alone() -> None:
    model = tiny_model("llama")
    fs.verify_packing(_spread_out("qwen3-vl"), max_length=64)
    fs.verify_packing(model, max_length=64)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert no_cache(tiny_model("gpt2")) == {"use_cache": False}
    assert no_cache(torch.nn.Linear(2, 2)) == {}


@pytest.mark.parametrize(("family", "cp"), [*((f, 2) for f in CONFIGS), ("qwen3-vl", 1), ("llava", 1)])
@on_ranks(2)
def test_packs_train_as_rows_alone(family: str, cp: int) -> None:
    model = _spread_out(family)
    oracle = copy.deepcopy(model)
    fs.freeze_towers(model)
    mesh = mesh_here(cp=cp)
    model = fs.shard_model(model.to(device_here()), mesh=mesh, mp_policy=FLOAT32)
    if cp > 1:
        fs.use_context_parallel(model, mesh=mesh)
    rows = [rows_of(LENGTHS, seed=seed) for seed in range(dist.get_world_size() // cp)]
    window = [batch_of(rows[dist.get_rank() // cp], PACKED)]
    before = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    result = fs.train_step(model, window, optimizer, max_grad_norm=None)
    loss, gradients = plain_gradients(oracle, [row for own in rows for row in own])
    assert result.loss == pytest.approx(loss, rel=1e-5)
    moved = {name: before[name] - full(p.detach()) for name, p in model.named_parameters()}
    assert not any(moved.pop(name).any() for name in moved.keys() - gradients.keys())
    assert largest_error(moved, gradients) <= 2e-4


# --- ids without a row are refused on the host, on all ranks, before anything has changed ------------------


def _batch(key: str = "input_ids", value: int = VOCAB) -> dict[str, torch.Tensor]:
    batch = {name: tensor.clone() for name, tensor in ragged_batches(1)[0].items()}
    batch[key][0, 2] = value
    return batch


LAYERS: dict[str, type[nn.Module]] = {
    "get_input_embeddings": nn.Embedding,
    "get_output_embeddings": nn.Linear,
}
WRONG = [("input_ids", VOCAB), ("input_ids", -1), ("labels", VOCAB), ("labels", -1)]


@pytest.mark.parametrize("kind", ["sharded", "ddp"])
@on_ranks(2)
def test_one_rank_with_an_id_too_many(kind: str) -> None:
    model: Any = tiny_model("qwen2-tied")
    if kind == "sharded":
        fs.shard_model(model, mesh=mesh_here())
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model.to(device_here()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for key, value in WRONG:
        batch = _batch(key, value) if dist.get_rank() == 1 else ragged_batches(1)[0]
        with pytest.raises(fs.BatchError, match=rf"{key} has {value} \(row 0, position 2\).*0 to 100"):
            fs.train_step(model, [ragged_batches(1)[0], batch], optimizer)
        with pytest.raises(fs.BatchError, match=f"{key} has {value}"):
            fs.evaluate(model, [batch])
    assert all(torch.equal(full(old), full(new)) for old, new in zip(before, model.parameters(), strict=True))
    assert not fs.train_step(model, [ragged_batches(1)[0]], optimizer).skipped


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"trainable_token_indices": [3, 5]},
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    ],
    ids=str,
)
def test_the_rows_are_seen_through_adapters(overrides: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft", reason="adapters need the 'peft' extra")
    options = {"target_modules": ["q_proj"], **overrides}
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options))
    assert [rows_known(model, *layer) for layer in LAYERS.items()] == [VOCAB, VOCAB]


def test_of_models_from_elsewhere_nothing_is_known() -> None:
    model = nn.Sequential(nn.Embedding(4, 4))
    assert [rows_known(model, *layer) for layer in LAYERS.items()] == [None, None]
    check_ids(model, _batch())


def test_a_loss_of_ones_own_has_labels_of_its_own() -> None:
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {
        "loss_fn": lambda model, batch: model(batch["input_ids"]).logits.float().sum() * 1e-3,
        "count_fn": lambda batch: 1,
    }
    fs.train_step(model, [_batch("labels", -1)], optimizer, **options)
    with pytest.raises(fs.BatchError, match="input_ids has 101"):
        fs.train_step(model, [_batch()], optimizer, **options)


def test_ids_of_images_may_lie_beyond_the_rows() -> None:
    """As PaliGemma and Gemma 3 have them: such ids are replaced before they are looked up."""
    model = tiny_model("llama")
    model.config.image_token_id = VOCAB + 3
    check_ids(model, _batch(value=VOCAB + 3))
    with pytest.raises(fs.BatchError):
        check_ids(model, _batch(value=VOCAB + 2))
    model.config.image_token_id, model.config.eos_token_id = None, VOCAB + 3
    with pytest.raises(fs.BatchError):
        check_ids(model, _batch(value=VOCAB + 3))
