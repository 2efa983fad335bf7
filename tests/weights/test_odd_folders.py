"""What repositories seldom hold, and odd forms of them: each loads bitwise right, or ends in an error."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn

import fsdp_sft as fs
from fsdp_sft._model.configs import config_of, tokenizer_of
from fsdp_sft.weights import provenance
from fsdp_sft.weights.resolve import open_checkpoint, resolve_folder
from tests.harness.composed import composed
from tests.harness.hf_folders import difference, loaded, plain, rewrite, save_tiny, tensors_of
from tests.harness.hub_server import COMMIT, serve, use_hub
from tests.harness.models import FLOAT32, full, tiny_model
from tests.harness.quantised_folders import configure
from tests.harness.ranks import device_here, mesh_here, on_ranks, run_distributed
from tests.harness.remote_code import keep_code_in, plain_with_code, save_with_code

INDEX = "model.safetensors.index.json"
BLOOM = {"vocab_size": 101, "hidden_size": 32, "n_layer": 2, "n_head": 4}
LATENT = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "q_lora_rank": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
# As published: each expert (in, out), in tensors that are too large to be read by every rank.
LARGE = {
    "hidden_size": 512, "intermediate_size": 64, "moe_intermediate_size": 384, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 101,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}  # fmt: skip
TOWER = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 512,
    "deepstack_visual_indexes": [0],
}  # fmt: skip


def _check(folder: Path, mesh_shape: dict[str, int]) -> None:
    assert difference(loaded(folder, mesh_shape), plain(folder)) == []


# --- meshes and shapes ------------------------------------------------------------------------------------


TINIEST = {"hidden_size": 2, "intermediate_size": 3, "num_attention_heads": 1, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("saved", "mesh_shape"),
    [
        (TINIEST, {}),
        (TINIEST, {"dp_replicate": 2}),
        (TINIEST, {"dp_replicate": 4, "dp_shard": 1}),
        ({"family": "mixtral", "num_local_experts": 12}, {}),  # expert 10 comes after 9, not after 1
    ],
    indirect=["saved"],
)
def test_fewer_rows_than_ranks_and_more_experts_than_a_digit(saved: Path, mesh_shape: dict[str, int]) -> None:
    run_distributed(_check, 4, saved, mesh_shape)


# --- dtypes, headers and indices ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.complex64])
def test_weights_in_a_dtype_that_is_no_weight(saved: Path, dtype: torch.dtype) -> None:
    tensors = tensors_of(saved)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].abs().float().to(dtype)
    rewrite(saved, tensors)
    with pytest.raises(fs.CheckpointFormatError, match=r"model\.norm\.weight.*(stored as|imaginary part)"):
        fs.load_weights(fs.build_meta_model(saved), saved)


def test_a_file_without_tensors(saved: Path) -> None:
    rewrite(saved, {})
    model = fs.build_meta_model(saved)
    with pytest.raises(fs.CheckpointFormatError, match="embed_tokens") as caught:
        fs.load_weights(model, saved)
    assert set(caught.value.missing) == set(model.state_dict())
    assert pickle.loads(pickle.dumps(caught.value)).missing == caught.value.missing
    fs.load_weights(model, saved, missing="initialise")


def _index(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map


def _set_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_files_in_folders_below(saved: Path) -> None:
    (saved / "parts" / "more").mkdir(parents=True)
    for path in saved.glob("*.safetensors"):
        path.rename(saved / "parts" / "more" / path.name)
    _set_index(saved, {key: f"parts/more/{name}" for key, name in _index(saved).items()})
    run_distributed(_check, 2, saved, {})


@pytest.mark.parametrize(
    "index",
    [
        {"a": "nul\0.safetensors"},
        {"a": "x" * 5000 + ".safetensors"},
        {"a": "config.json"},
        {"a": "C:model.safetensors"},
        {"a": "..\\model.safetensors"},
        {"a": "absent.safetensors"},
        {"a": "folder.safetensors"},
        {"a": "loop.safetensors"},
        {"a": 1},
        {},
        [],
        *(b"\xff\xfe", b"", b"null", b'{"weight_map": null}', b"[" * 100_000),
    ],
    ids=range(16),
)
def test_indices_that_lie_or_are_none(saved: Path, index: Any) -> None:
    (saved / "folder.safetensors").mkdir()
    (saved / "loop.safetensors").symlink_to("loop.safetensors")
    if isinstance(index, bytes):
        (saved / INDEX).write_bytes(index)
    else:
        _set_index(saved, index)
    with pytest.raises(fs.CheckpointFormatError):
        open_checkpoint(saved)


def test_a_name_in_two_files_is_the_one_that_the_index_says(saved: Path) -> None:
    weight_map, oracle = _index(saved), plain(saved)
    key, owner = next(iter(weight_map.items()))
    for name in sorted(set(weight_map.values()) - {owner}):
        save_file(
            {**load_file(saved / name), key: torch.full((1,), 7.0)}, saved / name, metadata={"format": "pt"}
        )
    assert difference(loaded(saved), oracle) == []


# transformers has such a type's config, and its model in the class of another; files name either class.
@pytest.mark.parametrize("architecture", ["InternLM3ForCausalLM", "LlamaForCausalLM"])
def test_a_type_of_model_without_a_class_of_its_own(architecture: str, tmp_path: Path) -> None:
    oracle = tf.AutoModelForCausalLM.from_config(
        tf.AutoConfig.for_model("internlm3", hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    )
    oracle.save_pretrained(tmp_path / "model")
    configure(tmp_path / "model", architectures=[architecture])
    model = loaded(tmp_path / "model")
    again = tf.AutoModelForCausalLM.from_pretrained(
        fs.export_hf(model, tmp_path / "out", dtype=torch.float32)
    )
    assert [(type(m.config), difference(m.train(), oracle)) for m in (model, again)] == [
        (type(oracle.config), [])
    ] * 2


# --- the Hub's cache --------------------------------------------------------------------------------------


def test_a_snapshot_whose_blobs_lie_on_another_disk(saved: Path, tmp_path: Path) -> None:
    """As the Hub's cache has it: links to files under their hashes; one leads elsewhere, as DVC's do."""
    oracle = plain(saved)
    repo = tmp_path / "cache" / "models--someone--model"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (tmp_path / "disk").mkdir()
    (repo / "blobs").symlink_to(tmp_path / "disk")
    for number, path in enumerate(sorted(saved.iterdir())):
        shutil.copy(path, repo / "blobs" / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    (tmp_path / "shortcut").symlink_to(snapshot)
    for name in (snapshot, tmp_path / "shortcut"):
        assert difference(loaded(name), oracle) == []
    victim = next(snapshot.glob("*.safetensors"))
    victim.unlink()
    victim.symlink_to((saved / victim.name).rename(tmp_path / "disk" / "annexed"))
    assert difference(loaded(snapshot), oracle) == []


def _from_the_hub(address: str, cache: Path, shared: bool, folder: Path) -> str:
    use_hub(address, cache if shared else cache / str(dist.get_rank()))
    found = resolve_folder("someone/model")
    assert difference(loaded(found, {}), plain(folder)) == []
    return str(found)


@pytest.mark.parametrize("shared", [True, False])
def test_each_cache_gets_each_file_once(saved: Path, tmp_path: Path, shared: bool) -> None:
    (saved / "unrelated.safetensors").write_bytes(b"not to be downloaded")
    with serve(saved) as (address, downloads):
        found = run_distributed(_from_the_hub, 2, address, tmp_path / "cache", shared, saved)
    assert all(path.endswith(COMMIT) for path in found)
    assert (len(set(found)) == 1) == shared
    weights_files = [name for name in downloads if name.endswith(".safetensors")]
    assert "unrelated.safetensors" not in weights_files
    assert len(weights_files) == (1 if shared else 2) * (len(list(saved.glob("*.safetensors"))) - 1)
    run_distributed(_from_the_hub, 2, address, tmp_path / "cache", shared, saved)  # the hub is gone


def test_a_single_file_goes_before_an_index(saved: Path) -> None:
    """As in transformers; the parts are not even looked at."""
    parts = {path: path.read_bytes() for path in saved.glob("model*") if path.is_file()}
    rewrite(saved, {name: tensor + 1 for name, tensor in tensors_of(saved).items()})
    for path, data in parts.items():
        path.write_bytes(data)
    assert difference(loaded(saved), plain(saved)) == []


# --- conversions that do what none does yet ---------------------------------------------------------------


UNTRACEABLE: dict[str, Callable[[Any], Any]] = {
    "joined with zeros": lambda t: torch.cat([t, torch.zeros(1, 4)]),
    "other bits": lambda t: t.view(torch.int32),
    "padded": lambda t: torch.nn.functional.pad(t, (0, 1)),
    "copied": lambda t: torch.empty(3, 4).copy_(t),
    "flipped": lambda t: t.flip(0),
    "indexed": lambda t: t[[2, 0, 1]],
    "a number": lambda t: float(t[0, 0]),
    "rounded": lambda t: t.to(torch.bfloat16),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_code_that_is_not_traced_says_so(name: str) -> None:
    UNTRACEABLE[name](torch.zeros(3, 4))
    with pytest.raises(provenance.UntraceableError):
        UNTRACEABLE[name](provenance.source("a", (3, 4), torch.float32))


def test_a_cast_that_keeps_every_value_is_followed() -> None:
    given = provenance.source("a", (3, 4), torch.bfloat16)
    assert given[:2].float().pieces == given[:2].pieces


def _check_padded(folder: Path) -> None:
    """A conversion that adds zeros of its own."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Pad(ConversionOps):
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
            (tensors,) = input_dict.values()
            tensor = tensors[0] if isinstance(tensors, list) else tensors
            return {target_patterns[0]: torch.cat([tensor, torch.zeros(16, tensor.shape[1]).to(tensor)])}

        @property
        def reverse_op(self) -> ConversionOps:
            return self

    converter = WeightConverter("mlp.short.weight", "mlp.up_proj.weight", [Pad()])
    conversion_mapping.register_checkpoint_conversion_mapping("LlamaForCausalLM", [converter], overwrite=True)
    with pytest.raises(fs.CheckpointFormatError, match=r"up_proj.*save_original_format=False"):
        loaded(folder, {})


