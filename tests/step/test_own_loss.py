"""loss_fn and count_fn, for models of any origin and made of tokens' losses, beside plain training."""

import copy
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import BatchEncoding

import fsdp_sft as fs
from tests.harness.long_rows import PADDED, batch_of, rows_of, sharing_rows
from tests.harness.losses import summed_of_logits, with_loss
from tests.harness.models import FLOAT32, VOCAB, AllFloat64, full, largest_error, ragged_batches, tiny_model
from tests.harness.packs import drawn_rows, gradients_of_separate_rows
from tests.harness.ranks import device_here, mesh_here, on_ranks
from tests.plain import plain_token_losses, step as step_of


class Strange(nn.Module):
    """litgpt's manner: ``forward(idx)`` returns logits, targets are shifted and -1 is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, 16)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.lm_head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx)
        for block in self.h:
            x = x + block(x)
        return self.lm_head(x)


class Pair(NamedTuple):
    """A batch that is no dict."""

    idx: torch.Tensor
    targets: torch.Tensor


def strange_model() -> Strange:
    torch.manual_seed(0)
    return Strange()


def strange_batches(count: int) -> list[Pair]:
    return [
        Pair(batch["input_ids"][:, :-1], torch.where(batch["labels"] == -100, -1, batch["labels"])[:, 1:])
        for batch in ragged_batches(count)
    ]


def strange_loss(model: nn.Module, batch: Pair) -> torch.Tensor:
    return F.cross_entropy(
        model(batch.idx).flatten(0, 1), batch.targets.flatten(), ignore_index=-1, reduction="sum"
    )


def strange_count(batch: Pair) -> int:
    return int((batch.targets != -1).sum())


def _t5_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(
        model(**batch).logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    )


CASES: dict[str, Any] = {
    "strange": (strange_model, strange_batches(4), strange_loss, strange_count),
    "encoder-decoder": (
        lambda: tiny_model("t5"),
        # Labels of another length than the inputs, and not shifted.
        [{**batch, "labels": batch["labels"][:, 2:].contiguous()} for batch in ragged_batches(4)],
        _t5_loss,
        lambda batch: int((batch["labels"] != -100).sum()),
    ),
}


@pytest.mark.parametrize(
    ("kind", "ranks", "mesh_shape", "grad_sync"),
    [
        ("strange", 2, {}, "last"),
        ("strange", 4, {"dp_replicate": 2}, "reduce_scatter"),
        ("encoder-decoder", 2, {"dp_replicate": 2, "dp_shard": 1}, "each"),
    ],
)
@on_ranks()
def test_a_loss_of_ones_own_equals_the_single_process(
    kind: str, ranks: int, mesh_shape: dict[str, int], grad_sync: str
) -> None:
    make, batches, loss_fn, count_fn = CASES[kind]
    plain, gradients = make(), dict[str, torch.Tensor]()
    model = fs.shard_model(copy.deepcopy(plain), mesh=mesh_here(**mesh_shape), mp_policy=FLOAT32)
    count = sum(count_fn(batch) for batch in batches)
    losses = (loss_fn(plain, batch) / count for batch in batches)
    beside = torch.optim.SGD(plain.parameters(), lr=1.0)
    loss, norm = step_of(plain, losses, [beside], max_norm=0.1, keep=gradients)
    before = {name: full(p).clone() for name, p in model.named_parameters()}
    functions = {"loss_fn": loss_fn, "count_fn": count_fn}
    (window,) = fs.windows(batches[dist.get_rank() :: ranks], 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = fs.train_step(model, window, optimizer, max_grad_norm=0.1, grad_sync=grad_sync, **functions)
    assert (result.loss, result.grad_norm, result.num_targets) == (
        pytest.approx(loss, rel=1e-6),
        pytest.approx(norm, rel=1e-5),
        count,
    )
    moved = {name: before[name] - full(p) for name, p in model.named_parameters() if name in gradients}
    assert largest_error(moved, gradients) <= 1e-4
    with torch.no_grad():
        loss = sum(float(loss_fn(plain.eval(), batch)) for batch in batches) / count
    result = fs.evaluate(model, batches if dist.get_rank() == 0 else [], **functions)
    assert (result.loss, result.num_targets) == (pytest.approx(loss, rel=1e-5), count)
    # Nothing counted on any rank: the step is skipped.
    result = fs.train_step(model, window, optimizer, loss_fn=loss_fn, count_fn=lambda batch: 0)
    assert result.skip_reason == "no targets"


def test_a_count_of_ones_own_divides_a_loss_with_weights() -> None:
    model, (batch, *_) = tiny_model("llama"), ragged_batches(1)
    plain, given = (
        fs.evaluate(model, [{**batch, **weights}], count_fn=lambda _: 16)
        for weights in ({}, {"loss_weights": torch.full(batch["labels"].shape, 0.25)})
    )
    assert given.loss == pytest.approx(plain.loss / 4, rel=1e-6)


@on_ranks(2, timeout=30)
def test_functions_that_are_not_what_they_should_be_are_refused_on_all_ranks() -> None:
    rank = dist.get_rank()
    model = fs.shard_model(strange_model(), mesh=mesh_here(), mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = strange_batches(3)[:1]

    def count_on_one_rank(batch: Any) -> int:
        if rank == 1:
            raise KeyError("targets")
        return 1

    for options, error, message in (
        ({"loss_fn": strange_loss}, fs.BatchError, "needs 'labels'.*a count_fn"),
        (
            {"micro_batches": {"input_ids": window[0].idx}},
            fs.BatchError,
            r"a window is a list of batches, \[batch\]",
        ),
        ({"loss_fn": strange_loss, "count_fn": count_on_one_rank}, KeyError, "targets"),
        ({"loss_fn": strange_loss, "count_fn": lambda b: None}, TypeError, "NoneType"),
        ({"loss_fn": strange_loss, "count_fn": lambda b: -rank}, ValueError, "their weight, got -1"),
        ({"loss_fn": lambda m, b: m(b.idx), "count_fn": strange_count}, TypeError, "tensor of one number"),
        (
            {"loss_fn": lambda m, b: (strange_loss(m, b), 3), "count_fn": strange_count},
            TypeError,
            r"as is loss_sum\(...\)\[0\]; got Tensor and int",
        ),
        (
            {"micro_batches": [dict.fromkeys(("input_ids", "labels"), window[0].idx[: 2 - 2 * rank])]},
            fs.BatchError,
            "of a token at least, got .*input_ids",
        ),
        ({"micro_batches": [_nested(ragged_batches(1)[0])]}, fs.BatchError, "nested"),
        (
            {
                "micro_batches": [{"idx": window[0].idx}] if rank else window,
                "loss_fn": strange_loss,
                "count_fn": lambda batch: 1,
            },
            fs.BatchError,
            "micro-batch 0: a Pair of 2 and idx, on ranks 0 and 1",
        ),
    ):
        with pytest.raises(error, match=message):
            fs.train_step(model, **{"micro_batches": window, "optimizer": optimizer, **options})


@pytest.mark.parametrize("impl", ["chunked", "logits"])
def test_shift_labels_are_the_targets_of_each_position(impl: Any) -> None:
    model, batch = tiny_model("llama"), ragged_batches(2)[0]
    # The last position has a target too, as it has in a slice of a longer sequence.
    shifted = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    shifted[:, -1] = torch.tensor([7, 9])
    both = {**batch, "shift_labels": shifted}
    own = float(model(**both).loss)  # transformers reads shift_labels and leaves the labels alone
    for given in (both, {k: v for k, v in both.items() if k != "labels"}):
        total, targets = fs.loss_sum(with_loss(model, impl=impl), given)
        result = fs.train_step(model, [given], torch.optim.SGD(model.parameters(), lr=0.0))
        assert fs.count_targets([given]) == targets == result.num_targets == int((shifted != -100).sum())
        assert (float(total / targets), result.loss) == pytest.approx((own, own), rel=1e-6)
    with pytest.raises(fs.BatchError, match=r"shift_labels .* must be aligned"):
        fs.loss_sum(with_loss(model, impl=impl), {**batch, "shift_labels": shifted[:, :-1]})


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_of_a_pack_stay_apart_in_a_loss_of_ones_own_that_leaves_caches_on(family: str) -> None:
    model = tiny_model(family).eval()
    assert model.config.use_cache
    rows = drawn_rows(6)
    pack, (loss, _) = fs.PackedCollator(max_length=200)(rows), gradients_of_separate_rows(model, rows)
    expected = pytest.approx(loss / int(pack["labels"][:, 1:].ne(-100).sum()), rel=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert fs.evaluate(model, [pack], loss_fn=summed_of_logits).loss == expected
    assert fs.train_step(model, [pack], optimizer, loss_fn=summed_of_logits).loss == expected
    assert model.config.use_cache, "the model is left as it was"


# --- batches that are no plain dicts of padded tensors, with a loss of the caller's own ---------------------

tensordict: Any = importlib.import_module("tensordict") if importlib.util.find_spec("tensordict") else None


class OwnBatch:
    """A batch that is no mapping, and moves itself."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def to(self, device: torch.device) -> "OwnBatch":
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return self


