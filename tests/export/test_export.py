"""Exports against ``save_pretrained`` of the unsharded model, and against ``from_pretrained``."""

import json
import os
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import fsdp_sft as fs
from fsdp_sft._tensors import gather
from fsdp_sft.export import hf, target
from tests.harness.architectures import tiny_architecture
from tests.harness.composed import composed
from tests.harness.hf_folders import difference, plain, save_tiny, tensors_of
from tests.harness.models import FLOAT32, full, ragged_batches, tiny_model
from tests.harness.quantised_folders import mxfp4_folder
from tests.harness.ranks import device_here, mesh_here, on_ranks, run_distributed
from tests.harness.trained import assert_same

FAMILIES = ["llama", "qwen2", "qwen2-tied", "mixtral", "gpt2", "gemma3", "t5", "bert"]
HSDP = {"dp_replicate": 2}
INDEX = "model.safetensors.index.json"


def _json(path: Path) -> Any:
    return {
        key: value for key, value in json.loads(path.read_text()).items() if key != "transformers_version"
    }


# What transformers 4 reads, beside what `save_pretrained` writes: tests/export/test_carried.py.
FORMER = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "num_experts")


def _assert_same_folder(actual: Path, expected: Path) -> None:
    split = (expected / INDEX).exists()
    if "mixtral" not in actual.name or not split:  # there it counts views of a tensor as the whole tensor
        assert sorted(os.listdir(actual)) == sorted([*os.listdir(expected), "README.md"])
        for name in os.listdir(expected):
            if name.endswith(".json"):
                found, wanted = _json(actual / name), _json(expected / name)
                assert {**found, **wanted} == found, name
                assert found.keys() - wanted.keys() <= set(FORMER), name
    index = _json(actual / INDEX)["weight_map"] if split else {}
    for file in actual.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert not split or {n for n, f in index.items() if f == file.name} == set(opened.keys())
    assert_same(tensors_of(actual), tensors_of(expected))


@pytest.mark.parametrize(
    ("ranks", "mesh_shape", "families"),
    [(2, {}, FAMILIES), (1, None, ["qwen2-tied", "mixtral"]), (4, HSDP, ["qwen2-tied", "mixtral"])],
    ids=["2", "1", "4"],
)
@on_ranks()
def test_the_folder_is_what_save_pretrained_writes(
    ranks: int, mesh_shape: dict[str, int] | None, families: list[str], tmp_path: Path
) -> None:
    rank = torch.distributed.get_rank()
    for family in families:
        for dtype, size in ((torch.float32, 20_000), (torch.bfloat16, "5GB")):
            name = f"{tmp_path}/{family}-{dtype}"
            plain = tiny_model(family, seed=3).to(dtype)
            if rank == 0:
                plain.save_pretrained(f"{name}-expected", max_shard_size=size)
            model = tiny_model(family, seed=3).to(device_here())
            if mesh_shape is not None:
                fs.shard_model(model, mesh=mesh_here(**mesh_shape))
            rng, config = torch.get_rng_state(), model.config.to_dict()
            out = fs.export_hf(model, f"{name}-actual", dtype=dtype, max_shard_size=size)
            assert torch.equal(torch.get_rng_state(), rng)
            assert model.config.to_dict() == config
            if rank == 0:
                assert os.listdir(tmp_path).count(f".tmp-{out.name}") == 0
                _assert_same_folder(out, Path(f"{name}-expected"))
                assert_same(type(plain).from_pretrained(out, dtype=dtype).state_dict(), plain.state_dict())
                if family == "llama":
                    assert type(tf.AutoModelForCausalLM.from_pretrained(out)) is type(plain)


