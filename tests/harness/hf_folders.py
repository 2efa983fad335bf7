"""Tiny checkpoints on disk, and loaded models compared bit for bit with plain from_pretrained."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.models import FLOAT32, full, tiny_model


def save_tiny(folder: Path, family: str = "llama", *, max_shard_size: str = "20KB", **overrides: Any) -> Path:
    """A bf16 checkpoint as plain ``save_pretrained`` writes it, in several files."""
    tiny_model(family, dtype=torch.bfloat16, **overrides).save_pretrained(
        folder, max_shard_size=max_shard_size
    )
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every stored tensor."""
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], *, files: int = 1) -> None:
    """Replace a folder's weights by ``tensors``, over several files with an index or in one without."""
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    tensors = {name: t.contiguous().clone() for name, t in tensors.items()}
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {name: f"model-{i % files}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in sorted(set(weight_map.values())):
        part = {name: tensors[name] for name, owner in weight_map.items() if owner == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def configure(folder: Path, **fields: Any) -> None:
    """Give fields of a folder's config other values."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def plain(folder: Path, *, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    """The oracle: what plain transformers loads, unsharded."""
    import transformers

    cls = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    torch.manual_seed(0)  # for keys that are initialised
    return cls.from_pretrained(folder, dtype=dtype, **kwargs).train()


def loaded(
    folder: Path,
    mesh_shape: dict[str, int] | None = None,
    *,
    shard: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A model in float32 that is loaded into shards on a mesh of that shape, or as a whole.

    Args:
        folder: Of the checkpoint.
        mesh_shape: Of ``build_mesh``; None does not shard.
        shard: Further options of ``shard_model``.
        **options: Those of ``load_weights``, whose report is ``load_report`` of the model.
    """
    model = fs.build_meta_model(folder)
    if mesh_shape is not None:
        fs.shard_model(model, mesh=mesh_here(**mesh_shape), mp_policy=FLOAT32, **(shard or {}))
    model.load_report = fs.load_weights(model, folder, **options)
    return model


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, whole, under each of its names; the same on all ranks."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: full(tensor).detach() for name, tensor in named}


def difference(model: Any, oracle: Any) -> list[str]:
    """What differs: names, shapes, dtypes, bits, ties, flags, mode."""
    mine, theirs = state_of(model), state_of(oracle)
    problems = [f"only one has {name}" for name in sorted(mine.keys() ^ theirs.keys())]
    for name in sorted(mine.keys() & theirs.keys()):
        a, b = mine[name], theirs[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            problems.append(f"{name}: {tuple(a.shape)} {a.dtype}, not {tuple(b.shape)} {b.dtype}")
        elif not torch.equal(a, b) and not (
            torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        ):
            problems.append(f"{name}: {int((a != b).sum())} of {a.numel()} elements differ")

    ours, others = ({(n, p.requires_grad) for n, p in m.named_parameters()} for m in (model, oracle))
    if unlike := ours ^ others:
        problems.append(f"ties or requires_grad differ: {sorted(unlike)[:4]}")
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        problems.append("something is on meta")
    if model.training != oracle.training:
        problems.append("the mode differs")
    return problems
