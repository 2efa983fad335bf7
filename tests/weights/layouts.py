r"""Folders of every kind of model that transformers builds: what loads, trains on text and comes back.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m tests.weights.layouts > tables.md

Each class is built tiny, with the names and the config that transformers publishes for it, and saved in
bfloat16. Then, on all ranks: it is loaded into float32 shards and compared bit by bit with plain
``from_pretrained``; it trains a step on text, whose loss and parameters stand beside one plain process; and
it is exported, and the export's keys, config and values are compared with the folder and the trained model.
Classes that cannot be built tiny by these rules, or whose plain forward wants more than text, are listed.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor

import fsdp_sft as fs
from tests.harness.architectures import class_names, quiet_for_good, tiny_architecture
from tests.harness.hf_folders import difference, plain, tensors_of
from tests.harness.models import full
from tests.harness.vision import beside_text

RATE = 0.05
CELLS = {
    "class": "class",
    "towers": "frozen",
    "bitwise": "bitwise",
    "loss": "own loss",
    "step": "a step beside one process",
    "export": "export",
    "packs": "packs",
    "refused": "refused",
}
NOT_TRIED = {
    "DiffusionGemmaForBlockDiffusion": "it denoises blocks, and predicts no next token",
    "Gemma3nForConditionalGeneration": "its vision tower is one of timm, which is not installed",
    "PI0ForConditionalGeneration": "it predicts a robot's actions",
}
# What an export may say otherwise than a folder that save_pretrained has written.
OF_NO_MATTER = {"transformers_version", "use_cache", "dtype", "torch_dtype", "_name_or_path"}


def vision_names() -> list[str]:
    from transformers.models.auto import modeling_auto

    mapped = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    return sorted({name for name in mapped if isinstance(name, str) and not name.endswith("ForCausalLM")})


def batch(name: str, config: Any) -> dict[str, torch.Tensor]:
    """Four rows of ids, none of which stands for an image or the like, and what a class wants beside them."""
    taken = {
        value for key, value in flat(config.to_dict()).items() if "token" in key and isinstance(value, int)
    }
    ids = torch.tensor([number for number in range(3, 101) if number not in taken][:32]).view(4, 8)
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    return beside_text(name, rows)


def plainly(name: str, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Save the tiny model of a class, and train its plain copy for a step: the loss, and the parameters."""
    tiny_architecture(name).to(torch.bfloat16).save_pretrained(folder)
    model = plain(folder)
    rows = batch(name, model.config)
    labels = rows.pop("labels")
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False  # the few layers may have no attention, which caches count by
    logits = model(**rows).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data -= RATE * parameter.grad
    return loss.item(), {name: p.detach() for name, p in model.named_parameters()}


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:160]}".replace("\n", " ").replace("|", "/")


