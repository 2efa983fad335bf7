"""Frozen weights that stay packed, beside the same values in float32 shards, and beside one plain process."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from torch.distributed.fsdp import CPUOffloadPolicy

import fsdp_sft as fs
from fsdp_sft._tensors.boxes import local_of
from fsdp_sft._tensors.packed_shard import PackedShard
from fsdp_sft.shard.packing import packed_weights
from tests import plain as plainly
from tests.harness.composed import composed
from tests.harness.hf_folders import plain, rewrite
from tests.harness.models import FLOAT32, TINY, full, oracle_gradients, oracle_loss, ragged_batches
from tests.harness.quantised_folders import (
    configure,
    deepseek_folder,
    mxfp4_folder,
    quantise,
    quantised,
)
from tests.harness.quantised_weights import FORMATS, in_fp8, in_nf4, is_packed
from tests.harness.ranks import mesh_here, on_ranks, run_distributed
from tests.harness.trained import assert_same, everything, spread

peft = pytest.importorskip("peft", reason="adapters need the 'peft' extra")

BATCHES = ragged_batches(4)
SIZES = {**TINY, "hidden_size": 64, "intermediate_size": 86, "num_hidden_layers": 2}
SPARSE = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(**SIZES, **SPARSE, num_experts=4, head_dim=16),
    "gpt-oss": lambda: tf.GptOssConfig(
        **SIZES | {"intermediate_size": 64}, num_local_experts=4, head_dim=16, num_experts_per_tok=2
    ),
    "deepseek-v3": lambda: tf.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4}, **SPARSE, **LATENT, **GROUPS, v_head_dim=8
    ),
}


WIDTHS = ("hidden_size", "intermediate_size", "num_hidden_layers")
PACKED = {"nf4": in_nf4, "fp8": in_fp8}


def make(folder: Path, family: str, kind: str, *, seed: int = 0) -> None:
    """``base`` in bfloat16, and ``values`` with what its packed weights hold."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[family]()).bfloat16()
    model.save_pretrained(folder / "base")
    model.float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if is_packed(name, weight):
                weight.copy_(PACKED[kind](weight))
    model.save_pretrained(folder / "values")


def lora(family: str) -> Any:
    options = {"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
    if family == "gpt-oss":
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        return peft.LoraConfig(target_modules=["o_proj"], target_parameters=experts, **options)
    return peft.LoraConfig(target_modules="all-linear", **options)


def loaded(folder: Path, kind: Any, family: str = "llama", *, mesh: Any = None, **options: Any) -> Any:
    """A model with adapters on a frozen base that is kept so."""
    common = {"mp_policy": FLOAT32, "peft_config": lora(family), "frozen_dtype": kind}
    return composed(folder, mesh=mesh or mesh_here(), **common | options)


def step_of(optimizer: torch.optim.Optimizer, model: Any, batches: list[Any]) -> float:
    """The loss of a step of all batches, shared out among the ranks."""
    return fs.train_step(model, batches[dist.get_rank() :: dist.get_world_size()], optimizer).loss


def train(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """(the loss, how the step of rate 1 moved what is trained)."""
    spread(model)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: full(p).detach().clone() for name, p in trained.items()}
    window = BATCHES[: 4 - 4 % ranks][rank::ranks]
    result = fs.train_step(model, window, torch.optim.SGD(trained.values(), lr=1.0), max_grad_norm=None)
    after = model.named_parameters()  # which FSDP2 may have replaced
    return result.loss, {n: before[n] - full(p).detach() for n, p in after if p.requires_grad}


def held(model: Any) -> tuple[int, int]:
    """(values of the packed weights of this rank, bytes that they take)."""
    shards = [s for p in model.parameters() if isinstance(s := local_of(p), PackedShard)]
    assert shards
    return sum(s.numel() for s in shards), sum(s.rows.numel() for s in shards)


def check(folder: Path, family: str, kind: str, shape: dict[str, int], options: dict[str, Any]) -> Any:
    mesh = mesh_here(**shape)
    dense = loaded(folder / "values", torch.float32, family, mesh=mesh, **options)
    expected = train(dense)
    model = loaded(folder / "base", kind, family, mesh=mesh, **options)
    found = train(model)
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])
    count, size = held(model)
    names = {name for name, p in model.named_parameters() if isinstance(local_of(p), PackedShard)}
    assert names == {name for name, p in dense.named_parameters() if is_packed(name, p)} or kind == "stored"
    return found, size * 8 / count


