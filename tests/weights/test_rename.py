"""Names of one's own: modules that are not transformers', and checkpoints of other names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.hf_folders import difference, plain, rewrite, save_tiny, tensors_of
from tests.harness.models import full
from tests.harness.ranks import run_distributed

FLOAT32 = MixedPrecisionPolicy()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x * self.scale).relu())


class OwnModel(nn.Module):
    """A model of one's own, whose head is its embedding."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.wte = nn.Embedding(31, width)
        self.h = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 31, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


def theirs(name: str) -> str:
    return "their." + name.replace("h.", "layers.").replace("wte", "embed")


def ours(name: str) -> str | None:
    if name == "their.step":
        return None
    return name.removeprefix("their.").replace("layers.", "h.").replace("embed", "wte")


def _without_scales(name: str) -> str | None:
    return None if name.endswith("scale") else ours(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("own")
    torch.manual_seed(0)
    state = {name: t.clone() for name, t in OwnModel().state_dict().items() if name != "head.weight"}
    state = {name: torch.randn_like(t) for name, t in state.items()}
    save_file(state, root / "plain.safetensors")
    (root / "named").mkdir()
    named = {theirs(name): t for name, t in state.items()}
    save_file({**named, "their.step": torch.ones(1)}, root / "named" / "model.safetensors")
    return root


def _own_model(folder: Path) -> None:
    from safetensors.torch import load_file

    state = load_file(folder / "plain.safetensors")
    names: dict[str, str | None] = {theirs(name): name for name in state}
    for rename in (ours, {**names, "their.step": None}):
        with torch.device("meta"):
            model = OwnModel()
        fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32)
        report = fs.load_weights(model, folder / "named", rename=rename)
        assert not report.missing
        for name, value in state.items():
            assert torch.equal(full(model.state_dict()[name]).cpu(), value), name
        oracle = OwnModel()
        oracle.load_state_dict({**state, "head.weight": state["wte.weight"]})
        ids = torch.arange(12).view(2, 6)
        device = next(model.parameters()).device
        assert torch.allclose(model(ids.to(device)).cpu(), oracle(ids), rtol=1e-5, atol=1e-5)
    with torch.device("meta"):
        model = OwnModel()
    fs.shard_model(model, mesh=mesh_here())
    left: dict[str, str | None] = {"their.step": None}
    for rename, error, text in (
        (None, fs.CheckpointFormatError, r"no values for .* of OwnModel: rename= says which"),
        (lambda name: "wte.weight", fs.CheckpointFormatError, r"rename gives .wte.weight. to .* and to"),
        (lambda name: 3, TypeError, "rename gives 3 for"),
        ({"typo": "x"}, fs.CheckpointFormatError, "rename names typo, which the checkpoint does not have"),
        (3, TypeError, "must be a mapping or a function"),
        (names, fs.CheckpointFormatError, r"OwnModel has no place for their.step"),
    ):
        with pytest.raises(error, match=text):
            fs.load_weights(model, folder / "named", rename=rename)  # type: ignore[arg-type]
    with pytest.raises(fs.CheckpointMismatchError, match=r"nothing says what h\.0\.scale"):
        fs.load_weights(model, folder / "named", rename=_without_scales, missing="initialise")
    filled = OwnModel()
    fs.shard_model(filled, mesh=mesh_here())
    with pytest.raises(fs.CheckpointFormatError, match=r"no values for h\.0\.scale.*keeps the values"):
        fs.load_weights(filled, folder / "named", rename=_without_scales)
    told = fs.load_weights(filled, folder / "named", rename=_without_scales, missing="initialise")
    assert told.missing == [f"h.{layer}.scale" for layer in range(3)]
    assert torch.equal(filled.h[0].scale.cpu(), torch.ones(10))
    fs.load_weights(model, folder / "named", rename={**names, **left})
    assert not model.wte.weight.is_meta


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_module_of_ones_own(ranks: int, folder: Path) -> None:
    run_distributed(_own_model, ranks, folder)


class Actor(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def _wrapped(folder: Path) -> None:
    model: Any = Actor(fs.build_meta_model(folder / "base"))
    fs.shard_model(model, mesh=mesh_here())
    for call in (
        lambda: fs.load_weights(model, folder / "base"),
        lambda: fs.export_hf(model, folder / "out"),
        lambda: fs.check_export(folder / "out", model=model),
        lambda: fs.iter_hf_tensors(model),
    ):
        with pytest.raises(TypeError, match=r"pass the one inside, model\.model, which"):
            call()
    fs.load_weights(model.model, folder / "base")
    assert difference(model.model, plain(folder / "base")) == []
    fs.export_hf(model.model, folder / "out")
    # A checkpoint of a wrapper, of which transformers' own conversions make its experts.
    model = fs.build_meta_model(folder / "base")
    fs.shard_model(model, mesh=mesh_here())
    fs.load_weights(model, folder / "wrapped", rename=lambda name: name.removeprefix("actor."))
    assert difference(model, plain(folder / "base")) == []


def test_wrappers_are_told_what_to_pass(tmp_path: Path) -> None:
    for name in ("base", "wrapped"):
        save_tiny(tmp_path / name, "mixtral")
    rewrite(
        tmp_path / "wrapped",
        {f"actor.{name}": tensor for name, tensor in tensors_of(tmp_path / "base").items()},
    )
    run_distributed(_wrapped, 2, tmp_path)