def _rows(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [
        ids[: int(mask.sum())] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def _nested(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows as jagged nested tensors, with positions, as verl hands them over."""
    lengths = [len(row) for row in _rows(batch)]
    labels = [own[:length] for own, length in zip(batch["labels"], lengths, strict=True)]
    jagged = {"layout": torch.jagged}
    return {
        "input_ids": torch.nested.nested_tensor(_rows(batch), **jagged),
        "labels": torch.nested.nested_tensor(labels, **jagged),
        "position_ids": torch.nested.nested_tensor([torch.arange(length) for length in lengths], **jagged),
    }


def _padded(batch: Any) -> dict[str, torch.Tensor]:
    ids = batch["input_ids"].to_padded_tensor(0)
    lengths = batch["input_ids"].offsets().diff()
    return {
        "input_ids": ids,
        "labels": batch["labels"].to_padded_tensor(-100),
        "attention_mask": (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long(),
    }


KINDS: dict[str, tuple[Any, type, Any]] = {
    "nested": (_nested, dict, _padded),
    "encoding": (BatchEncoding, BatchEncoding, lambda batch: dict(batch)),
    "own": (OwnBatch, OwnBatch, lambda batch: batch.tensors),
}
if tensordict is not None:
    KINDS |= {
        "tensordict": (
            lambda batch: tensordict.TensorDict(dict(batch), batch_size=[len(batch["input_ids"])]),
            tensordict.TensorDict,
            lambda batch: dict(batch.items()),
        ),
        "tensordict of nested": (
            lambda batch: tensordict.TensorDict(_nested(batch), batch_size=[len(batch["input_ids"])]),
            tensordict.TensorDict,
            _padded,
        ),
    }


def _train(kind: str) -> list[float]:
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here(), mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    make, cls, read = KINDS.get(kind, (dict, dict, dict))

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        assert type(batch) is cls
        plain = read(batch)
        assert plain["input_ids"].device == device_here()
        return fs.token_losses(model, plain).sum()

    def count_fn(batch: Any) -> int:
        return int((read(batch)["labels"][:, 1:] != -100).sum())

    own = {"loss_fn": loss_fn, "count_fn": count_fn} if kind in KINDS else {}
    losses = []
    for step in range(2):
        given = [make(batch) for batch in ragged_batches(2 * ranks, seed=step)[rank::ranks]]
        losses.append(fs.train_step(model, given, optimizer, **own).loss)
        if kind == "encoding":
            assert given[0].input_ids.device.type == "cpu", "the caller's batch stays where it was"
    return losses


@pytest.mark.accelerator
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_they_train_as_padded_ones_do(ranks: int) -> None:
    expected = _train("padded")
    for kind in KINDS:
        assert _train(kind) == pytest.approx(expected, rel=1e-6), kind


# --- losses made of tokens' losses, beside plain training in float64 ---------------------------------------

BETA = 0.5
LossesOf = Callable[[Any, Any], torch.Tensor]


def _reference(seed: int = 3) -> Any:
    return tiny_model("qwen3", seed=seed, dtype=torch.float64).eval()


def _pairs(seed: int) -> dict[str, Any]:
    """Chosen and rejected answers to the same two prompts."""
    lengths = [[7, 12], [9, 8]]
    both = [batch_of(rows_of(own, seed=seed + i, trained=1.0), PADDED) for i, own in enumerate(lengths)]
    for batch in both:
        batch["labels"][:, :3] = -100
        batch["labels"][0, 3:7] = batch["input_ids"][0, 3:7]
    return {"chosen": both[0], "rejected": both[1]}


def _dpo(losses_of: LossesOf, model: Any, reference: Any, pairs: Any) -> Any:
    logps = {}
    for name in ("chosen", "rejected"):
        policy = -losses_of(model, pairs[name]).sum(-1)
        with torch.no_grad():
            known = -losses_of(reference, pairs[name]).sum(-1)
        logps[name] = policy - known.to(policy)
    margin = BETA * (logps["chosen"] - logps["rejected"])
    metrics = {"accuracy": (margin > 0).sum(), "margin": margin.detach().sum(), "rows": len(margin)}
    return -F.logsigmoid(margin).sum(), metrics


def _weights(batch: Any) -> torch.Tensor:
    """A weight of each label, by the batch alone: of either sign."""
    labels = batch["labels"]
    return torch.where(labels == -100, 0.0, (labels % 5).double() - 1.0)


def _weighted(losses_of: LossesOf, model: Any, reference: Any, batch: Any) -> Any:
    losses = losses_of(model, batch)
    return (losses * _weights(batch).to(losses)).sum(), {"nll": losses.detach().sum()}


def _size_of_weights(batch: Any) -> float:
    """What weights of either sign are divided by, no integer."""
    return float(_weights(batch).abs().sum()) / 3


# (loss and metrics by whichever losses of tokens, batches by a seed, their count).
OF_TOKENS: dict[str, Any] = {
    "dpo": (_dpo, _pairs, lambda pairs: len(pairs["chosen"]["input_ids"])),
    "weighted": (
        _weighted,
        lambda seed: batch_of(rows_of([6, 15, 1, 9], seed=seed), PADDED),
        _size_of_weights,
    ),
}


@pytest.mark.parametrize(
    ("kind", "ranks", "shape"),
    [("dpo", 1, {}), ("dpo", 2, {}), ("dpo", 2, {"cp": 2}), ("weighted", 2, {"cp": 2})],
)
@on_ranks()
def test_steps_are_those_of_one_process(kind: str, ranks: int, shape: dict[str, int]) -> None:
    shares = dist.get_world_size() // shape.get("cp", 1)
    share = dist.get_rank() // shape.get("cp", 1)
    mesh = mesh_here(**shape)
    plain = tiny_model("qwen3", dtype=torch.float64)
    model, reference = (sharing_rows(one, mesh) for one in (copy.deepcopy(plain), _reference()))
    loss_of, make, count = OF_TOKENS[kind]
    functions = {"loss_fn": lambda m, b: loss_of(fs.token_losses, m, reference, b), "count_fn": count}
    oracle, known = partial(loss_of, plain_token_losses), _reference()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    with AllFloat64():
        for step in range(3):
            batches = [[make(100 * step + 10 * s + i) for i in range(2)] for s in range(shares)]
            result = fs.train_step(model, batches[share], optimizer, **functions)
            everything = [batch for one in batches for batch in one]
            found = [oracle(plain, known, batch) for batch in everything]
            divisor = sum(count(batch) for batch in everything)
            loss = sum(one for one, _ in found) / divisor
            expected = step_of(plain, [loss], [other], max_norm=1.0)
            assert (result.loss, result.grad_norm) == pytest.approx(expected, rel=1e-9), step
            assert (result.target_weight, result.num_targets) == (
                pytest.approx(divisor, rel=1e-12),
                round(divisor),
            )
            assert result.metrics == pytest.approx(
                {name: sum(float(m[name]) for _, m in found) / divisor for name in found[0][1]}, rel=1e-9
            )
        trained = {name: full(parameter) for name, parameter in model.named_parameters()}
        torch.testing.assert_close(trained, dict(plain.named_parameters()), rtol=0, atol=1e-9)
        seen = [batch for s in range(shares) for batch in batches[s][: 1 + (s == 0)]]  # uneven
        evaluated = fs.evaluate(model, batches[share][: 1 + (share == 0)], **functions)
        with torch.no_grad():
            found = [oracle(plain.eval(), known, batch) for batch in seen]
        divisor = sum(count(batch) for batch in seen)
        assert evaluated.loss == pytest.approx(float(sum(one for one, _ in found)) / divisor, rel=1e-9)
        assert evaluated.metrics == pytest.approx(
            {name: sum(float(m[name]) for _, m in found) / divisor for name in found[0][1]}, rel=1e-9
        )


@on_ranks(2, timeout=60)
def test_a_loss_of_ones_own_counts_shared_rows_once() -> None:
    model = sharing_rows(tiny_model("qwen3"), mesh_here(cp=2))
    batch = batch_of(rows_of([6, 15, 1, 9]), PADDED)

    with pytest.raises(fs.UnsupportedModelError, match=r"called by itself in training.*token_losses"):
        fs.train_step(model, [batch], torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=summed_of_logits)
    plain = fs.train_step(model, [batch], torch.optim.SGD(model.parameters(), lr=0.0))
    counted = fs.train_step(
        model, [batch], torch.optim.SGD(model.parameters(), lr=0.0), count_fn=lambda batch: 2.5
    )
    assert (counted.loss, counted.target_weight) == (
        pytest.approx(plain.loss * plain.num_targets / 2.5, rel=1e-6),
        2.5,
    )
    for whole in (lambda m, b: fs.token_losses(m, b).sum(), lambda m, b: fs.loss_sum(m, b)[0]):
        own = fs.train_step(model, [batch], torch.optim.SGD(model.parameters(), lr=0.0), loss_fn=whole)
        assert (own.loss, own.grad_norm, own.num_targets, own.num_tokens) == (
            pytest.approx(plain.loss, rel=1e-6),
            pytest.approx(plain.grad_norm, rel=1e-5),
            plain.num_targets,
            plain.num_tokens,
        )


@on_ranks(2, timeout=60)
def test_metrics_are_summed_over_window_and_ranks() -> None:
    rank = dist.get_rank()
    model = fs.shard_model(tiny_model("llama").to(device_here()), mesh=mesh_here(), mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = ragged_batches(4, seed=2)[rank::2]
    calls: list[Any] = []

    def some(model: Any, batch: Any) -> Any:
        calls.append({"rows": 2.0})
        metrics = {"ones": torch.full((), 2), "both": 1.0}
        return fs.token_losses(model, batch).sum(), metrics | ({"first's": 16.0} if rank == 0 else {})

    for _ in range(2):
        result = fs.train_step(
            model, batches, optimizer, loss_fn=some, count_fn=lambda batch: len(batch["labels"])
        )
        assert result.metrics == {"both": 0.5, "first's": 4.0, "ones": 1.0}
    assert len(calls) == 2 * len(batches)
    assert fs.train_step(model, batches, optimizer).metrics == {}
