"""Quantised folders on several meshes: the published values, to the bit, or refused by name."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import fsdp_sft as fs
from fsdp_sft._tensors.boxes import whole
from tests.harness.composed import composed
from tests.harness.hf_folders import difference, loaded, plain, rewrite, state_of, tensors_of
from tests.harness.models import FLOAT32
from tests.harness.packs import assert_same
from tests.harness.quantised_folders import (
    UNEVEN,
    configure,
    deepseek_folder,
    fp8_folder,
    mxfp4_folder,
    opened,
    quantised,
    read,
)
from tests.harness.quantised_weights import FORMATS, Written, fp8_block, int4, mxfp4_experts, nf4
from tests.harness.ranks import device_here, mesh_here, on_ranks, run_distributed

SMALL = {"hidden_size": 64, "num_hidden_layers": 1}
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
        assert_same(state_of(model), state_of(oracle), name)
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
    quantised(tmp_path, fp8_block, "qwen2-tied", marked="embed_tokens", **SMALL)
    head = fp8_block(101, 64)
    rewrite(
        tmp_path / "stored",
        tensors_of(tmp_path / "stored") | {f"lm_head{end}": tensor for end, tensor in head.tensors.items()},
    )
    rewrite(tmp_path / "published", tensors_of(tmp_path / "published") | {"lm_head.weight": head.values})
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
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    exports = (plain(tmp_path / name, dtype=torch.bfloat16) for name in ("export", "published"))
    assert difference(*exports) == []
    assert "bfloat16" in (tmp_path / "export" / "README.md").read_text()


# --- ways to quantise that are not read --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {"quantization_config": {"quant_method": "torchao"}},
            r"quantised \(torchao\): .* not among .* in 16 bits",
        ),
        ({"quantization_config": {"quant_method": "a new one"}}, r"\(a new one\): it is not among"),
        ({"quantization_config": {"bits": 4}}, r"\(of a format without quant_method\): it is not among"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "quantised in two ways"),
    ],
)
def test_other_methods_are_named(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    fp8_folder(tmp_path)
    configure(tmp_path, **config)
    with pytest.raises(fs.CheckpointFormatError, match=named):
        fs.build_meta_model(tmp_path)


def test_a_part_of_a_config_says_it(tmp_path: Path) -> None:
    text = {"hidden_size": 32, "quantization_config": {"quant_method": "quark"}}
    transformers.Qwen2_5_VLConfig(architectures=["Qwen2_5_VLForConditionalGeneration"]).save_pretrained(
        tmp_path
    )
    configure(tmp_path, text_config=json.loads((tmp_path / "config.json").read_text())["text_config"] | text)
    with pytest.raises(fs.CheckpointFormatError, match=r"quantised \(quark\)"):
        fs.build_meta_model(tmp_path)


@pytest.mark.parametrize("write", [fp8_folder, mxfp4_folder])
def test_without_a_word_in_the_config(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    configure(tmp_path, quantization_config=None)
    with pytest.raises(
        fs.CheckpointFormatError, match="config does not say how: take the model's checkpoint"
    ):
        fs.load_weights(fs.build_meta_model(tmp_path), tmp_path, missing="initialise", unexpected="ignore")


@pytest.mark.parametrize("names", [("qweight", "qzeros", "scales"), ("weight_packed", "weight_scale")])
def test_packed_values_are_never_initialised(names: tuple[str, ...], tmp_path: Path) -> None:
    fp8_folder(tmp_path)
    configure(tmp_path, quantization_config=None)
    stored = {name: v.bfloat16() for name, v in tensors_of(tmp_path).items() if "scale" not in name}
    module = "model.layers.0.mlp.up_proj"
    del stored[f"{module}.weight"]
    stored |= {f"{module}.{name}": torch.zeros(4, 4, dtype=torch.int32) for name in names[:1]}
    stored |= {f"{module}.{name}": torch.zeros(4, 4) for name in names[1:]}
    rewrite(tmp_path, stored)
    with pytest.raises(fs.CheckpointFormatError, match=f"packed ones \\({module}.{names[0]}\\)"):
        fs.load_weights(fs.build_meta_model(tmp_path), tmp_path, missing="initialise", unexpected="ignore")


def test_scales_that_bitsandbytes_has_changed_are_named(tmp_path: Path) -> None:
    """As it saves a model without double quantisation that was run on a CPU with AVX512-BF16."""
    made = FORMATS["nf4"](64, 128)
    scales = made.tensors[".weight.absmax"]
    changed = replace(
        made, tensors=made.tensors | {".weight.absmax": scales.view(64, 2).T.bfloat16().contiguous()}
    )
    with pytest.raises(
        fs.CheckpointFormatError, match=r"scales of 'm\.weight' .* in the first forward on a CPU"
    ):
        opened(tmp_path, changed)


# --- odd forms, settings and tensors: right, or refused ----------------------------------------------------


def _values(folder: Path, made: Written, name: str = "m") -> torch.Tensor:
    (source,) = opened(folder, made, name).values()
    return read(source, whole(tuple(source.entry.shape)))[0]


@pytest.mark.parametrize(
    ("end", "tensor"),
    [(".weight_zero_point", torch.zeros(3, 2, dtype=torch.int32)), (".weight_g_idx", torch.arange(64))],
)
def test_integers_that_are_shifted_or_in_another_order(
    end: str, tensor: torch.Tensor, tmp_path: Path
) -> None:
    made = int4(24, 64)
    made.tensors[end] = tensor
    with pytest.raises(fs.CheckpointFormatError, match=f"m{end} belong to no weight"):
        _values(tmp_path, made)


def test_scales_of_a_cache_beside_attention_in_16_bits(tmp_path: Path) -> None:
    made = quantised(tmp_path, FORMATS["fp8 of modelopt"], marked="mlp", **SMALL)
    rewrite(
        tmp_path / "stored",
        tensors_of(tmp_path / "stored")
        | {f"model.layers.0.self_attn.{n}_proj.{n}_scale": torch.ones(()) for n in "kv"},
    )
    model = fs.build_meta_model(tmp_path / "stored")
    with pytest.raises(fs.CheckpointFormatError, match="k_scale"):
        fs.load_weights(model, tmp_path / "stored")
    configure(tmp_path / "stored", quantization_config=made.settings | {"kv_cache_quant_algo": "FP8"})
    fs.load_weights(model, tmp_path / "stored")
    assert difference(model, plain(tmp_path / "published")) == []


@pytest.mark.parametrize("offset", [..., None, True, "0.1", 10**400, float("inf")], ids=str)
def test_offsets_that_are_no_numbers(offset: Any, tmp_path: Path) -> None:
    made, key = nf4(8, 64), ".weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(made.tensors[key].tolist())) | {"nested_offset": offset}
    state = {name: value for name, value in state.items() if value is not ...}
    made.tensors[key] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(fs.CheckpointFormatError, match="nested_offset"):
        _values(tmp_path, made)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(), (4,), (0, 4), (4, 0)], ids=str)
def test_weights_that_are_no_matrices(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    made = FORMATS[name](32, 64)
    first = next(iter(made.tensors))
    made.tensors[first] = torch.zeros(shape, dtype=torch.uint8).to(made.tensors[first].dtype)
    with pytest.raises(fs.CheckpointFormatError):
        _values(tmp_path, made)


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("fp8 block", {"weight_block_size": [64, 128]}, r"needs \(4, 2\)"),
        ("fp8 block", {"weight_block_size": None}, "one number|needs"),
        ("fp8 block", {"weight_block_size": [0, 128]}, "weight_block_size=0"),
        ("fp8 block", {"weight_block_size": "128"}, "weight_block_size"),
        ("fp8 block", {"weight_block_size": [128, True]}, "is quantised"),
        ("int4", {"format": "marlin-24"}, "format='marlin-24'"),
        ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ("int4", {"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
        ("fp8 of modelopt", {"quant_algo": "NVFP4_AWQ"}, "nvfp4_awq"),
        ("nf4", {"load_in_4bit": False}, "load_in_4bit"),
        ("int4", {"config_groups": {}}, "is quantised"),
        ("int4", {"config_groups": {"a": {"weights": {"num_bits": -4}}}}, "is quantised"),
        ("int4", {"config_groups": [1]}, "is quantised"),
        ("int4", {"config_groups": {"a": {"weights": {"num_bits": 8}}}}, "is quantised"),
        ("int4", {"config_groups": {"a": {"weights": {"num_bits": 4, "symmetric": False}}}}, "is quantised"),
        ("int4", {"config_groups": {"a": {"weights": {"num_bits": 4, "actorder": "group"}}}}, "is quantised"),
        ("int4", {"format": "int-quantized"}, "is quantised"),
        ("int4", {"transform_config": ["r1"]}, "is quantised"),
    ],
)
def test_settings_that_do_not_fit(name: str, fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    made = FORMATS[name](256, 192)
    made.settings |= fields
    with pytest.raises(fs.CheckpointFormatError, match=named):
        _values(tmp_path, made)


def test_packed_experts_that_no_conversion_joins(tmp_path: Path) -> None:
    """They are never initialised at random in their place."""
    quantised(tmp_path, fp8_block, "mixtral", marked=".w", hidden_size=64, intermediate_size=64)
    rewrite(
        tmp_path / "stored",
        {name.replace(".w1.", ".gate."): t for name, t in tensors_of(tmp_path / "stored").items()},
    )
    model = fs.build_meta_model(tmp_path / "stored")
    with pytest.raises(fs.CheckpointFormatError):
        fs.load_weights(model, tmp_path / "stored", missing="initialise", unexpected="ignore")


# --- faults planted in each format: every one is refused by name, and none loads as something else ---------

MATRIX = "model.layers.0.mlp.gate_proj"  # 576 rows, 192 columns
NOT_USED = ("activation_scale", "input_scale")
EXTRA = (
    ".weight_scale_inv",
    ".weight_scale",
    ".weight_packed",
    ".qweight",
    ".weight.absmax",
    ".weight_scale_2",
)
PLAIN = torch.zeros(576, 192, dtype=torch.bfloat16)

Tensors = dict[str, torch.Tensor]


def _faults(tensors: Tensors) -> Iterator[tuple[str, Tensors]]:
    """Descriptions of faults, and the folder's tensors with each of them."""
    own = {key.removeprefix(MATRIX): t for key, t in tensors.items() if key.startswith(f"{MATRIX}.")}
    for end, tensor in own.items():
        if end.endswith(NOT_USED):
            continue
        yield f"{end} missing", {k: t for k, t in tensors.items() if k != f"{MATRIX}{end}"}
        whole = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        changed = {"in float64": whole.double()}
        if tensor.ndim and len(tensor) > 1:
            changed |= {"without its end": tensor[:-1], "twice as long": torch.cat([tensor, tensor])}
        if tensor.ndim == 2 and tensor.shape[1] > 1:
            changed["without its last column"] = tensor[:, :-1]
            if tensor.shape[0] not in (1, tensor.shape[1]):
                changed["transposed"] = tensor.t()
        for fault, other in changed.items():
            yield f"{end} {fault}", tensors | {f"{MATRIX}{end}": other}
    if ".weight" not in own:
        yield "the values beside the packed ones", tensors | {f"{MATRIX}.weight": PLAIN}
    for end in EXTRA:
        if end not in own:
            yield f"an extra {end}", tensors | {f"{MATRIX}{end}": torch.ones(5, 2)}
    yield "scales of a norm", tensors | {"model.norm.weight_scale": torch.ones(1)}