def try_one(name: str, root: Path, mesh: Any) -> dict[str, str]:
    """The row of a class, or under "not" the reason why it is not tried."""
    if name in NOT_TRIED:
        return {"not": NOT_TRIED[name]}
    folder, row = root / name, {"class": name}
    begun: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            begun = [plainly(name, folder)]
        except Exception as error:
            begun = [in_words(error)]
    dist.broadcast_object_list(begun)
    if isinstance(begun[0], str):
        return {"not": begun[0]}
    try:
        model = fs.build_meta_model(folder)
        towers = fs.freeze_towers(model)
        fs.shard_model(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
        fs.load_weights(model, folder)
        model.train()
        row["towers"] = ", ".join(n.rpartition(".")[2] for n in towers) or "none"
        oracle = plain(folder)
        for tower in towers:
            oracle.get_submodule(tower).requires_grad_(False)
        row["bitwise"] = "yes" if difference(model, oracle) == [] else "NO"
        row |= trained_and_exported(name, model, folder, *begun[0])
    except Exception as error:
        row["refused"] = in_words(error)
    return row


def trained_and_exported(
    name: str, model: Any, folder: Path, loss: float, expected: dict[str, torch.Tensor]
) -> dict[str, str]:
    """A step beside that of one process, what is exported, and whether rows of packs are kept apart."""
    row, rank = {}, dist.get_rank()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    rows = {key: value.chunk(dist.get_world_size())[rank] for key, value in batch(name, model.config).items()}
    try:
        fs.prepare_loss(model)
    except fs.ModelLossError:  # a forward that wants more than tokens
        fs.prepare_loss(model, compare=False)
        row["loss"] = "compare=False"
    result = fs.train_step(model, [rows], optimizer, max_grad_norm=None)
    worst = 0.0
    for key, parameter in ((k, p) for k, p in model.named_parameters() if p.requires_grad):
        change = (full(parameter) - expected[key]).abs().max() / expected[key].abs().max().clamp_min(1e-6)
        worst = max(worst, change.item())
    row["step"] = f"loss {abs(result.loss - loss) / abs(loss):.0e}, parameters {worst:.0e}"
    out = folder.with_name(f"{name}-out")
    fs.export_hf(model, out, dtype=torch.bfloat16)
    trained = {key: full(parameter).detach().clone() for key, parameter in model.named_parameters()}
    row["packs"] = "-" if "loss" in row else packs(model)
    if rank == 0:  # no exchange follows
        row["export"] = exported(folder, out, trained)
    return row


def packs(model: Any) -> str:
    """Whether rows of a pack are kept apart, with weights so large that a row which sees another shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.ndim > 1):
            # Of the whole: ranks with the same part of their own would have experts that are alike.
            values = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements))
    try:
        fs.verify_packing(model, max_length=64)
    except fs.PackingError:
        return "refused"
    return "yes"


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of a config and of those within it that matter, by their paths."""
    fields: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            fields |= flat(value, f"{prefix}{key}.")
        elif key not in OF_NO_MATTER:
            fields[f"{prefix}{key}"] = value
    return fields


def _is_as_written(read: torch.Tensor, trained: torch.Tensor) -> bool:
    """Whether a value is that of the model, rounded to the export's dtype unless its class keeps float32."""
    rounded = trained.bfloat16().to(read.dtype)
    return torch.equal(read, trained.to(read.dtype)) or torch.equal(read, rounded)


def exported(folder: Path, out: Path, trained: dict[str, torch.Tensor]) -> str:
    """How an export differs from the folder, in its keys, its config and what is read back from it.

    Fields that an export has beside the folder's are those of transformers 4.
    """
    notes = []
    before, after = tensors_of(folder), tensors_of(out)
    if before.keys() != after.keys():
        only = sorted(before.keys() ^ after.keys())
        notes.append(f"{len(only)} keys, such as {only[0]}")
    old, new = (flat(json.loads((path / "config.json").read_text())) for path in (folder, out))
    notes += [f"config {key}" for key in sorted(old) if old[key] != new.get(key)]
    again = dict(plain(out, dtype=torch.bfloat16).named_parameters())
    wrong = [key for key, value in trained.items() if key in again and not _is_as_written(again[key], value)]
    notes += [f"{len(wrong)} tensors read back otherwise, such as {wrong[0]}"] if wrong else []
    return "; ".join(notes) or "same keys and config, reads back"


def table(kind: str, rows: dict[str, dict[str, str]]) -> str:
    """What was tried of a kind, and the reasons for what was not."""
    tried = [[row.get(cell, "") for cell in CELLS] for row in rows.values() if "not" not in row]
    whole = sum(row[2] == "yes" and not row[-1] for row in tried)
    apart = sum(row[6] == "yes" for row in tried)
    lines = [
        f"## {kind}\n",
        f"{len(tried)} tried on {dist.get_world_size()} ranks: {whole} load bitwise, train and come back; "
        f"{apart} keep the rows of a pack apart.\n",
        f"| {' | '.join(CELLS.values())} |",
        f"|{'---|' * len(CELLS)}",
        *("| " + " | ".join(row) + " |" for row in tried),
    ]
    left = [f"{name} ({row['not']})" for name, row in rows.items() if "not" in row]
    return "\n".join([*lines, f"\nNot tried, {len(left)}: {'; '.join(left) or 'none'}.\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="classes whose name has this in it")
    parser.add_argument("--text", type=int, default=70, help="how many classes of text")
    options = parser.parse_args()
    quiet_for_good()
    torch.set_num_threads(1)
    fs.init_distributed(device_type="cpu")
    mesh = fs.build_mesh(device_type="cpu")
    texts = class_names()
    kinds = {
        "Vision-language": vision_names(),
        "Text": texts[:: max(1, len(texts) // max(1, options.text))][: options.text],
    }
    for kind, names in kinds.items():
        rows = {}
        for name in (n for n in names if options.only in n):
            share = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(share)
            rows[name] = try_one(name, Path(str(share[0])), mesh)
            dist.barrier()
            shutil.rmtree(str(share[0]), ignore_errors=True)
        if dist.get_rank() == 0:
            print(table(kind, rows), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