def test_a_conversion_that_adds_numbers_of_its_own_is_refused(saved: Path) -> None:
    tensors = tensors_of(saved)
    for name in [name for name in tensors if "up_proj" in name]:
        tensors[name.replace("up_proj", "short")] = tensors.pop(name)[:-16]
    rewrite(saved, tensors)
    run_distributed(_check_padded, 2, saved)


# --- code of the checkpoint: refused without trust, bitwise right with it, offline -------------------------


def _imported(modules: Path) -> bool:
    return any(path.name == "imported" for path in modules.rglob("*"))


def test_refused_without_trust(tmp_path: Path) -> None:
    keep_code_in(tmp_path / "modules")
    with pytest.raises(fs.CheckpointFormatError, match="trust_remote_code"):
        fs.build_meta_model(save_with_code(tmp_path / "model"))
    assert not _imported(tmp_path / "modules")


def _check_code(folder: Path, modules: Path, together: bool) -> None:
    keep_code_in(modules if together else modules / str(dist.get_rank()))
    model: Any = fs.load_pretrained(folder, mesh=mesh_here(), mp_policy=FLOAT32, trust_remote_code=True)
    oracle = plain_with_code(folder)
    assert (difference(model, oracle), float(full(model.model.norm.offset))) == ([], 0.625)
    ids = torch.arange(3, 21, device=device_here()).view(2, 9)
    assert torch.equal(model(input_ids=ids).logits, oracle.to(device_here())(input_ids=ids).logits)
    assert _imported(modules)


