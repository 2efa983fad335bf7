"""load_weights: bitwise what plain from_pretrained loads, on any ranks, and no byte more than needed."""

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from fsdp_sft._tensors import reader as read
from fsdp_sft.weights import meta
from tests.harness.composed import composed
from tests.harness.hf_folders import difference, loaded, plain, rewrite, save_tiny, tensors_of
from tests.harness.layouts import register_layout
from tests.harness.models import FLOAT32, full, ragged_batches
from tests.harness.multimodal import tiny
from tests.harness.ranks import device_here, mesh_here, on_ranks, run_distributed

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FAMILIES = ["llama", "qwen2", "qwen2-tied", "gemma3", "mixtral", "gpt2", "t5", "bert"]


def _check_families(folder: Path, families: list[str], mesh_shape: dict[str, int]) -> None:
    for family in families:
        model, oracle = loaded(folder / family, mesh_shape), plain(folder / family)
        assert difference(model, oracle) == [], family
        assert model._weight_conversions is not None
        if family not in ("t5", "bert"):
            batch = ragged_batches(2)[0]
            inputs = {name: batch[name].to(device_here()) for name in ("input_ids", "attention_mask")}
            assert torch.equal(model(**inputs).logits, oracle.to(device_here())(**inputs).logits), family
        # Three ranks cut the rows of four experts into runs of 32 bytes, which are read with their gaps.
        most = 1.5 if (family, dist.get_world_size()) == ("mixtral", 3) else 1.05
        assert model.load_report.job_bytes_read <= most * model.load_report.checkpoint_bytes, family


@pytest.mark.parametrize(
    ("world_size", "mesh_shape"), [(1, {}), (2, {}), (3, {}), (4, {}), (4, {"dp_replicate": 2})]
)
def test_bitwise_what_from_pretrained_loads(
    tmp_path: Path, world_size: int, mesh_shape: dict[str, int]
) -> None:
    for family in FAMILIES:
        save_tiny(tmp_path / family, family)
    run_distributed(_check_families, world_size, tmp_path, FAMILIES, mesh_shape)


# --- bytes and memory ---------------------------------------------------------------------------


def _check_bytes(folder: Path, mesh_shape: dict[str, int]) -> None:
    with mock.patch.object(read, "read_at", wraps=read.read_at) as reads:
        model = loaded(folder, mesh_shape)
    counted, report = sum(len(call.args[2]) for call in reads.call_args_list), model.load_report
    assert report.bytes_read == counted, "after the headers"
    assert difference(model, plain(folder)) == []
    assert report.job_bytes_read <= 1.05 * report.checkpoint_bytes
    if not mesh_shape:
        # A dimension that the ranks do not divide gives the first ones more rows: 101 tokens on 4 ranks, 26.
        assert counted <= 1.05 * report.checkpoint_bytes / dist.get_world_size() * 26 / 25.25
    assert re.fullmatch(r".+ s .*GB/s.*", str(report)), "of one line"


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_every_byte_is_read_once(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path, family, max_shard_size="1MB", hidden_size=64, intermediate_size=96, vocab_size=1001)
    for mesh_shape in ({}, {"dp_replicate": 2}):
        run_distributed(_check_bytes, 4, tmp_path, mesh_shape)


