"""How often the host waits for the device in a step, and what ranks send each other: counted, not timed.

    python -m benchmarks.checks.host_syncs --output host-syncs.md

On two simulated accelerators (tests/simulated), which count a wait where CUDA would make the host wait. Every
way trains the same small Llama on windows of three micro-batches and reports loss and norm in each step.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import fsdp_sft as fs
from benchmarks.checks import trainers
from benchmarks.checks.simulated import Counted, on_ranks
from benchmarks.tables import publish, table

MICRO_BATCHES = 3
RANKS = 2
BEFORE = 4
Way = Callable[[Any, list[Any], Any], Any]


def _config() -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def _window(masked: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    window = []
    for _ in range(MICRO_BATCHES):
        ids = torch.randint(3, 1000, (2, 48), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if masked:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][0, 40:] = 0
            batch["labels"][0, 40:] = -100
        window.append(batch)
    return window


def _by_hand(model: Any, window: list[Any], optimizer: Any) -> tuple[float, float]:
    """What a person writes: losses, clipping, a step, and what is logged read at its end."""
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for index, batch in enumerate(window):
        model.set_requires_gradient_sync(index == len(window) - 1)
        moved = {name: value.pin_memory().to(device, non_blocking=True) for name, value in batch.items()}
        loss = model(**moved).loss / len(window)
        loss.backward()
        total += loss.detach()
    return _stepped(model, optimizer, total)


def _stepped(model: Any, optimizer: Any, total: torch.Tensor) -> tuple[float, float]:
    """Clip, step, and read what is logged."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return total.item(), norm.item()


def _with_loss_sum(model: Any, window: list[Any], optimizer: Any) -> tuple[float, float]:
    """The same with the pieces of the library."""
    device = next(model.parameters()).device
    targets = fs.count_targets(window)
    total = torch.zeros((), device=device)
    for index, batch in enumerate(window):
        with fs.gradient_sync(model, "all" if index == len(window) - 1 else "none"):
            moved = {name: value.pin_memory().to(device, non_blocking=True) for name, value in batch.items()}
            loss = fs.causal_lm_loss(model, moved, num_targets=targets)
            loss.backward()
            total += loss.detach()
    return _stepped(model, optimizer, total)


WAYS: dict[str, Way] = {
    "train_step": lambda m, w, o: fs.train_step(m, w, o, grad_sync="last"),
    "a loop by hand, plain torch": _by_hand,
    "a loop by hand, causal_lm_loss": _with_loss_sum,
    "evaluate": lambda m, w, o: fs.evaluate(m, w),
}


def _is_the_models(sync: Any) -> bool:
    return any("transformers/models" in frame.filename or "masking" in frame.filename for frame in sync.stack)


def _kinds(syncs: list[Any]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(s.kind for s in syncs).items()) or "none"


def _row(name: str, masked: bool, counted: Counted) -> list[object]:
    of_model = [sync for sync in counted.syncs if _is_the_models(sync)]
    own = [sync for sync in counted.syncs if not _is_the_models(sync)]
    calls, moved = counted.collectives
    kinds = "with padding" if masked else "no mask"
    return [name, kinds, len(own), _kinds(own), len(of_model), calls, f"{moved / 1e6:.2f}"]


def _model() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(_config())


def _count(name: str, masked: bool) -> list[object]:
    model = fs.shard_model(_model().to("sim"), mesh=fs.build_mesh()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(BEFORE):
        WAYS[name](model, _window(masked), optimizer)
    window = _window(masked)
    counted = Counted()
    counted.start()
    WAYS[name](model, window, optimizer)
    counted.stop()
    return _row(name, masked, counted)


def _count_all() -> list[list[object]]:
    return [_count(name, masked) for masked in (False, True) for name in WAYS]


def _count_trainer(name: str) -> list[object]:
    """On a rank of its own run: accelerate keeps what it has found out for the process."""
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 1000, (96, 48)).tolist()]
    return _row(name, False, trainers.count(name, _model(), rows, MICRO_BATCHES, BEFORE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = on_ranks(_count_all, RANKS)
    for name in trainers.NAMES:
        if package := trainers.missing(name):
            print(f"{name} is left out: it needs {package}")
        else:
            rows.append(on_ranks(_count_trainer, RANKS, name))
    head = ["way", "batches", "waits", "kinds", "waits of the model's code", "collectives", "MB"]
    lines = [
        "`python -m benchmarks.checks.host_syncs`: waits of the host for the device in one optimizer step of",
        f"{MICRO_BATCHES} micro-batches, on {RANKS} simulated accelerators, after four steps; torch",
        f"{torch.__version__}, a Llama of 4 blocks, gradients reduced with the last micro-batch. What of",
        "them transformers' own forward does (it reads a padding mask's values, and without one whether",
        "positions are those of packs, for which a loop with a cache does not look) is counted apart.",
        "Collectives are those of the device and of the larger side: what is gathered, or to be reduced. A",
        "loop with `causal_lm_loss` waits for where the targets are, and to prove the model's head, in each",
        "forward: `train_step` knows the former from the batch on the host, the latter from the norm.",
        "Trainer and SFTTrainer (FSDP2 through accelerate, bf16, a log line a step) are counted from the",
        "beginning of a step to that of the next; they take the simulated device for a GPU.",
        "",
        *table(head, rows),
    ]
    publish("Waits for the device", lines, options.output)


if __name__ == "__main__":
    main()