@on_ranks(2)
def test_other_tensors(tmp_path: Path) -> None:
    """0-dim and integer buffers, modules kept in float32, a trained sharded model, dtype=None."""
    model = tiny_model("llama", seed=3, dtype=torch.bfloat16)
    inner = model.model
    inner.register_buffer("steps", torch.tensor(12345678901))
    inner.register_buffer("ratio", torch.tensor(3.5))
    inner.register_buffer("seen", torch.tensor([True, False, True]))
    inner.register_buffer("scratch", torch.ones(2), persistent=False)
    model._keep_in_fp32_modules_strict = {"input_layernorm"}
    fs.shard_model(model, mesh=mesh_here())
    fs.export_hf(model, f"{tmp_path}/out")
    fs.export_hf(model, f"{tmp_path}/own", dtype=None)
    if torch.distributed.get_rank() == 0:
        found = tensors_of(Path(tmp_path, "out"))
        values = {"steps": 12345678901, "ratio": 3.5, "seen": [True, False, True]}
        assert {name: found[f"model.{name}"].tolist() for name in values} == values
        assert "model.scratch" not in found
        dtypes = {"input_layernorm": torch.float32, "mlp.up_proj": torch.bfloat16}
        assert {name: found[f"model.layers.0.{name}.weight"].dtype for name in dtypes} == dtypes
        assert {t.dtype for t in tensors_of(Path(tmp_path, "own")).values()} >= {torch.float32, torch.int64}
        said = [_json(tmp_path / name / "config.json")["dtype"] for name in ("own", "out")]
        assert said == ["float32", "bfloat16"]