RANKS: dict[str, tuple[int, dict[str, int]]] = {
    **{str(ranks): (ranks, {}) for ranks in (1, 2, 3, 4)},
    "2x2": (4, {"dp_replicate": 2}),
}
PLACES = {"llama": RANKS, "qwen3-moe": RANKS, "gpt-oss": ("2", "4", "2x2"), "deepseek-v3": ("2", "2x2")}


def beside_plain(folder: Path, family: str, found: tuple[float, dict[str, torch.Tensor]]) -> None:
    oracle = peft.get_peft_model(plain(folder / "values"), lora(family)).train()
    oracle.load_state_dict(fs.add_adapters(plain(folder / "values"), lora(family)).state_dict())
    spread(oracle)
    loss, gradients = oracle_gradients(oracle, BATCHES)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    expected = {name: gradients.get(name, torch.zeros_like(moved)) for name, moved in found[1].items()}
    torch.testing.assert_close(found[1], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "family", "place"),
    [
        *(
            (kind, family, place)
            for kind in ("nf4", "stored")
            for family in CONFIGS
            for place in PLACES[family]
        ),
        *(("fp8", family, "2") for family in ("llama", "qwen3-moe")),
    ],
)
def test_steps_are_those_on_the_values(kind: str, family: str, place: str, tmp_path: Path) -> None:
    published(tmp_path, family) if kind == "stored" else make(tmp_path, family, kind)
    ranks, shape = RANKS[place]
    found, bits = run_distributed(check, ranks, tmp_path, family, kind, shape, {})[0]
    # Tiny rows are filled up to 8 bytes, and shards to equal parts.
    least = {"nf4": 6 if ranks < 3 else 9, "stored": 8 if family == "gpt-oss" else 16, "fp8": 16}
    assert bits < least[kind], "bits of a value"
    if ranks < 3:
        beside_plain(tmp_path, family, found)


OPTIONS: dict[str, dict[str, Any]] = {
    "recomputed": {"sac_ratio": 1},
    "kept gathered": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "shared experts": {  # which have no adapters
        "ep_size": 2,
        "peft_config": peft.LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"),
    },
}


@pytest.mark.parametrize(
    ("kind", "family", "how"),
    [
        *(("nf4", "qwen3-moe", how) for how in OPTIONS),
        *(("stored", family, "shared experts") for family in ("gpt-oss", "deepseek-v3")),
    ],
)
def test_with_other_options(kind: str, family: str, how: str, tmp_path: Path) -> None:
    published(tmp_path, family) if kind == "stored" else make(tmp_path, family, kind)
    run_distributed(check, 2, tmp_path, family, kind, {}, OPTIONS[how])


def published(folder: Path, family: str, block: int = 16, *, seed: int = 0) -> None:
    """``base`` in a quantised format, and ``values`` with what it holds."""
    torch.manual_seed(seed)
    if family in ("gpt-oss", "deepseek-v3"):
        values = (mxfp4_folder if family == "gpt-oss" else deepseek_folder)(folder / "base")
        shutil.copytree(folder / "base", folder / "values")
        configure(folder / "values", quantization_config=None)
        rewrite(folder / "values", {name: value.float() for name, value in values.items()})
        return
    tf.AutoModelForCausalLM.from_config(CONFIGS[family]()).bfloat16().save_pretrained(folder / "base")
    shutil.copytree(folder / "base", folder / "values")
    quantise(folder / "base", folder / "values", block=block)


@pytest.mark.parametrize("form", ["nvfp4", "int4", "fp8 per channel"])
def test_other_formats_as_stored(form: str, tmp_path: Path) -> None:
    sizes = {**SIZES, "intermediate_size": 128}
    quantised(tmp_path, FORMATS[form], "llama", **{key: sizes[key] for key in WIDTHS})
    for name, folder in (("base", "stored"), ("values", "published")):
        (tmp_path / folder).rename(tmp_path / name)
    _, bits = run_distributed(check, 2, tmp_path, "llama", "stored", {}, {})[0]
    assert bits < 9


