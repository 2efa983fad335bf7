"""The port of run_clm_no_trainer (examples/ports) against the original's loop, written down with torch alone.

On one rank losses in float32 are bitwise the original's. Only the order of the rows is taken from the
library, so that both see the same data.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler

import fsdp_sft as fs
from tests import plain
from tests.harness.places import EXAMPLES, script
from tests.harness.ranks import run_distributed

PORTS = EXAMPLES / "ports"


def _written(folder: Path) -> Path:
    """A tiny model, chats, and texts that make 16 blocks of 16 tokens to train on and 5 to evaluate."""
    turns = [(f"What is {i} and {i}?", f"It is {2 * i}" + " indeed" * (i % 5)) for i in range(8)]
    texts = [text for turn in turns for text in turn]
    script("tiny_model", EXAMPLES).make_tiny_model(folder / "model", texts)
    port, tokenizer = script("run_clm_no_trainer", PORTS), AutoTokenizer.from_pretrained(folder / "model")
    for name, number in (("train", 16), ("validation", 5)):
        lines = texts * 8
        while len(port.group_texts(lines, tokenizer, 16)) > number:
            lines.pop()
        (folder / f"{name}.txt").write_text("\n".join(lines))
    return folder


WORDS = (
    "--block-size 16 --per-device-train-batch-size 2 --num-train-epochs 2 --weight-decay 0.1 "
    "--num-warmup-steps 1 --mixed-precision no --gradient-accumulation-steps 2 --weigh batches"
)


def _original(folder: Path, rows: list[Any]) -> tuple[Any, list[tuple[float, float]]]:
    """The model that the original's loop trains, and loss and norm of each of its steps."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).train()
    # The tokenizer has a token more than the model (Qwen2's end of text): its embedding grows, as there.
    known = model.config.vocab_size
    model.resize_token_embeddings(known + 1, mean_resizing=False)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[known:] = embedding[:known].double().mean(0)
    named = list(model.named_parameters())
    plainly = [p for n, p in named if "norm" in n or "bias" in n]
    decayed = [p for n, p in named if not ("norm" in n or "bias" in n)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plainly, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-5)
    scheduler = get_scheduler("linear", optimizer, 1, 8)
    sampler, steps = fs.ResumableSampler(rows), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(DataLoader(rows, 2, sampler=sampler, collate_fn=default_data_collator))
        for window in zip(batches[::2], batches[1::2], strict=True):
            losses = (model(**batch).loss / 2 for batch in window)  # a mean of means
            steps.append(plain.step(model, losses, [optimizer], max_norm=float("inf")))
            scheduler.step()
    return model.eval(), steps


def _clm(folder: Path, out: Path) -> None:
    port = script("run_clm_no_trainer", PORTS)
    files = ["--train-file", str(folder / "train.txt"), "--validation-file", str(folder / "validation.txt")]
    words = ["--model", str(folder / "model"), *files, "--output-dir", str(out), *WORDS.split()]
    args = port.parse_arguments(words)
    results = port.train(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows, held_out = (
        port.group_texts(path.read_text().splitlines(), tokenizer, 16)
        for path in (args.train_file, args.validation_file)
    )
    model, expected = _original(folder, rows)
    assert len(expected) == 8
    assert [(result.loss, result.grad_norm) for result in results] == expected
    # So is the original's evaluation, a mean over rows.
    with torch.no_grad():
        means = [float(model(**default_data_collator([row])).loss) for row in held_out]
    logged = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    (*_, evaluated) = (line["eval_loss"] for line in logged if "eval_loss" in line)
    assert evaluated == pytest.approx(sum(means) / len(means), rel=1e-5)
    assert (out / "export" / "model.safetensors").exists()


def test_run_clm_trains_as_the_original(tmp_path: Path) -> None:
    run_distributed(_clm, 1, _written(tmp_path), tmp_path / "out")
