"""The ports of public loops (examples/ports) against the originals' loops, written down with torch alone.

On one rank losses in float32 are bitwise the original's; on two within 1e-6, since sums over ranks have
another order. Only the order of the rows is taken from the library, so that both see the same data.
"""

import itertools
import json
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler

from tests.harness.forks import Program
from tests.harness.places import EXAMPLES, script
from tests.harness.ranks import run_distributed

Loss = Callable[[nn.Module, Any], torch.Tensor]
PORTS = EXAMPLES / "ports"


Steps = list[tuple[float, float]]  # loss and norm of the gradient


def _check(results: list[Any], expected: Steps) -> None:
    actual = [(result.loss, result.grad_norm) for result in results]
    assert len(actual) == len(expected) > 2
    _check_numbers([loss for loss, _ in actual], [loss for loss, _ in expected])
    _check_numbers([norm for _, norm in actual], [norm for _, norm in expected])


def _check_numbers(actual: list[float], expected: list[float]) -> None:
    same = expected if dist.get_world_size() == 1 else pytest.approx(expected, rel=1e-6)
    assert actual == same, f"{actual} for {expected}"


def _rounds(rows: list[Any], size: int, collate: Any, *, epochs: int, seed: int = 0) -> Iterator[list[Any]]:
    """The batches of all ranks, one round after the other."""
    import fsdp_sft as fs

    ranks = dist.get_world_size()
    samplers = [fs.ResumableSampler(rows, seed=seed, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [DataLoader(rows, size, sampler=sampler, collate_fn=collate) for sampler in samplers]
        yield from map(list, zip(*loaders, strict=True))


def _steps(
    model: nn.Module,
    rounds: Iterator[list[Any]],
    grad_accum_steps: int,
    loss_of: Loss,
    optimizer: torch.optim.Optimizer,
    *,
    scheduler: Any = None,
    max_grad_norm: float | None = None,
) -> Steps:
    """A mean of means: each batch's loss over the number of micro-batches, gradients averaged over ranks."""
    steps = []
    while window := list(itertools.islice(rounds, grad_accum_steps)):
        total = 0.0
        for batch in itertools.chain(*window):
            loss = loss_of(model, batch)
            (loss / grad_accum_steps / dist.get_world_size()).backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
        steps.append((total / grad_accum_steps / dist.get_world_size(), float(norm)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return steps


def _logged(path: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row[name] for row in rows if name in row]


# pytorch/examples


def _pytorch_fsdp2(folder: Path) -> None:
    port = script("pytorch_fsdp2", PORTS)
    words = ["--steps", "3", "--batch-size", "4", "--layers", "3", "--length", "16", "--vocab-size", "96"]
    args = port.parse_arguments([*words, "--checkpoints", str(folder / f"{dist.get_world_size()}")])
    results = port.train(args) + port.train(args)  # the second goes on from the first's checkpoint
    ranks = range(dist.get_world_size())
    generators = [
        [torch.Generator().manual_seed(rank + done * len(ranks)) for rank in ranks] for done in (0, 3)
    ]
    rounds = (
        [torch.randint(0, 96, (4, 16), generator=generator) for generator in of_ranks]
        for of_ranks in generators
        for _ in range(3)
    )
    model = port.build_model(args)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    _check(results, _steps(model, rounds, 1, lambda m, x: m(x).sum(), optimizer, max_grad_norm=1.0))


@pytest.mark.parametrize("ranks", [1, 2])
def test_pytorch_fsdp2_trains_and_resumes_as_the_original(ranks: int, tmp_path: Path) -> None:
    run_distributed(_pytorch_fsdp2, ranks, tmp_path)


def test_pytorch_fsdp2_runs_as_a_program(tmp_path: Path) -> None:
    words = ["--steps", "2", "--layers", "1", "--batch-size", "2", "--checkpoints", str(tmp_path)]
    code, text = Program(EXAMPLES / "ports" / "pytorch_fsdp2.py", *words).wait()
    assert code == 0, text[-3000:]
    assert "step 2: loss" in text


# litgpt


def _litgpt_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """litgpt's chunked_cross_entropy of shifted targets: the batch's mean, by chunks of 128 positions."""
    logits = model(batch["input_ids"])[..., :-1, :].reshape(-1, model.config.padded_vocab_size)
    targets = batch["labels"][..., 1:].reshape(-1)
    chunks = zip(logits.split(128), targets.split(128), strict=True)
    losses = torch.cat([F.cross_entropy(x, y, ignore_index=-100, reduction="none") for x, y in chunks])
    return losses.sum() / max(1, int((targets != -100).sum()))


def _litgpt_files(folder: Path) -> None:
    """A checkpoint, and rows of unequal lengths of which the first half is a prompt."""
    small = script("small_gpt", PORTS)
    torch.manual_seed(0)
    torch.save(small.GPT(small.Config()).state_dict(), folder / "lit_model.pth")
    draw = random.Random(0)
    for name, number in (("train", 16), ("val", 7)):
        lines = []
        for _ in range(number):
            ids = [draw.randrange(1, 512) for _ in range(draw.randrange(8, 40))]
            half = len(ids) // 2
            lines.append(json.dumps({"input_ids": ids, "labels": [-100] * half + ids[half:]}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))


def _litgpt_words(folder: Path, *more: str) -> list[str]:
    files = {"checkpoint": "lit_model.pth", "train": "train.jsonl", "val": "val.jsonl"}
    named = [word for name, file in files.items() for word in (f"--{name}", str(folder / file))]
    sizes = ["--global-batch-size", "8", "--micro-batch-size", "2", "--epochs", "3", "--warmup-steps", "2"]
    return [*named, "--precision", "32-true", *sizes, "--save-interval", "4", *more]


def _litgpt_oracle(folder: Path, args: Namespace, loss_of: Loss) -> tuple[nn.Module, Steps]:
    port, small = script("litgpt_full", PORTS), script("small_gpt", PORTS)
    model = small.GPT(small.Config())
    model.load_state_dict(torch.load(folder / "lit_model.pth"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6 - 2)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[2])
    rounds = _rounds(port.read_rows(args.train), 2, port.collate, epochs=3, seed=1337)
    grad_accum_steps = 8 // 2 // dist.get_world_size()
    return model, _steps(model, rounds, grad_accum_steps, loss_of, optimizer, scheduler=scheduler)


def _litgpt(folder: Path) -> None:
    port = script("litgpt_full", PORTS)
    out = folder / f"out-{dist.get_world_size()}"
    args = port.parse_arguments(_litgpt_words(folder, "--out", str(out), "--weigh", "batches"))
    results = port.train(args)
    oracle, expected = _litgpt_oracle(folder, args, _litgpt_loss)
    _check(results, expected)
    resumed = port.parse_arguments(_litgpt_words(folder, "--out", str(out), "--weigh", "batches", "--resume"))
    assert port.train(resumed) == results[4:]

    # What it saves is a litgpt checkpoint, and what it says of it is the mean over all targets.
    saved = type(oracle)(oracle.config)
    saved.load_state_dict(torch.load(out / "final" / "lit_model.pth"))
    batches = [port.collate([row]) for row in port.read_rows(args.val)]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    with torch.no_grad():
        means = [float(_litgpt_loss(saved, batch)) for batch in batches]
    mean = sum(m * n for m, n in zip(means, counts, strict=True)) / sum(counts)
    if dist.get_rank() == 0:
        assert _logged(out / "log.jsonl", "val_loss")[-1] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_litgpt_trains_and_resumes_as_the_original(ranks: int, tmp_path: Path) -> None:
    _litgpt_files(tmp_path)
    run_distributed(_litgpt, ranks, tmp_path)


def _litgpt_by_targets(folder: Path) -> None:
    port = script("litgpt_full", PORTS)
    args = port.parse_arguments(_litgpt_words(folder, "--out", str(folder / "out")))
    (first_loss, *_) = [result.loss for result in port.train(args)]
    rows = port.read_rows(args.train)
    first = list(itertools.islice(_rounds(rows, 2, port.collate, epochs=1, seed=1337), 2))
    targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in itertools.chain(*first))
    small = script("small_gpt", PORTS)
    model = small.GPT(small.Config())
    model.load_state_dict(torch.load(folder / "lit_model.pth"))
    total = 0.0
    for batch in itertools.chain(*first):
        logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
        total += float(F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum"))
    assert first_loss == pytest.approx(total / targets, rel=1e-6)
    _, originals = _litgpt_oracle(folder, args, _litgpt_loss)
    assert abs(first_loss / originals[0][0] - 1) > 1e-4  # the original's mean of means is another number


def test_litgpt_by_default_weighs_every_target_the_same(tmp_path: Path) -> None:
    _litgpt_files(tmp_path)
    run_distributed(_litgpt_by_targets, 2, tmp_path)


# transformers


def _chats() -> list[dict[str, Any]]:
    """Rows of two turns, of unequal lengths."""
    turns = [(f"What is {i} and {i}?", f"It is {2 * i}" + " indeed" * (i % 5)) for i in range(8)]
    return [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
        for ask, answer in turns
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, chats, and texts that make 16 blocks of 16 tokens to train on and 5 to evaluate."""
    folder = tmp_path_factory.mktemp("ports")
    texts = [message["content"] for row in _chats() for message in row["messages"]]
    script("tiny_model", EXAMPLES).make_tiny_model(folder / "model", texts)
    (folder / "chats.jsonl").write_text("\n".join(json.dumps(row) for row in _chats()))
    port, tokenizer = script("run_clm_no_trainer", PORTS), AutoTokenizer.from_pretrained(folder / "model")
    for name, number in (("train", 16), ("validation", 5)):
        lines = texts * 8
        while len(port.group_texts(lines, tokenizer, 16)) > number:
            lines.pop()
        (folder / f"{name}.txt").write_text("\n".join(lines))
    return folder


def _clm_arguments(folder: Path, out: Path, *more: str) -> Namespace:
    files = ["--train-file", str(folder / "train.txt"), "--validation-file", str(folder / "validation.txt")]
    sizes = ["--block-size", "16", "--per-device-train-batch-size", "2", "--num-train-epochs", "2"]
    settings = ["--weight-decay", "0.1", "--num-warmup-steps", "1", "--mixed-precision", "no"]
    words = ["--model", str(folder / "model"), *files, "--output-dir", str(out), *sizes, *settings, *more]
    return script("run_clm_no_trainer", PORTS).parse_arguments(words)


def _clm(folder: Path, out: Path) -> None:
    port = script("run_clm_no_trainer", PORTS)
    # All blocks have as many targets, so weighing them by target is the original's loss but for its rounding.
    weigh = "batches" if dist.get_world_size() == 1 else "targets"
    args = _clm_arguments(folder, out, "--gradient-accumulation-steps", "2", "--weigh", weigh)
    results = port.train(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = port.group_texts(args.train_file.read_text().splitlines(), tokenizer, 16)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
    # The tokenizer has a token more than the model (Qwen2's end of text): its embedding grows, as in the
    # original.
    known = model.config.vocab_size
    assert len(tokenizer) == known + 1
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[known:] = embedding[:known].double().mean(0)
    norms = {name for name, _ in model.named_parameters() if "norm" in name or "bias" in name}
    groups = [
        {"params": [p for n, p in model.named_parameters() if n not in norms], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n in norms], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-5)
    scheduler = get_scheduler("linear", optimizer, 1, 2 * 4 // dist.get_world_size())
    rounds = _rounds(rows, 2, default_data_collator, epochs=2)
    expected = _steps(model, rounds, 2, lambda m, b: m(**b).loss, optimizer, scheduler=scheduler)
    _check(results, expected)

    # So is the original's evaluation, a mean over rows.
    rows = port.group_texts(args.validation_file.read_text().splitlines(), tokenizer, 16)
    with torch.no_grad():
        means = [float(model.eval()(**default_data_collator([row])).loss) for row in rows]
    if dist.get_rank() == 0:
        assert _logged(out / "log.jsonl", "eval_loss")[-1] == pytest.approx(sum(means) / len(means), rel=1e-5)
    assert (out / "export" / "model.safetensors").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_clm_trains_as_the_original(ranks: int, folder: Path, tmp_path: Path) -> None:
    run_distributed(_clm, ranks, folder, tmp_path)


# Democratizing-LLM-FT


def _left_padded(folder: Path, length: int) -> Callable[[list[Any]], dict[str, torch.Tensor]]:
    """The original's collation: all but the other roles' messages trained, padded on the left, shifted."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def ids_of(messages: list[Any], **options: Any) -> list[int]:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)

    def encode(row: Any) -> tuple[list[int], list[int]]:
        messages = row["messages"]
        ids = ids_of(messages)
        labels = list(ids)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                continue
            start = len(ids_of(messages[:i])) if i else 0
            answered = i + 1 < len(messages) and messages[i + 1]["role"] == "assistant"
            end = len(ids_of(messages[: i + 1], add_generation_prompt=answered))
            labels[start:end] = [-100] * (end - start)
        return ids[: length + 1], labels[: length + 1]

    def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
        return torch.tensor([[filler] * (length + 1 - len(row)) + row for row in rows])

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        ids, labels = zip(*map(encode, rows), strict=True)
        mask = padded([[1] * len(row) for row in ids], 0)
        return {
            "input_ids": padded(list(ids), tokenizer.pad_token_id)[:, :-1],
            "attention_mask": mask[:, :-1],
            "shift_labels": padded(list(labels), -100)[:, 1:],
        }

    return collate


def _democratizing_arguments(folder: Path, out: Path, *more: str) -> Namespace:
    sizes = [
        "--batch-size",
        "2",
        "--grad-acc",
        "2",
        "--epochs",
        "3",
        "--seq-length",
        "48",
        "--num-workers",
        "0",
    ]
    settings = ["--lr", "1e-3", "--lr-warmup-ratio", "0.5", "--sac", "1/2", "--dtype", "float32"]
    words = ["--model", str(folder / "model"), "--data", str(folder / "chats.jsonl"), "--output", str(out)]
    return script("democratizing_sft", PORTS).parse_arguments([*words, *sizes, *settings, *more])


def _democratizing_original(folder: Path, collate: Any, *, divide_by_ranks: bool) -> tuple[nn.Module, Steps]:
    """The original's loop under fully_shard: losses as it logs them, and norms as it clips them."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).train()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-5)
    batches = 8 // 2 // ranks
    warmup = int(batches * 0.5) * 3 / 2
    schedulers = [
        torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-9, total_iters=warmup),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=batches * 3 / 2 - warmup),
    ]
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[warmup])
    steps, logged = [], 0.0
    for i, of_ranks in enumerate(_rounds(_chats(), 2, collate, epochs=3), start=1):
        batch = of_ranks[rank]
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        loss = loss / (ranks if divide_by_ranks else 1) / 2
        loss.backward()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        logged += float(mean) / ranks
        if i % 2 == 0:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            steps.append((logged, float(norm)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            logged = 0.0
    return model, steps


def _democratizing(folder: Path, out: Path) -> None:
    port, ranks = script("democratizing_sft", PORTS), dist.get_world_size()
    collate = _left_padded(folder, 48)
    results = port.train(_democratizing_arguments(folder, out, "--weigh", "batches"), collate)
    _, expected = _democratizing_original(folder, collate, divide_by_ranks=False)
    _check(results, expected)
    if ranks == 1:
        return
    # As it is, the original divides by the ranks once more than FSDP2's average does.
    model, halved = _democratizing_original(folder, collate, divide_by_ranks=True)
    assert halved[0] == pytest.approx((results[0].loss / 2, results[0].grad_norm / 2), rel=1e-6)
    # And every rank writes what get_model_state_dict returns to one file: on all but rank 0 that is nothing.
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(state) == (dist.get_rank() == 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_democratizing_trains_as_the_original(ranks: int, folder: Path, tmp_path: Path) -> None:
    run_distributed(_democratizing, ranks, folder, tmp_path)


def _democratizing_by_default(folder: Path, out: Path) -> None:
    import fsdp_sft as fs

    port = script("democratizing_sft", PORTS)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ours, theirs = fs.SFTCollator(tokenizer, max_length=48), _left_padded(folder, 48)
    for row in _chats():
        labels, shifted = ours([row])["labels"], theirs([row])["shift_labels"]
        trained, originals = (tokenizer.decode(x[x != -100]) for x in (labels, shifted))
        assert trained == row["messages"][1]["content"] + "<|im_end|>"
        assert originals == trained + "\n"  # which no generation is asked for

    # A prompt that fills the length leaves no target: a mean over none of them, with which all is lost.
    long = [{"role": "user", "content": "why " * 99}, {"role": "assistant", "content": "It is 2"}]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    assert port.mean_of_batch(model, theirs([{"messages": long}])).isnan()
    data = out / "chats.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in [*_chats(), {"messages": long}]))
    words = ("--data", str(data), "--epochs", "1")
    results = port.train(_democratizing_arguments(folder, out, *words))
    assert len(results) == 2  # of the 8 rows that have an answer

    (batch,) = next(_rounds(_chats(), 4, ours, epochs=1))
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert results[0].loss == pytest.approx(float(expected), rel=1e-6)


def test_democratizing_by_default_trains_answers_and_drops_rows_without(folder: Path, tmp_path: Path) -> None:
    run_distributed(_democratizing_by_default, 1, folder, tmp_path)
