"""Any box of a packed matrix, in every format: the values of plain loops, to the bit."""

import itertools
import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import fsdp_sft as fs
from fsdp_sft._quantised import find
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._tensors.boxes import Box, chunk_of, whole
from fsdp_sft._tensors.packed import Packed
from fsdp_sft._tensors.reader import do_reads
from fsdp_sft.weights import provenance
from tests.harness.quantised_folders import opened, read
from tests.harness.quantised_weights import FORMATS, Written, fp8_block, fp8_tensor, int4, mxfp4_experts, nf4

SIZES = [(576, 192), (160, 192), (24, 64)]


def _boxes(shape: tuple[int, ...], count: int) -> list[Box]:
    boxes = [whole(shape)]
    for number in range(count):
        ends = [sorted(random.sample(range(n + 1), 2)) for n in shape]
        if number % 2:
            ends[-1] = [0, shape[-1]]
        boxes.append(Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
    return boxes


def _stacked(make: Callable[[int, int], Written], count: int, rows: int, columns: int) -> Written:
    """Experts of one tensor in FP8, whose blocks begin anew with each expert."""
    each = [make(rows, columns) for _ in range(count)]
    weights = torch.stack([one.tensors[".weight"].view(torch.uint8) for one in each])
    scales = torch.stack([one.tensors[".weight_scale_inv"] for one in each])
    return Written(
        {"": weights.view(torch.float8_e4m3fn), "_scale_inv": scales},
        torch.stack([one.values for one in each]),
        each[0].settings,
    )


def _one_scale(*shape: int) -> Written:
    """Experts of one tensor with one scale each."""
    made = _stacked(fp8_tensor, 3, 24, 32)
    made.tensors["_scale_inv"] = made.tensors["_scale_inv"].view(shape)
    return made


# What is written, and under which name.
MADE: dict[str, tuple[Callable[[], Written], str]] = {
    **{
        f"{name}, {rows} x {columns}": (partial(FORMATS[name], rows, columns), "m")
        for name in FORMATS
        for rows, columns in SIZES
    },
    # Sizes that nothing divides.
    "int4 by channel, 33 x 72": (lambda: int4(33, 72, None), "m"),
    "int4 with a partial group, 33 x 72": (lambda: int4(33, 72, 32), "m"),
    "nf4 of an odd number, 33 x 7": (lambda: nf4(33, 7, nested=True), "m"),
    "nf4 in blocks of 128, 3 x 1001": (lambda: nf4(3, 1001, nested=False, block=128), "m"),
    # Mixtures.
    "experts of gpt-oss": (lambda: mxfp4_experts(3, 64, 40), "m.experts.down_proj"),
    "experts of 160 rows": (lambda: _stacked(fp8_block, 3, 160, 192), "experts.gate_up_proj"),
    "experts of 128 rows": (lambda: _stacked(fp8_block, 3, 128, 192), "experts.gate_up_proj"),
    "experts of 40 rows": (lambda: _stacked(fp8_block, 3, 40, 192), "experts.gate_up_proj"),
    "a scale for each expert": (lambda: _one_scale(3), "experts.down_proj"),
    "a scale for each expert, as a matrix": (lambda: _one_scale(3, 1, 1), "experts.down_proj"),
}


@pytest.mark.parametrize("case", MADE)
def test_any_box(case: str, tmp_path: Path) -> None:
    random.seed(case)
    torch.manual_seed(0)
    make, name = MADE[case]
    made = make()
    (source,) = opened(tmp_path, made, name).values()
    assert source.entry.shape == made.values.shape
    for box in _boxes(made.values.shape, 10):
        for at_once in (1 << 20, 5000, 100) if box.numel < 10_000 else (1 << 20,):
            out, _ = read(source, box, at_once)
            assert torch.equal(out, made.values[box.slices]), (box, at_once)


@pytest.mark.parametrize("name", ["fp8 block", "int4", "nf4 nested"])
def test_boxes_of_single_values(name: str, tmp_path: Path) -> None:
    """However little may be computed at once, blocks are read as wholes."""
    made = FORMATS[name](24, 64)
    (source,) = opened(tmp_path, made).values()
    assert torch.equal(read(source, whole((24, 64)), at_once=1)[0], made.values)


ROWS, COLUMNS = Box((128, 0), (128, 256)), Box((0, 0), (32, 2048))


OWN_ROWS, OWN_COLUMNS = Box((128, 0), (128, 256)), Box((0, 0), (32, 2048))


@pytest.mark.parametrize(
    ("name", "shape", "box", "share"),
    [
        ("fp8 block", (512, 256), OWN_ROWS, 1.1 / 4),
        ("mxfp4", (512, 256), OWN_ROWS, 1.1 / 4),
        ("int4", (512, 256), OWN_ROWS, 1.1 / 4),
        ("nf4 nested", (512, 256), OWN_ROWS, 1.1 / 4),
        ("mxfp4", (32, 8192), OWN_COLUMNS, 0.4),
        ("fp8 block", (32, 8192), OWN_COLUMNS, 0.4),
    ],
)
def test_a_rank_reads_its_rows_or_long_columns_and_their_scales(
    name: str, shape: tuple[int, int], box: Box, share: float, tmp_path: Path
) -> None:
    made = FORMATS[name](*shape)
    (source,) = opened(tmp_path, made).values()
    out, count = read(source, box)
    assert torch.equal(out, made.values[box.slices])
    assert count <= source.entry.num_bytes * share


def _moved(a: Any, b: Any) -> Any:
    """Two matrices as a conversion may lay them out: transposed, cut, joined, stacked."""
    halves = [
        torch.cat([one.t().chunk(2, 1)[0], other.t().chunk(2, 1)[1]]) for one, other in ((a, b), (b, a))
    ]
    return torch.stack(halves)


@pytest.mark.parametrize("name", ["fp8 block", "nvfp4", "int4", "nf4 nested"])
@pytest.mark.parametrize("workers", [1, 3])
def test_any_box_of_what_a_conversion_made(name: str, workers: int, tmp_path: Path) -> None:
    made = {key: FORMATS[name](24, 64) for key in ("a", "b")}
    stored = {}
    for key, one in made.items():
        (tmp_path / key).mkdir()
        (stored[key],) = opened(tmp_path / key, one).values()
    moved = _moved(*(provenance.source(k, s.entry.shape, s.entry.dtype, s.stride) for k, s in stored.items()))
    expected = _moved(made["a"].values, made["b"].values)
    every = whole(expected.shape)
    boxes = [every, Box((1, 3, 2), (1, 5, 7)), Box((0, 11, 10), (2, 1, 1))]
    boxes += [chunk_of(every, dim, 5, index) for dim, index in itertools.product((1, 2), range(5))]
    for box in boxes:
        out = torch.full(box.shape, torch.nan)
        reads = [one for piece in moved.pieces for one in stored[piece.key].reads(piece, box, out)]
        assert do_reads(reads, workers=workers) > 0 or not box.numel
        assert torch.equal(out, expected[box.slices]), box


def test_a_run_that_is_missing_names_its_file(tmp_path: Path) -> None:
    (source,) = opened(tmp_path, fp8_block(24, 64)).values()
    os.truncate(tmp_path / "1.safetensors", (tmp_path / "1.safetensors").stat().st_size - 4)
    with pytest.raises(fs.CheckpointFormatError, match=r"1\.safetensors cannot be read .*'m'"):
        read(source, whole((24, 64)))


def test_an_exponent_of_255_is_no_number(tmp_path: Path) -> None:
    made = FORMATS["mxfp4"](24, 64)
    made.tensors[".weight_scale"][3, 1] = 255
    (source,) = opened(tmp_path, made).values()
    out, _ = read(source, whole((24, 64)))
    assert out.isnan().nonzero().tolist() == [[3, column] for column in range(32, 64)]


# --- what the formats' own packages packed and dequantised; benchmarks/checks/golden.py ----------------

FILES = sorted((Path(__file__).parent / "golden").glob("*.safetensors"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_values_are_those_of_the_package(path: Path, tmp_path: Path) -> None:
    with safe_open(path, "pt") as file:
        tensors = {key.removeprefix("m."): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        settings = json.loads(file.metadata()["settings"])
    values = tensors.pop("values")
    (source,) = opened(
        tmp_path, Written({f".{key}": tensor for key, tensor in tensors.items()}, values, settings)
    ).values()
    out, _ = read(source, whole(tuple(values.shape)))
    # Integers with scales in bfloat16 are rounded to that by the package, once.
    assert torch.equal(out.to(values.dtype), values)
    assert values.dtype == torch.float32 or source.format.startswith(("int", "mxfp4"))


# --- how rows are stored by the config alone, beside what there is in files --------------------------------

WIDTH = 2048  # of a real layer: what fills a row up, or a number for each row, counts for little


@pytest.mark.parametrize("name", FORMATS)
def test_the_config_says_how_rows_are_stored(name: str, tmp_path: Path) -> None:
    made = FORMATS[name](8, WIDTH)
    found: Any = next(iter(opened(tmp_path, made).values()))
    assert isinstance(found, Packed)
    expected = found.row_format()
    # DeepSeek-V4 has matrices in FP8, and stacks of them in MXFP4.
    shape = (2, 8, WIDTH) if name == "fp4 of deepseek-v4" else (8, WIDTH)
    rows = find.rows_by_config(Settings("config.json", made.settings["quant_method"], made.settings), shape)
    if expected is None:
        assert rows is None
        return
    assert rows is not None
    form, is_transposed = rows
    assert (form.width, is_transposed) == (expected.width, False)
    # Such configs do not say of what dtype scales are.
    unsaid = "e8m0" in name or "uint8" in name or name == "fp8 block, compressed-tensors"
    if not unsaid:
        assert form.row_bytes == pytest.approx(expected.row_bytes, rel=0.01)
    form.values_into(torch.zeros(2, form.row_bytes, dtype=torch.uint8), torch.empty(2, WIDTH))


@pytest.mark.parametrize(
    ("lists", "module", "is_left_out"),
    [
        ({"modules_to_not_convert": ["lm_head", "mlp.gate"]}, "model.layers.1.mlp.gate", True),
        ({"modules_to_not_convert": ["lm_head", "mlp.gate"]}, "model.layers.1.mlp.gate_proj", False),
        ({"ignore": ["re:.*self_attn.*"]}, "model.layers.1.self_attn.q_proj", True),
        ({"ignore": ["re:.*self_attn.*"]}, "model.layers.1.mlp.experts.down_proj", False),
        ({"exclude_modules": ["model.layers.0.*"]}, "model.layers.0.mlp.down_proj", True),
        ({"exclude_modules": ["model.layers.0.*"]}, "model.layers.10.mlp.down_proj", False),
        ({"ignored_layers": ["re:("]}, "model.layers.0.mlp.down_proj", False),
        ({}, "model", False),
    ],
)
def test_lists_of_modules_that_are_not_packed(lists: Any, module: str, is_left_out: bool) -> None:
    method = {"ignore": "compressed-tensors", "exclude_modules": "modelopt"}.get(next(iter(lists), ""), "fp8")
    assert find.is_left_out(Settings("config.json", method, lists), module) is is_left_out