def _resume(folder: Path, kind: str, root: str, begin: bool) -> Any:
    """Two steps in one go, or one that is saved, and the other on other ranks."""
    model = loaded(folder / "base", kind)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if begin:
        loss = step_of(optimizer, model, ragged_batches(6, seed=0))
        fs.save_checkpoint(folder / root, 1, model=model, optimizer=optimizer)
        size = sum(path.stat().st_size for path in (folder / root).rglob("*.safetensors"))
        packed = held(model)[0] * dist.get_world_size()
        assert size < 40_000 + 4 * packed, "the step has no packed weights"
        return loss
    fs.load_checkpoint(folder / root, model=model, optimizer=optimizer)
    loss = step_of(optimizer, model, ragged_batches(6, seed=1))
    fs.export_hf(model, folder / "merged", dtype=torch.float32)
    fs.export_adapter(model, folder / "adapter")
    return loss


@pytest.mark.parametrize("kind", ["nf4", "stored"])
def test_a_step_names_its_base_and_exports_are_merged(kind: str, tmp_path: Path) -> None:
    make(tmp_path, "llama", "nf4") if kind == "nf4" else published(tmp_path, "llama")
    losses = [
        run_distributed(_resume, ranks, tmp_path, kind, "steps", begin)[0]
        for ranks, begin in ((2, True), (3, False))
    ]
    torch.manual_seed(0)
    oracle = fs.add_adapters(plain(tmp_path / "values"), lora("llama")).train()
    optimizer = torch.optim.AdamW([p for p in oracle.parameters() if p.requires_grad], lr=1e-2)
    for step, found in enumerate(losses):
        loss = oracle_loss(oracle, ragged_batches(6, seed=step))
        expected, _ = plainly.step(oracle, [loss], [optimizer], max_norm=1.0)
        assert found == pytest.approx(expected, rel=1e-5)
    read = peft.PeftModel.from_pretrained(plain(tmp_path / "values"), tmp_path / "adapter")
    merged = read.merge_and_unload()
    assert_same(everything(plain(tmp_path / "merged")), everything(merged))
    trained, expected = (dict(one.named_parameters()) for one in (merged, oracle.merge_and_unload()))
    torch.testing.assert_close(trained, expected, rtol=1e-3, atol=1e-4)


def _check_other_values(folder: Path) -> None:
    """Bases of the same shapes: the one that was saved, one in other files, and one changed by hand."""
    model = loaded(folder / "base", "nf4")
    fs.save_checkpoint(folder / "steps", 1, model=model)
    other = loaded(folder / "values", "nf4")
    assert fs.load_checkpoint(folder / "steps", model=other).step == 1, "packed again it holds the same"
    for kind, said in (
        ("fp8", "load that base with frozen_dtype="),
        (torch.float32, "packed as .*load that base"),
    ):
        with pytest.raises(fs.CheckpointMismatchError, match=said):
            fs.load_checkpoint(folder / "steps", model=loaded(folder / "base", kind))
    other = loaded(folder / "other", "nf4")
    with pytest.raises(fs.CheckpointMismatchError, match="this model has another"):
        fs.load_checkpoint(folder / "steps", model=other)
    model.load_state_dict(other.state_dict())
    with pytest.raises(fs.CheckpointMismatchError, match="this model has another"):
        fs.load_checkpoint(folder / "steps", model=model)
    fs.load_weights(model, folder / "base")
    fs.load_checkpoint(folder / "steps", model=model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_is_not_resumed_on_another_base_of_the_same_shapes(ranks: int, tmp_path: Path) -> None:
    make(tmp_path, "llama", "nf4")
    torch.manual_seed(1)
    tf.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).bfloat16().save_pretrained(tmp_path / "other")
    run_distributed(_check_other_values, ranks, tmp_path)


def _with_base(folder: Path, family: str, kind: str, begin: bool) -> Any:
    """A step that has its base is written; then loaded into models of another base, or of none."""
    source = folder / ("one" if begin else "other") / "base"
    model = loaded(source, kind, family)
    if begin:
        fs.save_checkpoint(folder / "steps", 1, model=model, include_base=True, async_=True).wait()
        return fs.evaluate(model, BATCHES).loss
    with pytest.raises(fs.CheckpointMismatchError, match="has its base packed as"):
        fs.load_checkpoint(folder / "steps", model=loaded(source, None, family))
    losses = [fs.evaluate(model, BATCHES).loss]
    fs.load_checkpoint(folder / "steps", model=model)
    losses.append(fs.evaluate(model, BATCHES).loss)
    fs.save_checkpoint(folder / "again", 1, model=model)
    if kind == "nf4":  # nothing but the step is needed
        model = fs.add_adapters(fs.build_meta_model(source), lora(family))
        fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32, frozen_dtype=kind)
        with pytest.raises(ValueError, match=r"on the meta device .* and have no values"):
            fs.save_checkpoint(folder / "none", 1, model=model)
        with pytest.raises(fs.CheckpointMismatchError, match="whose frozen weights are packed"):
            fs.load_full_state_dict(model, folder / "none.safetensors")
        fs.load_checkpoint(folder / "steps", model=model)
        assert fs.evaluate(model, BATCHES).loss == losses[1]
        fs.load_checkpoint(folder / "again", model=model)
    return losses


