"""Windows of a loader's batches, what ranks' batches may differ in, and labels that are mistakes."""

import logging
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

import fsdp_sft as fs
from fsdp_sft.step.window import num_rows
from tests.harness.long_rows import sharing_rows
from tests.harness.models import FLOAT32, VOCAB, ragged_batches, tiny_config, tiny_model
from tests.harness.ranks import mesh_here, on_ranks


class Seeing(LlamaForCausalLM):
    """A model with a part of its own FSDP group that runs only where there is an image."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.tower = nn.Linear(4, config.hidden_size)

    def forward(self, input_ids: Any, pixel_values: Any = None, **kwargs: Any) -> Any:
        embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            embeds = embeds + self.tower(pixel_values)[:, None]
        return super().forward(inputs_embeds=embeds, **kwargs)


def _seeing(**mesh: int) -> Any:
    torch.manual_seed(0)
    model = Seeing(tiny_config("llama")).train()
    groups = {**fs.find_blocks(model), "tower": model.tower}
    return fs.shard_model(model, mesh=mesh_here(**mesh), mp_policy=FLOAT32, blocks=groups)


def _with_image(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "pixel_values": torch.ones(len(batch["input_ids"]), 4)}


@on_ranks(2, timeout=20)
def test_ranks_with_different_keys_are_refused_by_name() -> None:
    rank, model = dist.get_rank(), _seeing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = ragged_batches(2)[0]
    image = _with_image(text)
    for mine in ([text, image], [image, text]):
        with pytest.raises(
            fs.BatchError, match=r"different keys \(micro-batch 1: .*pixel_values.*, on ranks 0 and 1\)"
        ):
            fs.train_step(model, [text, mine[rank]], optimizer)
        with pytest.raises(fs.BatchError, match=r"different keys \(micro-batch 0"):
            fs.evaluate(model, [mine[rank]])
    assert not optimizer.state
    # The same keys in another order, or with None for what is not there, are the same keys.
    window = [image, {**dict(reversed(text.items())), "pixel_values": None} if rank else text]
    assert fs.train_step(model, window, optimizer).skipped is False


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
@on_ranks(timeout=60)
def test_a_rank_that_has_run_out_stands_in_with_the_keys_of_the_others(ranks: int, replicas: int) -> None:
    rank = dist.get_rank()
    texts = ragged_batches(4)[:3]
    images = [_with_image(batch) for batch in texts]
    torch.manual_seed(0)
    plain = Seeing(tiny_config("llama")).eval()
    model = _seeing(dp_replicate=replicas, dp_shard=dist.get_world_size() // replicas)
    for own in (
        [images[0], images[1], images[2]] if rank == 0 else [],  # a rank that never had a batch
        [images[0], texts[1], images[2]] if rank == 0 else images[:1],  # one that had other keys
        [texts[0], images[1]] if rank == 0 else [texts[0]],
    ):
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, own)
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in sum(shares, []):
                logits = plain(**{k: v for k, v in batch.items() if k != "labels"}).logits
                targets = batch["labels"][:, 1:].flatten()
                total += float(
                    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
                )
                count += int((targets != -100).sum())
        result = fs.evaluate(model, own)
        assert (result.loss, result.num_targets) == (pytest.approx(total / count, rel=1e-6), count)


@on_ranks(2)
def test_ranks_with_different_options_are_refused() -> None:
    rank = dist.get_rank()
    model = fs.shard_model(tiny_model("mixtral"), mesh=mesh_here(), mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.to_local().clone() for p in model.parameters()]
    batch = ragged_batches(2)[0]
    for name, values in {
        "max_grad_norm": (1.0, None),
        "grad_sync": ("each", "last"),
        "check": (True, False),
        "count_fn": (None, len),
    }.items():
        with pytest.raises(fs.BatchError, match=rf"different options \({name}=.* on ranks 0 and 1"):
            fs.train_step(model, [batch], optimizer, **{name: values[rank]})
        if name in ("check", "count_fn"):
            with pytest.raises(fs.BatchError, match=rf"different options \({name}="):
                fs.evaluate(model, [batch], **{name: values[rank]})
    assert all(map(torch.equal, before, [p.to_local() for p in model.parameters()]))
    fs.train_step(model, [batch], optimizer, max_grad_norm=(1, 1.0)[rank])


# --- the first window: recognised mistakes are errors on all ranks, what may be meant is one warning -------


def _batch(seed: int = 0, rows: int = 2, length: int = 12) -> dict[str, Any]:
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


def _next(ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(ids[:, 1:], (0, 1), value=-100)


def _mistakes() -> dict[str, tuple[dict[str, Any], str]]:
    right = _batch()
    ids = right["input_ids"]
    return {
        "shifted already": ({**right, "labels": _next(right["labels"])}, "shifted already.*as shift_labels"),
        "shifted with an end": (
            {**right, "labels": nn.functional.pad(ids[:, 1:], (0, 1), value=2)},
            "labels equal the next id at 21 of 21 targets",
        ),
        "shift_labels not shifted": ({**right, "shift_labels": ids}, "they have not been shifted"),
    }


@pytest.mark.parametrize("mistake", _mistakes())
def test_recognised_mistakes_are_errors(mistake: str) -> None:
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, message = _mistakes()[mistake]
    before = [p.clone() for p in model.parameters()]
    for _ in range(4):  # an error is no look that counts
        with pytest.raises(fs.BatchError, match=f"{message}.*check=False"):
            fs.train_step(model, [batch], optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    assert not fs.train_step(model, [batch], optimizer, check=False).skipped
    # Few targets of each micro-batch are many of a window.
    model = tiny_model("llama")
    window = [{name: value[row : row + 1] for name, value in batch.items()} for row in (0, 1)]
    with pytest.raises(fs.BatchError, match=message):
        fs.train_step(model, window, torch.optim.SGD(model.parameters(), lr=0.1))


def _right() -> dict[str, dict[str, Any]]:
    plain = _batch()
    ids = plain["input_ids"]
    few = {name: value[:1, :12] for name, value in plain.items()}
    alike = torch.full_like(ids, 7)
    alternating = torch.tensor([5, 6]).repeat(2, 6)
    binary = ids % 2
    return {
        "aligned": plain,
        "shift_labels": {**plain, "shift_labels": _next(plain["labels"])},
        "ids that are all alike": {"input_ids": alike, "labels": alike},
        "two ids in turn": {"input_ids": alternating, "labels": alternating.flip(0).roll(1, 1)},
        "too few to tell": {**few, "labels": _next(few["labels"])},
        "a vocabulary of 0 and 1": {"input_ids": binary, "attention_mask": binary, "labels": binary},
        "an answer of one token": {
            **plain,
            "labels": torch.full_like(ids, -100).index_fill_(1, torch.tensor([4]), 1),
        },
    }


@pytest.mark.parametrize("case", _right())
def test_what_is_no_mistake_is_trained(case: str) -> None:
    model = tiny_model("llama")
    assert not fs.train_step(model, [_right()[case]], torch.optim.SGD(model.parameters(), lr=0.1)).skipped


def _steps(mesh: Any, *windows: list[dict[str, Any]]) -> list[str]:
    handler, logger = BufferingHandler(100), logging.getLogger("fsdp_sft.step")
    model = sharing_rows(tiny_model("llama"), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logger.addHandler(handler)
    try:
        for window in windows:
            fs.train_step(model, window, optimizer)
    finally:
        logger.removeHandler(handler)
    return [record.getMessage() for record in handler.buffer if record.levelno >= logging.WARNING]


@on_ranks(4, timeout=60)
def test_ranks_with_the_same_rows_are_named() -> None:
    rank, mesh = dist.get_rank(), mesh_here()
    # By number of messages, each with these words: rank 0 alone says it.
    once = [True] * (rank == 0)
    said = _steps(mesh, [_batch(0)], [_batch(0)])
    assert ["ranks 0, 1, 2, 3 have the same rows" in message for message in said] == once, said
    said = _steps(mesh, [_batch(rank % 3)])
    assert ["ranks 0, 3 have" in message for message in said] == once, said
    # Only the first window is compared, and ranks with nothing to train share nothing.
    assert not _steps(mesh, [_batch(rank)], [_batch(0)])
    nothing = {**_batch(0), "labels": torch.full((2, 12), -100)}
    assert not _steps(mesh, [_batch(0) if rank == 0 else nothing])
    # Ranks of a context-parallel group have to have the same rows, and those of others not.
    mesh = mesh_here(cp=2)
    assert not _steps(mesh, [_batch(rank // 2)])
    with pytest.raises(fs.BatchError, match="ranks of one cp group have different batches"):
        _steps(mesh, [_batch(rank)])
    said = _steps(mesh, [_batch(0)])
    assert ["same rows" in message for message in said] == once, said


# --- windows of a loader's batches, the same number on all ranks -----------------------------------------


@on_ranks(2, timeout=60)
def test_windows_keep_ranks_together() -> None:
    rank, batches = dist.get_rank(), ragged_batches(9)
    lengths = [len(window) for window in fs.windows(batches[: 5 + 2 * rank], 3)]
    assert lengths == [3, 2], "the rank with fewest batches ends the pass for all"
    assert [len(window) for window in fs.windows(batches[:6], 3)] == [3, 3]
    with pytest.raises(ValueError, match="the epoch has no window"):
        list(fs.windows(batches[:rank], 1))

    def failing() -> Any:
        yield from batches[:2]
        if rank == 1:
            raise OSError("bad sector")
        yield from batches[2:]

    seen = []
    with pytest.raises(OSError, match="bad sector") as caught:
        for window in fs.windows(failing(), 2):
            seen.append(len(window))
    assert seen == [2]
    assert "rank 1 failed first while reading the next window" in caught.value.__notes__[0]

    class Broken:
        def __iter__(self) -> Any:
            if rank == 1:
                raise OSError("cannot fork")
            return iter(batches)

    model = fs.shard_model(tiny_model("gpt2"), mesh=mesh_here())
    for call in (lambda: list(fs.windows(Broken(), 1)), lambda: fs.evaluate(model, Broken())):
        with pytest.raises(OSError, match="cannot fork"):
            call()
    loader = DataLoader(list(range(24)), 2)
    buckets = DataLoader(list(range(24)), batch_sampler=[[0, 1], [2]])  # batches of unequal sizes
    for source, given, match in (
        (loader, {"grad_accum_steps": 0}, "grad_accum_steps must be an integer of at least 1, got 0"),
        (loader, {}, "one of the two"),
        (loader, {"grad_accum_steps": 1, "global_batch": 8}, "one of the two"),
        (
            loader,
            {"global_batch": 6},
            "global_batch=6 is no multiple of 4, which 2 ranks take at once with a batch size",
        ),
        (
            DataLoader([*range(24)], 1 + rank),
            {"global_batch": 8},
            "windows of 2 and 4 micro-batches on ranks",
        ),
        (batches, {"global_batch": 8}, "whose batches have a known size"),
        (buckets, {"global_batch": 8}, "whose batches have a known size"),
    ):
        with pytest.raises(ValueError, match=match):
            fs.windows(source, **given)
    sampler = fs.PackedSampler([6] * 16, max_length=12)
    packs = DataLoader(batches + batches, batch_sampler=sampler, collate_fn=lambda pack: pack[0])
    assert len(next(iter(fs.windows(packs, global_batch=4)))) == 2, "a pack is a batch"


class _Rows:
    """A loader without a size of its batches, whose sampler counts rows."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.sampler, self.consumed = batches, self, []

    def __iter__(self) -> Any:
        return iter(self.batches)

    def mark_consumed(self, count: int) -> None:
        self.consumed.append(count)


