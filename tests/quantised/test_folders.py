"""A folder in each format, on several meshes: the shards of the published values, to the bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import fsdp_sft as fs
from tests.harness.composed import composed
from tests.harness.hf_folders import difference, loaded, plain, rewrite, state_of, tensors_of
from tests.harness.models import FLOAT32
from tests.harness.quantised_folders import UNEVEN, configure, deepseek_folder, mxfp4_folder, quantised
from tests.harness.quantised_weights import FORMATS, fp8_block, int4
from tests.harness.ranks import device_here, mesh_here, on_ranks, run_distributed

TIED = {"hidden_size": 64, "num_hidden_layers": 1}
HYBRID = {"dp_replicate": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("formats")
    for name, make in FORMATS.items():
        quantised(root / name, make, **UNEVEN, head_dim=80)
    return root


@pytest.mark.parametrize(
    ("ranks", "mesh_shape"),
    [(2, {}), (3, {}), (4, HYBRID)],
    ids=["2", "3", "hybrid"],
)
@on_ranks()
def test_every_format(folders: Path, ranks: int, mesh_shape: dict[str, int]) -> None:
    mesh = mesh_here(**mesh_shape)
    for name in FORMATS:
        model: Any = composed(folders / name / "stored", mesh=mesh)
        assert difference(model, plain(folders / name / "published")) == [], name
        assert not hasattr(model.config, "quantization_config")
        assert {"bf16", *model.load_report.formats} == set(model.load_report.formats)
        assert len(model.load_report.formats) == 2, name


# Whose rows have no bytes of their own, but blocks that go on in the next row.
NO_ROWS = {name for name in FORMATS if name.startswith("nf4")}


def _frozen(folder: Path, mesh: Any, frozen_dtype: str) -> Any:
    """A model whose blocks are frozen and stay packed."""
    model: Any = fs.build_meta_model(folder)
    for block in fs.find_blocks(model).values():
        block.requires_grad_(False)
    fs.shard_model(model, mesh=mesh, mp_policy=FLOAT32, frozen_dtype=frozen_dtype)
    fs.load_weights(model, folder)
    return model


@pytest.mark.parametrize(("ranks", "mesh_shape"), [(2, {}), (3, {}), (4, HYBRID)], ids=["2", "3", "hybrid"])
@on_ranks()
def test_every_format_stays_packed_or_is_refused(
    folders: Path, ranks: int, mesh_shape: dict[str, int]
) -> None:
    mesh = mesh_here(**mesh_shape)
    for name in FORMATS:
        if name in NO_ROWS:
            with pytest.raises(fs.CheckpointMismatchError, match=r"'nf4' packs it anew"):
                _frozen(folders / name / "stored", mesh, "stored")
            assert "nf4" in fs.describe_sharding(_frozen(folders / name / "stored", mesh, "nf4"))
            continue
        model = _frozen(folders / name / "stored", mesh, "stored")
        assert "packed: 7 weights" in fs.describe_sharding(model), name
        oracle = plain(folders / name / "published")
        held, expected = state_of(model), state_of(oracle)
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[key], value) for key, value in expected.items()), name
        ids = torch.arange(3, 19)[None]
        computed = model(input_ids=ids.to(device_here())).logits.cpu()
        assert torch.allclose(computed, oracle(input_ids=ids).logits, rtol=1e-4, atol=1e-5), name


def _experts(root: Path, columns: bool) -> None:
    for name in ("fp8", "int4"):
        model: Any = fs.build_meta_model(root / name / "stored")
        if columns:
            fully_shard(model, mesh=mesh_here(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
        else:
            fs.shard_model(model, mesh=mesh_here())
        fs.load_weights(model, root / name / "stored")
        assert difference(model, plain(root / name / "published")) == []


@pytest.mark.parametrize("columns", [False, True], ids=["by rows", "by columns"])
def test_experts_that_are_stored_one_by_one(tmp_path: Path, columns: bool) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 1}
    quantised(tmp_path / "fp8", fp8_block, "mixtral", marked=".w", **sizes)
    quantised(tmp_path / "int4", int4, "mixtral", marked=".w", **sizes)
    run_distributed(_experts, 2, tmp_path, columns)


def test_tied_names_of_different_values_stay_apart(tmp_path: Path) -> None:
    quantised(tmp_path, fp8_block, "qwen2-tied", marked="embed_tokens", **TIED)
    head = fp8_block(101, 64)
    own = {f"lm_head{end}": tensor for end, tensor in head.tensors.items()}
    rewrite(tmp_path / "stored", tensors_of(tmp_path / "stored") | own)
    published = tensors_of(tmp_path / "published") | {"lm_head.weight": head.values}
    rewrite(tmp_path / "published", published)
    assert difference(loaded(tmp_path / "stored"), plain(tmp_path / "published")) == []


def test_a_file_of_its_own_says_it(folders: Path, tmp_path: Path) -> None:
    method = "fp8 of modelopt"
    folder = shutil.copytree(folders / method / "stored", tmp_path / "stored")
    said = FORMATS[method](32, 64).settings
    configure(folder, quantization_config=None)
    inner = {k: v for k, v in said.items() if k != "quant_method"}
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": inner})
    )
    assert difference(loaded(folder), plain(folders / method / "published")) == []


def _of_family(root: Path) -> None:
    model = loaded(root / "stored", {})
    assert difference(model, plain(root / "published")) == []
    fs.export_hf(model, root / "export")


@pytest.mark.parametrize("write", [mxfp4_folder, deepseek_folder], ids=["gpt-oss", "deepseek-v3"])
def test_a_family_loads_and_is_exported_in_16_bits(write: Any, tmp_path: Path) -> None:
    values = write(tmp_path / "stored")
    shutil.copytree(tmp_path / "stored", tmp_path / "published")
    configure(tmp_path / "published", quantization_config=None)
    rewrite(tmp_path / "published", {name: value.float() for name, value in values.items()})
    run_distributed(_of_family, 2, tmp_path)
    exported = json.loads((tmp_path / "export" / "config.json").read_text())
    assert "quantization_config" not in exported
    exports = (plain(tmp_path / name, dtype=torch.bfloat16) for name in ("export", "published"))
    assert difference(*exports) == []
    card = (tmp_path / "export" / "README.md").read_text()
    assert "bfloat16" in card