def _check_stored(folder: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model = loaded(folder, {"dp_replicate": 2}, shard={"master_dtype": dtype})
        assert difference(model, plain(folder, dtype=dtype)) == []


def test_replicas_of_any_stored_dtype(tmp_path: Path) -> None:
    """Four dtypes in one checkpoint, into those that a model is trained in."""
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    stored = tensors_of(save_tiny(tmp_path, "mixtral"))  # some of one expert are merged with others'
    stored = {
        name: (tensor.float() * 1.001).to(dtypes[i % 4])  # more digits than bfloat16 has
        for i, (name, tensor) in enumerate(sorted(stored.items()))
    }
    rewrite(tmp_path, stored)
    run_distributed(_check_stored, 4, tmp_path)


@on_ranks(2)
def test_what_one_rank_is_told_or_lacks_is_an_error_on_all(saved: Path) -> None:
    """Ranks told otherwise would send what others do not expect, and gloo would write beyond its memory."""
    model = fs.build_meta_model(saved)
    fs.shard_model(model, mesh=mesh_here(dp_replicate=2), mp_policy=FLOAT32)
    missing: Any = ("error", "initialise")[dist.get_rank()]
    with pytest.raises(ValueError, match="missing='error' and 'initialise', on ranks 0 and 1"):
        fs.load_weights(model, saved, missing=missing)
    with pytest.raises(ValueError, match="seed=0 and 1, on ranks 0 and 1"):
        fs.load_weights(model, saved, seed=dist.get_rank())
    original = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype") == torch.uint8 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("no memory for a buffer")
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(torch.OutOfMemoryError, match="no memory"):
        patch.setattr(torch, "empty", empty)
        fs.load_weights(model, saved)
    fs.load_weights(model, saved)
    assert difference(model, plain(saved)) == []


@pytest.mark.parametrize("reshard_after_forward", [True, 2])
@pytest.mark.parametrize(
    ("saved", "experts"),
    [({"family": "mixtral", "num_local_experts": experts}, experts) for experts in (2, 6)],
    indirect=["saved"],
)
@on_ranks(4)
def test_merged_experts_on_ranks_that_own_few_or_none(
    saved: Path, experts: int, reshard_after_forward: bool | int
) -> None:
    model = loaded(saved, {}, shard={"reshard_after_forward": reshard_after_forward})
    report = model.load_report
    assert report.job_bytes_read <= 1.05 * report.checkpoint_bytes
    assert difference(model, plain(saved)) == []
    gate_up = dict(model.named_parameters())["model.layers.0.mlp.experts.gate_up_proj"]
    chunks = torch.arange(experts).chunk(4)  # of first dimensions only
    owned = [len(chunk) for chunk in chunks] + [0] * (4 - len(chunks))
    if reshard_after_forward is True:
        assert gate_up.to_local().numel() * 4 == gate_up.numel()
    else:
        assert gate_up.to_local().shape[0] == owned[dist.get_rank()]


# --- layouts of older checkpoints --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        "chunk",
        "chunk-columns",
        "interleave",
        "concatenate",
        "concatenate-columns",
        "transpose",
        "rope",
        "renamed",
    ],
)
@on_ranks(3)
def test_layouts_of_older_checkpoints(tmp_path: Path, layout: str) -> None:
    register_layout(layout)
    if dist.get_rank() == 0:
        save_tiny(tmp_path, "llama")
    dist.barrier()
    oracle, model = plain(tmp_path), loaded(tmp_path, {})
    assert difference(model, oracle) == []
    report = model.load_report
    assert report.bytes_read < report.checkpoint_bytes, "each rank reads what its shards are made of"
    assert [str(c) for c in model._weight_conversions] == [str(c) for c in oracle._weight_conversions]


# --- ties, missing keys, frozen and mixed -------------------------------------------------------------------


def _check_loads(folder: Path, mesh_shape: dict[str, int], **options: Any) -> list[str]:
    torch.manual_seed(dist.get_rank())
    model = loaded(folder, mesh_shape, **options)
    assert difference(model, plain(folder)) == []
    return model.load_report.initialised


@pytest.mark.parametrize("head", ["absent", "equal", "different", "alone"])
def test_a_tied_head(tmp_path: Path, head: str) -> None:
    others = tensors_of(save_tiny(tmp_path, "qwen2-tied"))
    embedding = others.pop(EMBEDDING)
    assert HEAD not in others
    stored = {
        "absent": {EMBEDDING: embedding},
        "equal": {EMBEDDING: embedding, HEAD: embedding.clone()},
        "different": {EMBEDDING: embedding, HEAD: embedding.flip(0)},
        "alone": {HEAD: embedding},
    }[head]
    rewrite(tmp_path, others | stored, files=2)
    run_distributed(_check_loads, 2, tmp_path, {})


def test_missing_keys_are_initialised_alike(saved: Path) -> None:
    missing = ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    rewrite(saved, {name: tensor for name, tensor in tensors_of(saved).items() if name not in missing})
    for world_size, shape in [(2, {}), (4, {"dp_replicate": 2})]:
        for initialised in run_distributed(_check_loads, world_size, saved, shape, missing="initialise"):
            assert sorted(initialised) == missing


@pytest.mark.parametrize("saved", [{"family": "qwen2-tied"}], indirect=True)
@on_ranks(2)
def test_loading_again_after_an_evaluation(saved: Path) -> None:
    model = loaded(saved, {})
    batch = {name: value for name, value in ragged_batches(2)[0].items() if name != "labels"}
    with torch.no_grad():
        first = model(**batch).logits  # leaves the root's parameters gathered
        for parameter in model.parameters():
            parameter.zero_()
    fs.load_weights(model, saved)
    assert torch.equal(model(**batch).logits, first)


