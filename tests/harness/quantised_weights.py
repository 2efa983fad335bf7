"""Matrices in each quantised format, written at random, and their values by plain loops over elements.

The loops follow the published references of the formats (named at each), and share no code with the library.
Numbers are Python's, rounded to float32 after each operation by ``struct``.
"""

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@dataclass
class Written:
    """One matrix in a quantised format.

    Attributes:
        tensors: What is stored, by the ending of its name that replaces ``.weight``.
        values: Its values, float32, in the shape of the model.
        settings: ``quantization_config``.
    """

    tensors: dict[str, torch.Tensor]
    values: torch.Tensor
    settings: dict[str, Any]


def f32(value: float) -> float:
    """A number rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _loop(rows: int, columns: int, value: Callable[[int, int], float]) -> torch.Tensor:
    return torch.tensor([[value(i, j) for j in range(columns)] for i in range(rows)], dtype=torch.float32)


def _fp8(rows: int, columns: int) -> tuple[torch.Tensor, list[list[float]]]:
    """Random FP8 numbers, and what they are by the definition of E4M3 (OCP 8-bit Floating Point, 1.0)."""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    return codes.view(torch.float8_e4m3fn), [[_e4m3(code) for code in row] for row in codes.tolist()]


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def _scales(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) / 50 + 0.001


def fp8_block(
    rows: int, columns: int, block: tuple[int, int] = (128, 128), scales: str = "float32"
) -> Written:
    """DeepSeek-V3: ``weight_scale_inv`` multiplies (inference/kernel.py, ``weight_dequant_kernel``)."""
    down, across = block
    stored, q = _fp8(rows, columns)
    grid = (math.ceil(rows / down), math.ceil(columns / across))
    if scales in ("float32", "bfloat16"):
        kept = _scales(*grid).to(getattr(torch, scales))
        s = kept.float().tolist()
    else:
        exponents = torch.randint(110, 124, grid, dtype=torch.uint8)
        kept = exponents if scales == "uint8" else exponents.view(torch.float8_e8m0fnu)
        s = [[2.0 ** (e - 127) for e in row] for row in exponents.tolist()]
    values = _loop(rows, columns, lambda i, j: f32(q[i][j] * s[i // down][j // across]))
    return Written(
        {".weight": stored, ".weight_scale_inv": kept},
        values,
        {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"},
    )


def fp8_tensor(rows: int, columns: int) -> Written:
    """Ministral 3: one scale, and one of the activations, which is not used."""
    stored, q = _fp8(rows, columns)
    scale = _scales(1).reshape(())
    values = _loop(rows, columns, lambda i, j: f32(q[i][j] * scale.item()))
    return Written(
        {".weight": stored, ".weight_scale_inv": scale, ".activation_scale": _scales(1).reshape(())},
        values,
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
    )


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _fp4(rows: int, columns: int) -> tuple[torch.Tensor, list[list[float]]]:
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    codes = [[half for byte in row for half in (byte & 15, byte >> 4)] for row in packed.tolist()]
    return packed, [[E2M1[code] for code in row] for row in codes]


def mxfp4_compressed(rows: int, columns: int, least: int = 110) -> Written:
    """compressed-tensors, MXFP4; the exponents of its scales begin at ``least``."""
    packed, q = _fp4(rows, columns)
    exponents = torch.randint(least, 124, (rows, math.ceil(columns / 32)), dtype=torch.uint8)
    e = exponents.tolist()
    values = _loop(rows, columns, lambda i, j: f32(math.ldexp(q[i][j], e[i][j // 32] - 127)))
    settings = _compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="group", group_size=32
    )
    return Written({".weight_packed": packed, ".weight_scale": exponents}, values, settings)


def mxfp4_experts(experts: int, rows: int, columns: int, least: int = 110) -> Written:
    """gpt-oss: blocks of 32 in 16 bytes; the model has the transpose (transformers/integrations/mxfp4.py)."""
    made = [mxfp4_compressed(columns, rows, least) for _ in range(experts)]
    blocks = torch.stack([one.tensors[".weight_packed"].view(columns, rows // 32, 16) for one in made])
    scales = torch.stack([one.tensors[".weight_scale"] for one in made])
    return Written(
        {"_blocks": blocks, "_scales": scales},
        torch.stack([one.values.mT for one in made]),
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    )


def nvfp4(rows: int, columns: int, tool: str = "compressed-tensors") -> Written:
    """NVFP4: compressed-tensors divides the scales by a number, ModelOpt multiplies them, both at first."""
    packed, q = _fp4(rows, columns)
    codes = torch.randint(1, 127, (rows, math.ceil(columns / 16)), dtype=torch.uint8)
    s = [[_e4m3(code) for code in row] for row in codes.tolist()]
    scale, whole = codes.view(torch.float8_e4m3fn), torch.rand(()) * 300 + 1
    whole = 1 / whole if tool == "modelopt" else whole
    g = whole.item()
    if tool == "modelopt":
        values = _loop(rows, columns, lambda i, j: f32(q[i][j] * f32(s[i][j // 16] * g)))
        tensors = {
            ".weight": packed,
            ".weight_scale": scale,
            ".weight_scale_2": whole,
            ".input_scale": whole + 1,
        }
        return Written(tensors, values, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []})
    values = _loop(rows, columns, lambda i, j: f32(q[i][j] * f32(s[i][j // 16] / g)))
    tensors = {".weight_packed": packed, ".weight_scale": scale, ".weight_global_scale": whole.reshape(1)}
    settings = _compressed(
        "nvfp4-pack-quantized",
        num_bits=4,
        type="float",
        symmetric=True,
        strategy="tensor_group",
        group_size=16,
    )
    return Written(tensors, values, settings)


def _words(numbers: list[list[int]]) -> torch.Tensor:
    """Rows of numbers of 4 bits packed in words of 32, the lowest first."""
    packed = [
        [
            sum(n << 4 * place for place, n in enumerate(row[first : first + 8]))
            for first in range(0, len(row), 8)
        ]
        for row in numbers
    ]
    return torch.tensor(packed, dtype=torch.uint32).view(torch.int32)


def int4(rows: int, columns: int, group: int | None = 32) -> Written:
    """compressed-tensors' packs (pack_quantized/helpers.py): q has 8 added."""
    width = group or columns
    q = torch.randint(0, 16, (rows, columns)).tolist()
    scale = _scales(rows, math.ceil(columns / width)).bfloat16()
    s = scale.float().tolist()
    values = _loop(rows, columns, lambda i, j: f32((q[i][j] - 8) * s[i][j // width]))
    tensors = {
        ".weight_packed": _words(q),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor([rows, columns]),
    }
    scheme = {"strategy": "group" if group else "channel", "group_size": group, "actorder": None}
    return Written(
        tensors, values, _compressed("pack-quantized", num_bits=4, type="int", symmetric=True, **scheme)
    )


def nf4(rows: int, columns: int, *, nested: bool = True, block: int = 64) -> Written:
    """bitsandbytes: all in one row, the high half of a byte first; a scale for a block, maybe packed."""
    count = rows * columns
    codes = torch.randint(0, 16, (count,)).tolist()
    table = torch.linspace(-1, 1, 16)
    t = table.tolist()
    blocks = math.ceil(count / block)
    pairs = zip(codes[::2], [*codes[1::2], *[0] * (count % 2)], strict=True)
    packed = torch.tensor([high << 4 | low for high, low in pairs], dtype=torch.uint8)[:, None]
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": [rows, columns],
    }
    tensors = {".weight": packed, ".weight.quant_map": table}
    if nested:
        inner = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        outer, outer_table = _scales(math.ceil(blocks / 256)), torch.rand(256) * 2 - 1
        offset, i, o, m = f32(0.0312), inner.tolist(), outer.tolist(), outer_table.tolist()
        a = [f32(f32(m[code] * o[at // 256]) + offset) for at, code in enumerate(i)]
        tensors |= {
            ".weight.absmax": inner,
            ".weight.nested_absmax": outer,
            ".weight.nested_quant_map": outer_table,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        absmax = _scales(blocks)
        a = absmax.tolist()
        tensors[".weight.absmax"] = absmax
    values = _loop(rows, columns, lambda i, j: f32(t[codes[i * columns + j]] * a[(i * columns + j) // block]))
    text = json.dumps(state).encode()
    tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return Written(
        tensors,
        values,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    )


def nf4_as_bfloat16(rows: int, columns: int) -> Written:
    """The same bytes as bfloat16, as ``bnb_4bit_quant_storage`` names them."""
    made = nf4(rows, columns)
    made.tensors[".weight"] = made.tensors[".weight"].view(-1).view(torch.bfloat16)[:, None]
    return made


def _renamed(made: Written, settings: dict[str, Any], **names: str) -> Written:
    """The same values in another tool's format: other names for the same tensors."""
    tensors = {f".{names.get(end[1:], end[1:])}": tensor for end, tensor in made.tensors.items()}
    return Written(tensors, made.values, dict(settings))


def _fp4_of_deepseek(rows: int, columns: int) -> Written:
    """Experts of DeepSeek-V4: two E2M1 in an int8, the low half first, exponents for 32 columns."""
    made = _renamed(
        mxfp4_compressed(rows, columns), DEEPSEEK_V4, weight_packed="weight", weight_scale="scale"
    )
    made.tensors[".weight"] = made.tensors[".weight"].view(torch.int8)
    made.tensors[".scale"] = made.tensors[".scale"].view(torch.float8_e8m0fnu)
    return made


DEEPSEEK_V4 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_SCALE = {"weight_scale_inv": "weight_scale"}

FORMATS: dict[str, Callable[[int, int], Written]] = {
    "fp8 block": fp8_block,
    "fp8 block, e8m0": lambda r, c: fp8_block(r, c, scales="e8m0"),
    "fp8 block, uint8": lambda r, c: fp8_block(r, c, (1, 32), "uint8"),
    "fp8 of deepseek-v4": lambda r, c: _renamed(
        fp8_block(r, c, scales="e8m0"), DEEPSEEK_V4, weight_scale_inv="scale"
    ),
    "fp4 of deepseek-v4": _fp4_of_deepseek,
    "fp8 per tensor": fp8_tensor,
    # compressed-tensors' own names: FP8_DYNAMIC has a scale for each row, FP8_BLOCK and MXFP8 for blocks.
    "fp8 per channel": lambda r, c: _renamed(
        fp8_block(r, c, (1, c), "bfloat16"),
        _compressed("float-quantized", **_FP8, strategy="channel"),
        **_SCALE,
    ),
    "fp8 block, compressed-tensors": lambda r, c: _renamed(
        fp8_block(r, c),
        _compressed("float-quantized", **_FP8, strategy="block", block_structure=[128, 128]),
        **_SCALE,
    ),
    "mxfp8": lambda r, c: _renamed(
        fp8_block(r, c, (1, 32), "uint8"),
        _compressed("mxfp8-quantized", **_FP8, strategy="group", group_size=32),
        **_SCALE,
    ),
    "fp8 of modelopt": lambda r, c: _renamed(
        fp8_tensor(r, c),
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        **_SCALE,
        activation_scale="input_scale",
    ),
    "mxfp4": mxfp4_compressed,
    "nvfp4": nvfp4,
    "nvfp4 of modelopt": lambda r, c: nvfp4(r, c, "modelopt"),
    "int4": int4,
    "int4 per channel": lambda r, c: int4(r, c, None),
    "nf4": lambda r, c: nf4(r, c, nested=False),
    "nf4 nested": nf4,
    "nf4 as bfloat16": nf4_as_bfloat16,
}


# --- what frozen weights hold once they are packed, a block of a row after the other ------------------------

# bitsandbytes' table (functional.py, get_4bit_type), from arXiv 2305.14314, appendix E.
TABLE = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ]
)


def in_nf4(weight: torch.Tensor) -> torch.Tensor:
    """The values of a matrix or a stack of them in NF4."""
    packed = []
    for block in weight.float().split(64, -1):
        largest = block.abs().amax(-1, keepdim=True).bfloat16().float()
        nearest = ((block / largest)[..., None] - TABLE).abs().argmin(-1)
        packed.append(TABLE[nearest] * largest)
    return torch.cat(packed, -1)


def in_fp8(weight: torch.Tensor) -> torch.Tensor:
    """The values of a matrix or a stack of them in FP8."""
    packed = []
    for block in weight.float().split(128, -1):
        scale = block.abs().amax(-1, keepdim=True) / 448
        packed.append((block / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(packed, -1)


def is_packed(name: str, weight: torch.Tensor) -> bool:
    """Whether a weight is one that is packed: a matrix of a layer that is not tiny, and no router."""
    is_router = any(part in name for part in ("router", ".gate.", "bias", "lora_"))
    return "layers." in name and weight.ndim > 1 and min(weight.shape[-2:]) >= 32 and not is_router
