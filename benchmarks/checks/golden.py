"""Write the golden files: matrices packed and dequantised by the packages that own the formats.

pip install torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.0 bitsandbytes==0.50.2
pip install nvidia-modelopt==0.47.0
python -m benchmarks.checks.golden

Each file has the tensors of one matrix as they are published, ``values`` as the package dequantises them, and
the package's version and the ``quantization_config`` as metadata.
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parents[2] / "tests" / "quantised" / "golden"
ROWS, COLUMNS = 24, 96


def _write(
    name: str, package: str, settings: dict[str, Any], tensors: dict[str, torch.Tensor], values: torch.Tensor
) -> None:
    about = {"package": f"{package} {importlib.metadata.version(package)}", "settings": json.dumps(settings)}
    every = {f"m.{key}": t.detach().contiguous().clone() for key, t in tensors.items()}
    save_file(
        every | {"values": values.detach().contiguous()}, FOLDER / f"{name}.safetensors", metadata=about
    )


def _compressed(
    name: str, form: str, weight: torch.Tensor, extra: dict[str, torch.Tensor], **weights: Any
) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress({"weight": weight, **extra}, scheme)
    values = compressor.decompress(dict(packed), scheme)["weight"]
    if form == "nvfp4-pack-quantized":  # which it does in bfloat16, scales included
        codes = unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape, dtype=torch.float32)
        scale, number = packed["weight_scale"].float(), packed["weight_global_scale"]
        values = dequantize(codes, scale, args=args, global_scale=number, dtype=torch.float32)
    fields = json.loads(args.model_dump_json())
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": fields}},
    }
    _write(name, "compressed-tensors", settings, packed, values)


def compressed_tensors() -> None:
    weight = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
    whole = weight.float()

    def top(columns: int) -> torch.Tensor:
        return whole.unflatten(-1, (-1, columns)).abs().amax(-1)

    integer: dict[str, Any] = {"type": "int", "symmetric": True}
    group = {"weight_scale": (top(32) / 7).bfloat16()}
    _compressed(
        "int4", "pack-quantized", weight, group, num_bits=4, strategy="group", group_size=32, **integer
    )
    floats: dict[str, Any] = {"type": "float", "symmetric": True}
    rows = {"weight_scale": (top(COLUMNS) / 448).float()}
    _compressed(
        "fp8-channel", "float-quantized", weight.float(), rows, num_bits=8, strategy="channel", **floats
    )
    blocks = {"weight_scale": torch.rand(1, 2) / 100 + 0.01}
    _compressed(
        "fp8-block", "float-quantized", weight.float(), blocks,
        num_bits=8, strategy="block", block_structure=[32, 64], **floats,
    )  # fmt: skip
    powers = {"weight_scale": torch.exp2(torch.floor(torch.log2(top(32))) - 2).bfloat16()}
    _compressed(
        "mxfp4", "mxfp4-pack-quantized", weight, powers,
        num_bits=4, strategy="group", group_size=32, scale_dtype=torch.uint8, **floats,
    )  # fmt: skip
    number = torch.tensor([448.0 * 6 / whole.abs().max()])
    sixteen = {
        "weight_scale": (top(16) / 6 * number).to(torch.float8_e4m3fn).float(),
        "weight_global_scale": number,
    }
    _compressed(
        "nvfp4", "nvfp4-pack-quantized", weight.float(), sixteen,
        num_bits=4, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn, **floats,
    )  # fmt: skip


def bitsandbytes() -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for nested in (False, True):
        weight = torch.randn(130, 129)
        packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
        values = dequantize_4bit(packed, state)
        tensors = {"weight": packed}
        tensors |= {f"weight.{key}": t for key, t in state.as_dict(packed=True).items()}
        settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        _write("nf4-nested" if nested else "nf4", "bitsandbytes", settings, tensors, values)


def transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, 20, 3, 16), dtype=torch.uint8)
    scales = torch.randint(115, 124, (2, 20, 3), dtype=torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    _write("mxfp4-experts", "transformers", {"quant_method": "mxfp4"}, tensors, values)


def modelopt() -> None:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    weight = torch.randn(ROWS, COLUMNS)
    packed, scale, number = NVFP4QTensor.quantize(weight, 16)
    values = packed.dequantize(torch.float32, scale=scale, double_scale=number, block_sizes={-1: 16})
    tensors = {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": number}
    _write(
        "nvfp4-modelopt",
        "nvidia-modelopt",
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        tensors,
        values,
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    for make in (compressed_tensors, bitsandbytes, transformers, modelopt):
        make()
