"""A checkpoint that brings its own modeling file: refused without trust, bitwise right with it, offline."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_sft._model.configs import config_of, tokenizer_of
from fsdp_sft.weights import CheckpointFormatError, build_meta_model
from fsdp_sft.weights.load import load_pretrained
from fsdp_sft.weights.resolve import resolve_folder
from tests.harness.device import device_here, mesh_here
from tests.harness.hf_folders import difference, save_tiny
from tests.harness.hub_server import serve, use_hub
from tests.harness.models import full
from tests.harness.ranks import run_distributed
from tests.harness.remote_code import keep_code_in, plain_with_code, save_with_code


def _imported(modules: Path) -> bool:
    return any(path.name == "imported" for path in modules.rglob("*"))


def test_refused_without_trust(tmp_path: Path) -> None:
    keep_code_in(tmp_path / "modules")
    with pytest.raises(CheckpointFormatError, match="trust_remote_code"):
        build_meta_model(save_with_code(tmp_path / "model"))
    assert not _imported(tmp_path / "modules")


def _check_loads(folder: Path, modules: Path, together: bool) -> None:
    keep_code_in(modules if together else modules / str(dist.get_rank()))
    model: Any = load_pretrained(
        folder, mesh=mesh_here(), mp_policy=MixedPrecisionPolicy(), trust_remote_code=True
    )
    oracle = plain_with_code(folder)
    assert difference(model, oracle) == []
    assert float(full(model.model.norm.offset)) == 0.625
    ids = torch.arange(3, 21, device=device_here()).view(2, 9)
    assert torch.equal(model(input_ids=ids).logits, oracle.to(device_here())(input_ids=ids).logits)
    assert _imported(modules)


@pytest.mark.parametrize("together", [True, False], ids=["one module cache", "a module cache each"])
def test_bitwise_with_trust(tmp_path: Path, together: bool) -> None:
    run_distributed(_check_loads, 2, save_with_code(tmp_path / "model"), tmp_path / "modules", together)


def _check_hub(address: str, cache: Path, modules: Path, folder: Path) -> None:
    use_hub(address, cache)
    keep_code_in(modules / str(dist.get_rank()))
    assert not list(resolve_folder("someone/model").glob("*.py"))
    # Under bfloat16 the buffers are those of a plain bfloat16 model.
    options: dict[str, Any] = {"mesh": mesh_here(), "mp_policy": MixedPrecisionPolicy()}
    with pytest.raises(CheckpointFormatError, match="trust_remote_code"):
        load_pretrained("someone/model", **options)
    model = load_pretrained("someone/model", **options, trust_remote_code=True)
    assert difference(model, plain_with_code(folder)) == []


def test_from_the_hub(tmp_path: Path) -> None:
    folder = save_with_code(tmp_path / "model")
    with serve(folder) as (address, _):
        run_distributed(_check_hub, 2, address, tmp_path / "cache", tmp_path / "modules", folder)


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_a_config_cannot_fetch_code_for_its_attention(field: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: "someone/kernel"}))
    with pytest.raises(CheckpointFormatError, match=r"'someone/kernel', native code .*attn_implementation="):
        build_meta_model(folder)
    assert build_meta_model(folder, attn_implementation="sdpa").config._attn_implementation == "sdpa"
    with pytest.raises(CheckpointFormatError, match="native code"):
        config_of(folder)


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