@pytest.mark.parametrize(("family", "kind"), [("llama", "nf4"), ("gpt-oss", "stored"), ("qwen3-moe", "nf4")])
def test_a_step_with_its_base(family: str, kind: str, tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "other")):
        folder = tmp_path / name
        published(folder, family, seed=seed) if kind == "stored" else make(folder, family, kind, seed=seed)
    expected = run_distributed(_with_base, 2, tmp_path, family, kind, True)[0]
    other, found = run_distributed(_with_base, 3, tmp_path, family, kind, False)[0]
    assert found == pytest.approx(expected, rel=1e-6)
    assert other != pytest.approx(expected, rel=1e-4)


def _check_again(folder: Path) -> None:
    """Other files of a format are read into a model that has run; files in 16 bits are refused."""
    model = loaded(folder / "one" / "base", "stored")
    first = fs.evaluate(model, BATCHES).loss
    fs.load_weights(model, folder / "other" / "base")
    other = loaded(folder / "other" / "base", "stored")
    assert fs.evaluate(model, BATCHES).loss == fs.evaluate(other, BATCHES).loss != first
    assert train(model)[0] == train(other)[0]
    with pytest.raises(fs.CheckpointMismatchError, match="build the model anew"):
        fs.load_weights(model, folder / "one" / "values")
    fs.save_checkpoint(folder / "steps", 1, model=loaded(folder / "one" / "values", torch.float32))
    with pytest.raises(fs.CheckpointMismatchError, match="none of them packed"):
        fs.load_checkpoint(folder / "steps", model=model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_read_again_after_a_forward(ranks: int, tmp_path: Path) -> None:
    for name, block in (("one", 16), ("other", 32)):
        published(tmp_path / name, "llama", block=block)
    run_distributed(_check_again, ranks, tmp_path)


def _check_refused(folder: Path) -> None:
    mesh = mesh_here()
    for kind, options, said in (
        ("nf4", {"peft_config": None}, "no matrix in a block is frozen"),
        ("int4", {}, "'stored', 'nf4', 'fp8'"),
        ("stored", {}, "this model was not built from one"),
        ("nf4", {"reshard_after_forward": 2}, "take True or False"),
    ):
        with pytest.raises(ValueError, match=said):
            loaded(folder, kind, mesh=mesh, **options)
    model = fs.shard_model(fs.add_adapters(plain(folder), lora("llama")), mesh=mesh, frozen_dtype="nf4")
    held(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    assert step_of(optimizer, model, BATCHES) > 0
    fs.save_full_state_dict(model, folder / "full.safetensors")
    shard = next(p for p in model.parameters() if isinstance(local_of(p), PackedShard))
    for call, error, said in (
        (lambda: torch.save(model.state_dict(), folder / "state.pt"), TypeError, "is not pickled"),
        (lambda: model.to(torch.float16), fs.UnsupportedModelError, "kept packed"),
        (shard.full_tensor, fs.UnsupportedModelError, "kept packed"),
    ):
        with pytest.raises(error, match=said):
            call()
    assert re.search(
        r"bfloat16, float32, nf4 .*\n.*packed: 14 weights, [45]\.\d\d bits a value",
        fs.describe_sharding(model),
        re.DOTALL,
    )


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "llama", "nf4")
    run_distributed(_check_refused, 2, tmp_path / "base")


@on_ranks(1)
def test_routers_and_what_lies_outside_of_blocks_are_not_packed() -> None:
    config = tf.Qwen3MoeConfig(**SIZES, **SPARSE, num_experts=40, head_dim=16)
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)
    fs.shard_model(fs.add_adapters(model, lora("llama")), mesh=mesh_here(), frozen_dtype="nf4")
    names = packed_weights(model).names
    assert {name.rpartition("layers.0.")[2] for name in names if "layers.0." in name} == {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.experts.{part}_proj" for part in ("gate_up", "down")),
    }
    assert all("layers." in name for name in names)
