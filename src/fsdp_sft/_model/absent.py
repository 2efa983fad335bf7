"""The text model of a multimodal one alone: in place of its towers stands what says where they are."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from fsdp_sft._model.named import slot
from fsdp_sft._model.towers import towers_of
from fsdp_sft.errors import UnsupportedModelError


class AbsentTower(nn.Module):
    """Stands where a tower would be, and has no parameters.

    Attributes:
        folder: Folder whose tower was left out, from which an export copies it.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @property
    def dtype(self) -> NoReturn:
        """Raises as the forward does: some models cast pixels to it first."""
        self.forward()

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raises UnsupportedModelError: the batch has images for a tower that was left out."""
        raise UnsupportedModelError(
            "the batch has pixels or sounds, and the model was built of its text part alone: leave "
            "part='text' out, or the pixels"
        )


def leave_out_towers(model: nn.Module, name: str | os.PathLike[str]) -> None:
    """Replace the towers of a model on the meta device, which was built from this folder.

    Raises:
        ValueError: If the name is no folder, from which an export could copy them.
    """
    towers = towers_of(model)
    if towers and not Path(name).is_dir():
        raise ValueError(
            f"part='text' leaves the towers of {name} out, which an export copies from a folder: pass the "
            "one that huggingface_hub.snapshot_download returns, or use load_pretrained"
        )
    for fqn in towers:
        setattr(*slot(model, fqn), AbsentTower(Path(name).absolute()))


def absent_towers(model: nn.Module) -> dict[str, Path]:
    """FQNs of the towers that were left out of a model, and the folder that has them."""
    return {name: m.folder for name, m in model.named_modules() if isinstance(m, AbsentTower)}


def take_towers_from(model: nn.Module, folder: Path) -> None:
    """Let an export take the towers that were left out from the folder that the weights come from."""
    for module in model.modules():
        if isinstance(module, AbsentTower):
            module.folder = folder.absolute()


def is_absent(name: str, towers: Mapping[str, Path]) -> bool:
    """Whether a tensor's name is that of one in a tower that was left out."""
    return name.startswith(tuple(f"{tower}." for tower in towers))