@on_ranks(2, timeout=60)
def test_batches_are_mapped_where_they_are_read() -> None:
    batches = ragged_batches(4)

    def renamed(batch: Any) -> Any:
        """One row of a batch of two, under the names that a step takes."""
        return {"input_ids": batch["tokens"][:1], "labels": batch["targets"][:1]}

    theirs = [{"tokens": batch["input_ids"], "targets": batch["labels"]} for batch in batches]
    loader = _Rows([{**batch, "input_ids": batch["tokens"]} for batch in theirs])
    found = [batch for window in fs.windows(loader, 2, map_fn=renamed) for batch in window]
    assert [batch["labels"].tolist() for batch in found] == [own["labels"][:1].tolist() for own in batches]
    assert loader.consumed == [4, 4], "rows that the loader has taken, not those of the mapped batches"
    with pytest.raises(KeyError, match="tokens") as caught:
        list(fs.windows(batches if dist.get_rank() else theirs, 2, map_fn=renamed))
    assert "rank 1 failed first while reading the next window" in caught.value.__notes__[0]


def _rows(number: int, first: int = 3) -> list[dict[str, Any]]:
    return [{"input_ids": [index] * 2, "labels": [index] * 2} for index in range(first, first + number)]


def _stack(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("how", ["load_state_dict", "set_epoch", "mark_consumed"])
def test_a_sampler_that_is_moved_in_the_middle_of_a_pass(how: str) -> None:
    rows: Any = _rows(8)
    state = {**fs.ResumableSampler(rows).state_dict(), "position": 4}
    given = {"load_state_dict": state, "set_epoch": 3, "mark_consumed": 1}[how]
    sampler = fs.ResumableSampler(rows)
    loader: Any = DataLoader(rows, 2, sampler=sampler, collate_fn=_stack)
    windows = fs.windows(loader, 1)
    next(windows)
    getattr(sampler, how)(given)
    with pytest.raises(fs.BatchError, match="was moved in the middle of a pass"):
        next(windows)
    if how != "mark_consumed":  # after the last window it may be moved
        sampler.load_state_dict({**state, "position": 6})
        next(windows := fs.windows(loader, 1))
        getattr(sampler, how)(given)
        with pytest.raises(StopIteration):
            next(windows)
        assert (sampler.epoch, sampler.position) == ((0, 4) if how == "load_state_dict" else (3, 0))
    if how == "load_state_dict":  # as is advised
        sampler.load_state_dict(state)
        assert len(list(fs.windows(loader, 1))) == 2


@pytest.mark.parametrize(("ranks", "shape", "expected"), [(1, {}, 4), (2, {}, 2), (2, {"cp": 2}, 4)])
@on_ranks()
def test_a_global_batch_makes_as_many_steps_on_any_number_of_ranks(
    ranks: int, shape: Any, expected: int
) -> None:
    mesh, rows = mesh_here(**shape), _rows(24)
    loader: Any = DataLoader(rows, 2, sampler=fs.ResumableSampler(rows, mesh=mesh), collate_fn=_stack)
    assert [len(window) for window in fs.windows(loader, global_batch=8, mesh=mesh)] == [expected] * 3


def test_a_batch_without_a_tensor_has_no_rows_to_count() -> None:
    with pytest.raises(fs.BatchError, match="a batch without a tensor"):
        num_rows({"text": ["a"]})