@pytest.mark.parametrize("name", FORMATS)
def test_each_is_named(name: str, tmp_path: Path) -> None:
    quantised(tmp_path, FORMATS[name], marked="gate_proj", files=2, **UNEVEN)
    stored = tmp_path / "stored"
    tensors, model = tensors_of(stored), fs.build_meta_model(stored)
    loaded(stored)
    faults = list(_faults(tensors))
    assert len(faults) >= 12, "of a format"
    for fault, faulty in faults:
        rewrite(stored, faulty)
        with pytest.raises(fs.CheckpointFormatError, match=r"gate_proj|norm"):
            fs.load_weights(model, stored, missing="initialise", unexpected="ignore")
        assert next(model.parameters()).is_meta, fault


@pytest.mark.parametrize("change", ["blocks of 15 bytes", "a scale too few", "no scales", "transposed"])
def test_experts_of_gpt_oss(change: str, tmp_path: Path) -> None:
    made = mxfp4_experts(3, 64, 40)
    blocks, scales = made.tensors["_blocks"], made.tensors["_scales"]
    made.tensors = {
        "blocks of 15 bytes": {"_blocks": blocks[..., :15], "_scales": scales},
        "a scale too few": {"_blocks": blocks, "_scales": scales[..., :1]},
        "no scales": {"_blocks": blocks},
        "transposed": {"_blocks": blocks, "_scales": scales.mT},
    }[change]
    made.tensors = {key: tensor.contiguous() for key, tensor in made.tensors.items()}
    with pytest.raises(fs.CheckpointFormatError, match=r"m\.down_proj_"):
        opened(tmp_path, made, "m.down_proj")
