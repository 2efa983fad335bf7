"""What checkpoints seldom hold, and code that they bring: each loads bitwise right, or ends in an error."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_sft._model.configs import config_of, tokenizer_of
from fsdp_sft.errors import CheckpointFormatError
from fsdp_sft.weights import build_meta_model, load_weights, provenance
from fsdp_sft.weights.load import load_pretrained
from fsdp_sft.weights.resolve import open_checkpoint, resolve_folder
from tests.harness.device import device_here, mesh_here
from tests.harness.hf_folders import difference, loaded, plain, rewrite, save_tiny, tensors_of
from tests.harness.hub_server import COMMIT, serve, use_hub
from tests.harness.models import full
from tests.harness.quantised_folders import configure
from tests.harness.ranks import run_distributed
from tests.harness.remote_code import keep_code_in, plain_with_code, save_with_code

FLOAT32 = MixedPrecisionPolicy()
INDEX = "model.safetensors.index.json"


def _check(folder: Path, mesh_shape: dict[str, int]) -> None:
    assert difference(loaded(folder, mesh_shape), plain(folder)) == []


# --- meshes and shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh_shape", [{}, {"dp_replicate": 2}, {"dp_replicate": 4, "dp_shard": 1}])
def test_fewer_rows_than_ranks(tmp_path: Path, mesh_shape: dict[str, int]) -> None:
    save_tiny(
        tmp_path,
        vocab_size=101,
        hidden_size=2,
        intermediate_size=3,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    run_distributed(_check, 4, tmp_path, mesh_shape)


def test_more_experts_than_one_digit(tmp_path: Path) -> None:
    """Stacked by number, not by name: 10 comes after 9."""
    save_tiny(tmp_path, "mixtral", num_local_experts=12)
    run_distributed(_check, 3, tmp_path, {})


# --- dtypes, headers and indices ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.complex64])
def test_weights_in_a_dtype_that_is_no_weight(saved: Path, dtype: torch.dtype) -> None:
    tensors = tensors_of(saved)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].abs().float().to(dtype)
    rewrite(saved, tensors)
    with pytest.raises(CheckpointFormatError, match=r"model\.norm\.weight.*(stored as|imaginary part)"):
        load_weights(build_meta_model(saved), saved)


def test_a_file_without_tensors(saved: Path) -> None:
    rewrite(saved, {})
    model = build_meta_model(saved)
    with pytest.raises(CheckpointFormatError, match="embed_tokens") as caught:
        load_weights(model, saved)
    assert set(caught.value.missing) == set(model.state_dict())
    assert pickle.loads(pickle.dumps(caught.value)).missing == caught.value.missing
    load_weights(model, saved, missing="initialise")


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
    with pytest.raises(CheckpointFormatError):
        open_checkpoint(saved)


def test_a_name_in_two_files_is_the_one_that_the_index_says(saved: Path) -> None:
    weight_map, oracle = _index(saved), plain(saved)
    key, owner = next(iter(weight_map.items()))
    for name in sorted(set(weight_map.values()) - {owner}):
        save_file(
            {**load_file(saved / name), key: torch.full((1,), 7.0)}, saved / name, metadata={"format": "pt"}
        )
    assert difference(loaded(saved), oracle) == []


# --- the Hub's cache --------------------------------------------------------------------------------------


def test_a_snapshot_whose_blobs_lie_on_another_disk(saved: Path, tmp_path: Path) -> None:
    """As the Hub's cache has it: links to files under their hashes."""
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
        assert difference(loaded(name), plain(saved)) == []
    victim = next(snapshot.glob("*.safetensors"))
    victim.unlink()
    victim.symlink_to(next(saved.glob("*.safetensors")))
    with pytest.raises(CheckpointFormatError, match="leads out"):
        open_checkpoint(snapshot)


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
    with pytest.raises(CheckpointFormatError, match=r"up_proj.*save_original_format=False"):
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
    with pytest.raises(CheckpointFormatError, match="trust_remote_code"):
        build_meta_model(save_with_code(tmp_path / "model"))
    assert not _imported(tmp_path / "modules")


def _check_code(folder: Path, modules: Path, together: bool) -> None:
    keep_code_in(modules if together else modules / str(dist.get_rank()))
    model: Any = load_pretrained(folder, mesh=mesh_here(), mp_policy=FLOAT32, trust_remote_code=True)
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
    with pytest.raises(CheckpointFormatError, match="trust_remote_code"):
        load_pretrained("someone/model", **options)
    model = load_pretrained("someone/model", **options, trust_remote_code=True)
    assert difference(model, plain_with_code(folder)) == []


def test_from_the_hub(tmp_path: Path) -> None:
    folder = save_with_code(tmp_path / "model")
    with serve(folder) as (address, _):
        run_distributed(_check_hub, 2, address, tmp_path / "cache", tmp_path / "modules", folder)


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_a_config_cannot_fetch_code_for_its_attention(field: str, saved: Path) -> None:
    configure(saved, **{field: "someone/kernel"})
    with pytest.raises(CheckpointFormatError, match=r"'someone/kernel', native code .*attn_implementation="):
        build_meta_model(saved)
    assert build_meta_model(saved, attn_implementation="sdpa").config._attn_implementation == "sdpa"
    with pytest.raises(CheckpointFormatError, match="native code"):
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