@pytest.mark.parametrize("together", [True, False], ids=["one module cache", "a module cache each"])
def test_bitwise_with_trust(tmp_path: Path, together: bool) -> None:
    run_distributed(_check_code, 2, save_with_code(tmp_path / "model"), tmp_path / "modules", together)


def _check_hub(address: str, cache: Path, modules: Path, folder: Path) -> None:
    use_hub(address, cache)
    keep_code_in(modules / str(dist.get_rank()))
    assert not list(resolve_folder("someone/model").glob("*.py"))
    # Under bfloat16 the buffers are those of a plain bfloat16 model.
    options: dict[str, Any] = {"mesh": mesh_here(), "mp_policy": FLOAT32}
    with pytest.raises(fs.CheckpointFormatError, match="trust_remote_code"):
        fs.load_pretrained("someone/model", **options)
    model = fs.load_pretrained("someone/model", **options, trust_remote_code=True)
    assert difference(model, plain_with_code(folder)) == []


def test_from_the_hub(tmp_path: Path) -> None:
    folder = save_with_code(tmp_path / "model")
    with serve(folder) as (address, _):
        run_distributed(_check_hub, 2, address, tmp_path / "cache", tmp_path / "modules", folder)


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_a_config_cannot_fetch_code_for_its_attention(field: str, saved: Path) -> None:
    configure(saved, **{field: "someone/kernel"})
    with pytest.raises(
        fs.CheckpointFormatError, match=r"'someone/kernel', native code .*attn_implementation="
    ):
        fs.build_meta_model(saved)
    assert fs.build_meta_model(saved, attn_implementation="sdpa").config._attn_implementation == "sdpa"
    with pytest.raises(fs.CheckpointFormatError, match="native code"):
        config_of(saved)


