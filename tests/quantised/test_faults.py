"""Faults planted in each format: every one is refused by name, and none loads as something else."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import fsdp_sft as fs
from tests.harness.hf_folders import rewrite, tensors_of
from tests.harness.quantised_folders import configure, opened, quantised
from tests.harness.quantised_weights import FORMATS, mxfp4_experts

SIZES = {
    "hidden_size": 192,
    "intermediate_size": 576,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MATRIX = "model.layers.0.mlp.gate_proj"  # 576 rows, 192 columns
NOT_USED = ("activation_scale", "input_scale")

Tensors = dict[str, torch.Tensor]


def _faults(name: str, tensors: Tensors) -> Iterator[tuple[str, Tensors]]:
    """Descriptions of faults, and the folder's tensors with each of them."""
    own = {key.removeprefix(MATRIX): t for key, t in tensors.items() if key.startswith(f"{MATRIX}.")}
    used = {end: t for end, t in own.items() if not end.endswith(NOT_USED)}

    def changed(end: str, tensor: torch.Tensor) -> Tensors:
        return tensors | {f"{MATRIX}{end}": tensor}

    for end, tensor in used.items():
        yield f"{end} missing", {k: t for k, t in tensors.items() if k != f"{MATRIX}{end}"}
        if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1] and 1 not in tensor.shape:
            yield f"{end} transposed", changed(end, tensor.t())
        if tensor.ndim and len(tensor) > 1:
            yield f"{end} without its end", changed(end, tensor[:-1])
            yield f"{end} twice as long", changed(end, torch.cat([tensor, tensor]))
        if tensor.ndim == 2 and tensor.shape[1] > 1:
            yield f"{end} without its last column", changed(end, tensor[:, :-1])
        yield (
            f"{end} in float64",
            changed(
                end, tensor.view(torch.uint8).double() if tensor.dtype.itemsize == 1 else tensor.double()
            ),
        )
    plain = torch.zeros(576, 192, dtype=torch.bfloat16)
    if ".weight" not in own:
        yield "the values beside the packed ones", changed(".weight", plain)
    for end in (
        ".weight_scale_inv",
        ".weight_scale",
        ".weight_packed",
        ".qweight",
        ".weight.absmax",
        ".weight_scale_2",
    ):
        if end not in own:
            yield f"an extra {end}", changed(end, torch.ones(5, 2))
    yield "scales of a norm", tensors | {"model.norm.weight_scale": torch.ones(1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("faults")

    def made(name: str) -> Path:
        quantised(root / name, FORMATS[name], marked="gate_proj", files=2, **SIZES)
        return root / name / "stored"

    return made


@pytest.mark.parametrize("name", FORMATS)
def test_each_is_named(name: str, folder: Callable[[str], Path]) -> None:
    stored = folder(name)
    tensors, model = tensors_of(stored), fs.build_meta_model(stored)
    fs.load_weights(fs.build_meta_model(stored), stored)
    silent, nameless, faults = [], [], list(_faults(name, tensors))
    assert len(faults) >= 12, "of a format"
    for fault, faulty in faults:
        rewrite(stored, faulty)
        try:
            fs.load_weights(model, stored, missing="initialise", unexpected="ignore")
            silent.append(fault)
        except fs.CheckpointFormatError as error:
            if "gate_proj" not in str(error) and "norm" not in str(error):
                nameless.append((fault, str(error)))
        if not next(model.parameters()).is_meta:
            model = fs.build_meta_model(stored)
    assert silent == []
    assert nameless == []


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


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("fp8 block", {"weight_block_size": [64, 128]}, r"gate_proj.*needs \(9, 2\)"),
        ("fp8 block", {"weight_block_size": None}, "one number|needs"),
        ("fp8 block", {"weight_block_size": [0, 128]}, "weight_block_size=0"),
        ("fp8 block", {"weight_block_size": "128"}, "weight_block_size"),
        ("int4", {"format": "marlin-24"}, "format='marlin-24'"),
        ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ("int4", {"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
        ("fp8 of modelopt", {"quant_algo": "NVFP4_AWQ"}, "nvfp4_awq"),
        ("nf4", {"load_in_4bit": False}, "load_in_4bit"),
    ],
)
def test_settings_that_do_not_fit(
    name: str, fields: dict[str, object], named: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    stored = shutil.copytree(folder(name), tmp_path / "stored")
    model = fs.build_meta_model(stored)
    configure(stored, quantization_config=FORMATS[name](32, 64).settings | fields)
    with pytest.raises(fs.CheckpointFormatError, match=named):
        fs.load_weights(model, stored)