@on_ranks(2)
def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    rank, model = torch.distributed.get_rank(), tiny_model("qwen2-tied", seed=3)
    fs.shard_model(model, mesh=mesh_here())
    if rank == 0:
        os.makedirs(f"{tmp_path}/empty")
    with pytest.raises(ValueError, match="dtype"):
        fs.export_hf(model, f"{tmp_path}/new", dtype=torch.int8)
    before = {name: full(p).clone() for name, p in model.named_parameters()}

    def full_disk(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for failing, module, name in (
        (1, gather, "values_of"),
        (0, hf, "write_early"),
        (0, target, "publish"),
        (0, hf, "create"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(module, name, full_disk)
            with pytest.raises(OSError, match="No space left"):
                fs.export_hf(model, f"{tmp_path}/new")
        torch.distributed.barrier()
        assert sorted(os.listdir(tmp_path)) == ["empty"]
        torch.distributed.barrier()
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))  # leaves the root gathered
    assert fs.export_hf(model, f"{tmp_path}/empty", dtype=torch.float32) == Path(tmp_path, "empty")
    torch.distributed.barrier()
    for name, tensor in tensors_of(Path(tmp_path, "empty")).items():
        assert torch.equal(before[name], tensor)


@on_ranks(2)
def test_the_config_is_that_of_the_weights(tmp_path: Path) -> None:
    """What checkpointing turned off is on in the config, and it says whether the weights are tied."""
    model = tiny_model("qwen2-tied")
    fs.apply_sac(model, "1/2")
    fs.shard_model(model, mesh=mesh_here())
    out = fs.export_hf(model, f"{tmp_path}/tied")
    assert model.config.use_cache is False
    if torch.distributed.get_rank() == 0:
        config = _json(out / "config.json")
        assert (config["use_cache"], config["tie_word_embeddings"]) == (True, True)

    apart = tiny_model("qwen2-tied")
    apart.lm_head.weight = nn.Parameter(apart.lm_head.weight.detach() + 1)
    apart.generation_config = None
    head = apart.lm_head.weight.detach().clone()
    fs.shard_model(apart, mesh=mesh_here())
    out = fs.export_hf(apart, f"{tmp_path}/apart", dtype=torch.float32)
    if torch.distributed.get_rank() == 0:
        assert _json(out / "config.json")["tie_word_embeddings"] is False
        loaded = tf.AutoModelForCausalLM.from_pretrained(out)
        assert torch.equal(loaded.lm_head.weight, head)
        assert not torch.equal(loaded.get_input_embeddings().weight, head)


# A dtype that its modules ask for; layers without positions; an infinity in the config; names renamed
# only where another is there too.
@pytest.mark.parametrize(
    "name",
    [
        "ApertusForCausalLM",
        "BeamForCausalLM",
        "Mamba2ForCausalLM",
        "Kimi_K25ForConditionalGeneration",
    ],
)
def test_a_class_of_its_own_kind(name: str, tmp_path: Path) -> None:
    tiny_architecture(name).to(torch.bfloat16).save_pretrained(tmp_path / name)
    model = plain(tmp_path / name, dtype=torch.bfloat16)
    fs.export_hf(model, tmp_path / "out")
    folders = (tmp_path / "out", tmp_path / name)  # the first keeps some in float32
    assert_same(*({key: value.float() for key, value in tensors_of(at).items()} for at in folders))
    assert difference(model, plain(tmp_path / "out", dtype=torch.bfloat16)) == []


@pytest.mark.parametrize(
    ("module", "name", "other"),
    [
        ("lm_head", "weight", "model.embed_tokens.weight"),
        ("model.layers.1.mlp.up_proj", "weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.1", "mlp", "model.layers.0.mlp"),
    ],
    ids=["head", "projection", "block"],
)
def test_what_is_shared_without_a_word_in_the_config_is_written_for_each(
    module: str, name: str, other: str, tmp_path: Path
) -> None:
    model = tiny_model("llama").eval()
    setattr(model.get_submodule(module), name, attrgetter(other)(model))
    ids = torch.arange(3, 11).view(2, 4)
    expected = model(input_ids=ids).logits
    again = tf.AutoModelForCausalLM.from_pretrained(
        fs.export_hf(model, tmp_path / "out", dtype=torch.float32)
    )
    assert torch.equal(again.eval()(input_ids=ids).logits, expected)


# --- the tensors that are handed over, beside the files of an export ---------------------------------------

HANDED = ("llama", "qwen2-tied", "mixtral", "gpt2")
SHARED: dict[str, dict[str, Any]] = {
    "hsdp": {"mesh": {"dp_replicate": 2}},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "shared experts": {"ep_size": 2},
}


def _others(model: Any, folder: Path, dtype: torch.dtype | None = torch.bfloat16) -> list[str]:
    """Names of tensors that are handed over otherwise than the export into a folder has them."""
    fs.export_hf(model, folder, dtype=dtype)
    found = {name: tensor.cpu() for name, tensor in fs.iter_hf_tensors(model, dtype=dtype)}
    written = tensors_of(folder)
    return [
        name
        for name in found | written
        if name not in found
        or name not in written
        or found[name].dtype != written[name].dtype
        or not torch.equal(found[name], written[name])
    ]


@pytest.mark.parametrize("ranks", [1, 3])
@on_ranks()
def test_they_are_those_of_an_export(ranks: int, tmp_path: Path) -> None:
    for family in HANDED:
        model = tiny_model(family)
        assert _others(model, tmp_path / f"{family}-plain", None) == []
        fs.shard_model(model, mesh=mesh_here())
        assert _others(model, tmp_path / family) == []
        fs.evaluate(model, ragged_batches(1))
        assert _others(model, tmp_path / f"{family}-float32", torch.float32) == []


def _check_shared(folder: Path, options: dict[str, Any]) -> None:
    model: Any = composed(
        folder / "base",
        mesh=mesh_here(**options.pop("mesh", {})),
        mp_policy=FLOAT32,
        **options,
    )
    assert _others(model, folder / "out") == []


@pytest.mark.parametrize("how", SHARED)
def test_on_other_meshes(how: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "mixtral")
    run_distributed(_check_shared, 4 if how == "hsdp" else 2, tmp_path, SHARED[how])


def _check_adapters(folder: Path) -> None:
    from peft import LoraConfig

    lora = LoraConfig(
        r=2,
        target_modules=["o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    model: Any = fs.load_pretrained(
        folder / "base", mesh=mesh_here(), peft_config=lora, frozen_dtype="stored"
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    fs.train_step(model, ragged_batches(1), optimizer)
    assert _others(model, folder / "out") == []
    assert not torch.equal(
        *(tensors_of(folder / of)["model.layers.0.self_attn.o_proj.weight"] for of in ("out", "base"))
    ), "adapters are merged into both"
    fs.train_step(model, ragged_batches(1), optimizer)


def test_adapters_on_a_packed_base(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="adapters need the 'peft' extra")
    mxfp4_folder(tmp_path / "base")
    run_distributed(_check_adapters, 2, tmp_path)
