"""The number of tensors that are loaded of each model class's checkpoint."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

import fsdp_sft as fs
from tests.harness.architectures import class_names, quiet, tiny_architecture


def now(arguments: Any, frozen: Any) -> dict[str, Any]:
    """By class: how many tensors were loaded; or an error."""
    found: dict[str, Any] = {}
    with quiet(), tempfile.TemporaryDirectory() as folder:
        for name in class_names():
            at = Path(folder) / name
            try:
                tiny_architecture(name).to(torch.bfloat16).save_pretrained(at)
                model = fs.build_meta_model(at)
                model.to_empty(device="cpu")
                report = fs.load_weights(model, at)
                found[name] = {"loaded": len(report.loaded)}
            except Exception as error:
                found[name] = type(error).__name__
            shutil.rmtree(at, ignore_errors=True)
    return found
