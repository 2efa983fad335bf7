"""Matrices that the formats' own packages packed and dequantised; ``make_golden.py`` writes the files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fsdp_sft._tensors.boxes import whole
from tests.harness.quantised_folders import opened, read
from tests.harness.quantised_weights import Written

FILES = sorted((Path(__file__).parent / "golden").glob("*.safetensors"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_values_are_those_of_the_package(path: Path, tmp_path: Path) -> None:
    with safe_open(path, "pt") as file:
        tensors = {key.removeprefix("m."): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        settings = json.loads(file.metadata()["settings"])
    values = tensors.pop("values")
    made = Written({f".{key}": tensor for key, tensor in tensors.items()}, values, settings)
    (source,) = opened(tmp_path, made).values()
    out, _ = read(source, whole(tuple(values.shape)))
    # Integers with scales in bfloat16 are rounded to that by the package, once.
    assert torch.equal(out.to(values.dtype), values)
    assert values.dtype == torch.float32 or source.format.startswith(("int", "mxfp4"))


def test_there_is_one_of_each_package() -> None:
    packages = set()
    for path in FILES:
        with safe_open(path, "pt") as file:
            packages.add(file.metadata()["package"].split()[0])
    assert packages == {"bitsandbytes", "compressed-tensors", "nvidia-modelopt", "transformers"}
