"""Ways to quantise that are not read, odd forms, and faults planted in each format: refused by name."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fsdp_sft as fs
from fsdp_sft._tensors.boxes import whole
from tests.harness.hf_folders import difference, loaded, plain, rewrite, tensors_of
from tests.harness.quantised_folders import (
    UNEVEN,
    configure,
    fp8_folder,
    mxfp4_folder,
    opened,
    quantised,
    read,
)
from tests.harness.quantised_weights import FORMATS, Written, fp8_block, int4, mxfp4_experts, nf4


@pytest.mark.parametrize("method", ["torchao", "a new one", None])
def test_other_methods_are_named(method: str | None, tmp_path: Path) -> None:
    fp8_folder(tmp_path)
    configure(tmp_path, quantization_config={"quant_method": method} if method else {"bits": 4})
    named = rf"quantised \({method or 'of a format without quant_method'}\): it is not among .* in 16 bits"
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


def test_two_parts_of_a_config_say_two_things(tmp_path: Path) -> None:
    fp8_folder(tmp_path)
    configure(tmp_path, compression_config={"quant_method": "compressed-tensors"})
    with pytest.raises(fs.CheckpointFormatError, match="quantised in two ways"):
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
    sizes = {"hidden_size": 64, "num_hidden_layers": 1}
    made = quantised(tmp_path, FORMATS["fp8 of modelopt"], marked="mlp", **sizes)
    scales = {f"model.layers.0.self_attn.{n}_proj.{n}_scale": torch.ones(()) for n in "kv"}
    rewrite(tmp_path / "stored", tensors_of(tmp_path / "stored") | scales)
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
    stored = {name.replace(".w1.", ".gate."): t for name, t in tensors_of(tmp_path / "stored").items()}
    rewrite(tmp_path / "stored", stored)
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