@pytest.mark.accelerator
@on_ranks(2)
def test_load_pretrained_composes_the_steps(saved: Path) -> None:
    model = fs.load_pretrained(os.path.relpath(saved), mesh=mesh_here(), mp_policy=FLOAT32, sac_ratio="1/3")
    parts = composed(saved, mesh=mesh_here(), mp_policy=FLOAT32, sac_ratio="1/3")
    assert (difference(model, plain(saved)), difference(model, parts)) == ([], [])
    assert (model.load_report.sources, model.name_or_path) == (parts.load_report.sources, str(saved))
    assert fs.train_step(parts, ragged_batches(3), torch.optim.AdamW(parts.parameters(), lr=1e-3)).loss > 0
    assert not fs.train_step(model, ragged_batches(3), torch.optim.AdamW(model.parameters(), lr=1e-3)).skipped
    assert fs.loss_sum(model, ragged_batches(2)[0])[0].isfinite()


# --- checkpoints that store both names of tied weights, on ranks that hold copies of each other's shards ---

REPLICAS = [(2, {"dp_replicate": 2, "dp_shard": 1}), (4, {"dp_replicate": 2})]


@pytest.fixture
def stored_twice(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The names have the same values, but for what a row of the head differs by if a test asks for that."""
    tensors = tensors_of(save_tiny(tmp_path, "qwen2-tied"))
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][70] += getattr(request, "param", 0.0)
    rewrite(tmp_path, tensors, files=2)
    return tmp_path


@pytest.mark.parametrize(("ranks", "mesh_shape"), REPLICAS)
@on_ranks()
def test_the_same_values_under_both_names(stored_twice: Path, ranks: int, mesh_shape: dict[str, int]) -> None:
    model = loaded(stored_twice, mesh_shape)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert difference(model, plain(stored_twice)) == []


@pytest.mark.parametrize("stored_twice", [1.0], indirect=True)
@on_ranks(2)
def test_values_that_differ_where_no_sample_looks(stored_twice: Path) -> None:
    meta._PROBES = 1  # the first row only is seen
    with pytest.raises(fs.CheckpointFormatError, match=r"lm_head.*tie_word_embeddings=False"):
        loaded(stored_twice, {"dp_replicate": 2, "dp_shard": 1})
    model = fs.build_meta_model(stored_twice, tie_word_embeddings=False)
    fs.load_weights(model, stored_twice)
    assert torch.equal(full(model.lm_head.weight), tensors_of(stored_twice)[HEAD].float())


def test_names_that_the_checkpoint_has_otherwise(tmp_path: Path) -> None:
    """A vision-language folder, whose two tensors have other names in it than in the model."""
    tiny("internvl", tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    embedding = tensors["language_model.model.embed_tokens.weight"]
    for apart in (0.0, 1.0):
        rewrite(tmp_path, tensors | {"language_model.lm_head.weight": embedding + apart})
        model = fs.build_meta_model(tmp_path)
        fs.load_weights(model, tmp_path)
        assert difference(model, plain(tmp_path)) == []
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == (not apart)


def _check_converted(folder: Path, mesh_shape: dict[str, int], equal: bool) -> None:
    """The head alone is stored in two parts."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Concatenate, WeightConverter

    converter = WeightConverter(["head_a.weight", "head_b.weight"], "lm_head.weight", [Concatenate(0)])
    conversion_mapping.register_checkpoint_conversion_mapping("Qwen2ForCausalLM", [converter], overwrite=True)
    if equal:
        assert torch.equal(
            full(loaded(folder, mesh_shape).lm_head.weight), tensors_of(folder)[EMBEDDING].float()
        )
    else:
        with pytest.raises(fs.CheckpointFormatError, match="head_b"):
            loaded(folder, mesh_shape)


@pytest.mark.parametrize(("stored_twice", "equal"), [(0.0, True), (1.0, False)], indirect=["stored_twice"])
def test_a_second_name_that_is_converted_is_compared_too(stored_twice: Path, equal: bool) -> None:
    tensors = tensors_of(stored_twice)
    head = tensors.pop(HEAD)
    rewrite(stored_twice, tensors | {"head_a.weight": head[:40], "head_b.weight": head[40:]})
    run_distributed(_check_converted, 4, stored_twice, {"dp_replicate": 2}, equal)


@pytest.mark.parametrize("saved", [{"family": "qwen2-tied"}], indirect=True)
def test_ties_that_to_empty_has_broken_are_made_again(saved: Path) -> None:
    model: Any = fs.build_meta_model(saved)
    model.to_empty(device="cpu")
    fs.load_weights(model, saved)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert difference(model, plain(saved)) == []
