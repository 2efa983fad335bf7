"""Steps by losses made of tokens' losses (DPO, distillation, weights, a value head) beside plain training."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import fsdp_sft as fs
from tests.harness.float64 import AllFloat64
from tests.harness.long_rows import PADDED, batch_of, rows_of, sharing_rows
from tests.harness.models import FLOAT32, full, ragged_batches, tiny_model
from tests.harness.ranks import device_here, mesh_here, on_ranks
from tests.plain import plain_token_losses, step as step_of

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


def _num_pairs(pairs: Any) -> int:
    return len(pairs["chosen"]["input_ids"])


def _weights(batch: Any) -> torch.Tensor:
    """A weight of each label, by the batch alone: of either sign."""
    labels = batch["labels"]
    return torch.where(labels == -100, 0.0, (labels % 5).double() - 1.0)


def _rows(seed: int) -> Any:
    return batch_of(rows_of([6, 15, 1, 9], seed=seed), PADDED)


def _weighted(losses_of: LossesOf, model: Any, reference: Any, batch: Any) -> Any:
    losses = losses_of(model, batch)
    return (losses * _weights(batch).to(losses)).sum(), {"nll": losses.detach().sum()}


def _size_of_weights(batch: Any) -> float:
    """What weights of either sign are divided by, no integer."""
    return float(_weights(batch).abs().sum()) / 3


# (loss and metrics by whichever losses of tokens, batches by a seed, their count).
CASES: dict[str, Any] = {
    "dpo": (_dpo, _pairs, _num_pairs),
    "weighted": (_weighted, _rows, _size_of_weights),
}


@pytest.mark.parametrize(
    ("kind", "ranks", "shape"),
    [("dpo", 1, {}), ("dpo", 2, {}), ("dpo", 2, {"cp": 2}), ("weighted", 2, {"cp": 2})],
)
@on_ranks()
def test_six_steps_are_those_of_one_process(kind: str, ranks: int, shape: dict[str, int]) -> None:
    shares = dist.get_world_size() // shape.get("cp", 1)
    share = dist.get_rank() // shape.get("cp", 1)
    mesh = mesh_here(**shape)
    plain = tiny_model("qwen3", dtype=torch.float64)
    model, reference = (sharing_rows(one, mesh) for one in (copy.deepcopy(plain), _reference()))
    loss_of, make, count = CASES[kind]
    functions = {"loss_fn": lambda m, b: loss_of(fs.token_losses, m, reference, b), "count_fn": count}
    oracle, known = partial(loss_of, plain_token_losses), _reference()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    with AllFloat64():
        for step in range(6):
            batches = [[make(100 * step + 10 * s + i) for i in range(2)] for s in range(shares)]
            result = fs.train_step(model, batches[share], optimizer, **functions)
            everything = [batch for one in batches for batch in one]
            found = [oracle(plain, known, batch) for batch in everything]
            divisor = sum(count(batch) for batch in everything)
            loss = sum(one for one, _ in found) / divisor
            total, norm = step_of(plain, [loss], [other], max_norm=1.0)
            assert result.loss == pytest.approx(total, rel=1e-9), step
            assert result.grad_norm == pytest.approx(norm, rel=1e-9), step
            assert result.target_weight == pytest.approx(divisor, rel=1e-12)
            assert result.num_targets == round(divisor)
            assert result.metrics == pytest.approx(
                {name: sum(float(m[name]) for _, m in found) / divisor for name in found[0][1]}, rel=1e-9
            )
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                full(parameter), dict(plain.named_parameters())[name], rtol=0, atol=1e-9
            )
        uneven = batches[share][: 1 + (share == 0)]
        seen = [batch for s in range(shares) for batch in batches[s][: 1 + (s == 0)]]
        evaluated = fs.evaluate(model, uneven, **functions)
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = batch_of(rows_of([6, 15, 1, 9]), PADDED)

    def raw(model: Any, batch: Any) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )

    with pytest.raises(fs.UnsupportedModelError, match=r"called by itself in training.*token_losses"):
        fs.train_step(model, [batch], optimizer, loss_fn=raw)
    plain = fs.train_step(model, [batch], torch.optim.SGD(model.parameters(), lr=0.0))
    counted = fs.train_step(
        model, [batch], torch.optim.SGD(model.parameters(), lr=0.0), count_fn=lambda batch: 2.5
    )
    assert counted.loss == pytest.approx(plain.loss * plain.num_targets / 2.5, rel=1e-6)
    assert counted.target_weight == 2.5
    for whole in (lambda m, b: fs.token_losses(m, b).sum(), lambda m, b: fs.loss_sum(m, b)[0]):
        own = fs.train_step(model, [batch], torch.optim.SGD(model.parameters(), lr=0.0), loss_fn=whole)
        assert own.loss == pytest.approx(plain.loss, rel=1e-6)
        assert own.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
        assert (own.num_targets, own.num_tokens) == (plain.num_targets, plain.num_tokens)


def _num_rows(batch: Any) -> int:
    return len(batch["labels"])


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
        result = fs.train_step(model, batches, optimizer, loss_fn=some, count_fn=_num_rows)
        assert result.metrics == {"both": 0.5, "first's": 4.0, "ones": 1.0}
    assert len(calls) == 2 * len(batches)
    assert fs.train_step(model, batches, optimizer).metrics == {}