def test_code_is_not_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers asks at the terminal if it is not told, where "y" runs the code of the folder."""
    folder = save_with_code(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["modeling.Tokenizer", None]}})
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    keep_code_in(tmp_path / "modules")
    for read in (config_of, tokenizer_of):
        with pytest.raises(ValueError, match="trust_remote_code"):
            read(folder)
    assert not _imported(tmp_path / "modules")


# --- a bare class, other formats beside, layers behind the last, transposed experts, adapters ---------------


def test_a_config_that_names_the_class_without_a_head(tmp_path: Path) -> None:
    tf.BloomForCausalLM(tf.BloomConfig(**BLOOM)).transformer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BloomModel"]
    model = loaded(tmp_path)
    oracle = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    assert type(model) is type(oracle)
    assert difference(model, oracle) == []
    assert type(fs.build_meta_model(tmp_path, architectures=["BloomModel"])) is tf.BloomModel


def test_layers_behind_the_last_are_left_unread_if_the_config_counts_them(tmp_path: Path) -> None:
    tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**LATENT)).save_pretrained(tmp_path / "base")
    further = {
        f"{name}.weight": torch.ones(32, 64)
        for name in ("model.layers.2.eh_proj", "model.layers.3.eh_proj", "visual.layers.2.proj")
    }
    rewrite(tmp_path / "base", tensors_of(tmp_path / "base") | further)
    with pytest.raises(
        fs.CheckpointFormatError, match=r"place for model\.layers\.3\S* visual\.layers\.2.*'ignore'"
    ):
        loaded(tmp_path / "base")
    model = loaded(tmp_path / "base", unexpected="ignore")
    fs.export_hf(model, tmp_path / "out", dtype=torch.float32)
    assert model.config.num_nextn_predict_layers == 1, "the model's own"
    assert difference(model, plain(tmp_path / "out")) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("consolidated.safetensors", "put the repository's model*.safetensors beside"),
        ("tiny-Q8_0.gguf", "GGUF, the format of llama.cpp, is not read"),
        ("shard-00001-model-00001-of-00001.safetensors", "HuggingFaceStorageReader(folder)"),
    ],
)
def test_files_of_another_format_alone(other: str, words: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, max_shard_size="1GB")
    (tmp_path / "model.safetensors").rename(tmp_path / other)
    with pytest.raises(fs.CheckpointFormatError, match=re.escape(words)):
        loaded(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / other).read_bytes())
    assert difference(loaded(tmp_path), plain(tmp_path)) == []
    (tmp_path / "config.json").unlink()
    with pytest.raises(fs.CheckpointFormatError, match=re.escape(words)):
        fs.build_meta_model(tmp_path)


@pytest.mark.parametrize("saved", [{"family": "mixtral"}], indirect=True)
def test_experts_under_another_name_are_named(saved: Path) -> None:
    stored = {name: value for name, value in tensors_of(saved).items() if ".experts." not in name}
    rewrite(saved, stored | {"model.layers.0.mlp.switch_mlp.up_proj.weight": torch.ones(4, 4)})
    with pytest.raises(fs.CheckpointFormatError, match=r"no values for .*experts.*; it has .*switch_mlp\.up"):
        loaded(saved)


def _check_transposed(folder: Path) -> None:
    model = fs.load_pretrained(folder, mesh=mesh_here(), mp_policy=FLOAT32)
    report = model.load_report
    assert report.job_bytes_read <= 1.05 * report.checkpoint_bytes, "each rank reads its own experts alone"
    assert [problem for problem in difference(model, plain(folder)) if ".visual." not in problem] == [], (
        "but for the tower, which is frozen"
    )


def test_large_experts_that_are_stored_transposed(tmp_path: Path) -> None:
    config = tf.Qwen3VLMoeConfig(text_config=LARGE, vision_config=TOWER)
    tf.Qwen3VLMoeForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(tmp_path)
    rewrite(
        tmp_path, {n: t.mT.contiguous() if ".experts." in n else t for n, t in tensors_of(tmp_path).items()}
    )
    run_distributed(_check_transposed, 2, tmp_path)


def test_an_adapter_beside_weights_is_not_left_out(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, own, out = tmp_path / "base", tmp_path / "own", tmp_path / "out"
    tiny_model("llama").save_pretrained(base)
    lora = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tf.AutoModelForCausalLM.from_pretrained(base), lora).eval()
    adapted.save_pretrained(base)
    advice = "PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(out)"
    with pytest.raises(fs.CheckpointFormatError, match=re.escape(advice)):
        loaded(base)
    own.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (base / name).rename(own / name)
    whole = tf.AutoModelForCausalLM.from_pretrained(base)
    peft.PeftModel.from_pretrained(whole, own).merge_and_unload().save_pretrained(out)
    ids = torch.arange(3, 21).view(2, 9)
    assert torch.allclose(loaded(out).eval()(input_ids=ids).logits, adapted(input_ids=ids).logits, atol=1e-5)
    with pytest.raises(fs.CheckpointFormatError, match=r"config\.json"):
        fs.build_meta_model(own)


# --- the class that is asked for is the class that is built ------------------------------------------------

CLASSIFIER = "LlamaForSequenceClassification"


@on_ranks(2)
def test_a_class_that_the_config_does_not_name(saved: Path) -> None:
    model = composed(
        saved,
        mesh=mesh_here(),
        missing="initialise",
        unexpected="ignore",
        config_overrides={"architectures": [CLASSIFIER], "num_labels": 3},
    )
    torch.manual_seed(0)
    expected = tf.LlamaForSequenceClassification.from_pretrained(saved, num_labels=3, dtype=torch.float32)
    assert (type(model).__name__, model.config.architectures) == (f"FSDP{CLASSIFIER}", [CLASSIFIER])
    assert difference(model, expected.train()) == []
    assert type(fs.build_meta_model(saved, architectures=CLASSIFIER)).__name__ == CLASSIFIER


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["MistralForCausalLM"], "models of type 'mistral'.*'llama'"),
        (["LlamaForNothing"], "has no LlamaForNothing"),
        ([], "architectures="),
        ([7], "has no 7"),
    ],
)
def test_a_class_that_cannot_be_built(saved: Path, names: Any, words: str) -> None:
    with pytest.raises(fs.CheckpointFormatError, match=words):
        fs.build_meta_model(saved, architectures=names)


class Actor(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.mark.parametrize("saved", [{"family": "mixtral"}], indirect=True)
@on_ranks(2)
def test_a_module_around_a_model_is_told_what_to_pass(saved: Path, tmp_path: Path) -> None:
    model: Any = Actor(fs.build_meta_model(saved))
    fs.shard_model(model, mesh=mesh_here())
    for call in (
        lambda: fs.load_weights(model, saved),
        lambda: fs.export_hf(model, tmp_path / "out"),
        lambda: fs.check_export(tmp_path / "out", model=model),
        lambda: fs.iter_hf_tensors(model),
    ):
        with pytest.raises(TypeError, match=r"pass the one inside, model\.model, which"):
            call()
    with pytest.raises(TypeError, match="load_full_state_dict reads a module of one's own"):
        fs.load_weights(nn.Linear(2, 2), saved)
