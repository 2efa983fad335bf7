"""Faults planted in each format: every one is refused by name, and none loads as something else."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fsdp_sft as fs
from tests.harness.hf_folders import loaded, rewrite, tensors_of
from tests.harness.quantised_folders import opened, quantised
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
    quantised(tmp_path, FORMATS[name], marked="gate_proj", files=2, **SIZES)
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
