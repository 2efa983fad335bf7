"""A router's loss of micro-batches, padded and packed: beside all rows by themselves in one plain process."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fsdp_sft as fs
from fsdp_sft.loss import num_tokens
from tests.harness.float64 import AllFloat64
from tests.harness.long_rows import PACKED, PADDED, batch_of, rows_of, sharing_rows
from tests.harness.losses import gradients_of
from tests.harness.models import FLOAT32, full, largest_error, tiny_model
from tests.harness.ranks import device_here, mesh_here, on_ranks

COEFFICIENT = 0.5
# By rank and micro-batch: unequal, rows of one token, no target in the first row of each.
LENGTHS = [
    [[9, 3, 12], [4, 2], [17]],
    [[2, 2], [11, 6], [1, 8, 5]],
    [[20], [3, 3, 3], [7, 2]],
    [[5, 10], [6], [14, 2]],
]


def _mixture(**overrides: Any) -> Any:
    settings = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT, **overrides}
    return tiny_model("mixtral", dtype=torch.float64, **settings)


def _rows(rank: int, micro_batch: int) -> list[Any]:
    return rows_of(LENGTHS[rank][micro_batch], seed=10 * rank + micro_batch, trained=0.8)


def _batch(rank: int, micro_batch: int, kind: str) -> dict[str, torch.Tensor]:
    rows = _rows(rank, micro_batch)
    if kind == PADDED:
        return batch_of(rows, PADDED)
    collate = fs.PackedCollator(max_length=32)
    return collate([{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in rows])


def _balance_loss(model: Any, layers: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What transformers' function makes of all tokens at once, in float64 where that has float32."""
    experts, top_k = model.config.num_local_experts, model.config.num_experts_per_tok
    probabilities = torch.cat(layers).softmax(-1)
    chosen = F.one_hot(probabilities.topk(top_k).indices, experts).double().sum(1).mean(0)
    loss = experts * (chosen * probabilities.mean(0)).sum()
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    theirs = getattr(function, "__wrapped__", function)(layers, experts, top_k)
    torch.testing.assert_close(theirs.double(), loss, rtol=1e-6, atol=0)
    return loss


def _plain(model: Any, micro_batches: list[list[Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross entropy, router's loss) of a window whose micro-batches have these rows, each by itself."""
    entropy, router = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    all_rows = [row for rows in micro_batches for row in rows]
    targets = sum(int((labels[1:] != -100).sum()) for _, labels in all_rows)
    tokens = sum(len(ids) for ids, _ in all_rows)
    for rows in micro_batches:
        said = []
        for ids, labels in rows:
            output = model(input_ids=ids[None], output_router_logits=True)
            losses = F.cross_entropy(output.logits[0, :-1], labels[1:], ignore_index=-100, reduction="sum")
            entropy = entropy + losses / targets
            said.append(output.router_logits)
        loss = _balance_loss(model, tuple(torch.cat(layer) for layer in zip(*said, strict=True)))
        router = router + COEFFICIENT * loss * sum(len(ids) for ids, _ in rows) / tokens
    return entropy, router


@pytest.mark.parametrize(
    ("ranks", "shape", "kind", "impl"),
    [
        (1, {}, PACKED, "auto"),
        (2, {}, PADDED, "auto"),
        (2, {}, PACKED, "logits"),
        (4, {"dp_replicate": 2}, PACKED, "logits"),
    ],
)
@on_ranks()
def test_ranks_are_one_process(ranks: int, shape: Any, kind: str, impl: str) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    plain, model = _mixture(), _mixture()
    rows = [_rows(r, m) for r in range(ranks) for m in range(3)]
    with AllFloat64():
        entropy, router = _plain(plain, rows)
        (entropy + router).backward()
        mesh = mesh_here(**shape)
        fs.shard_model(model, mesh=mesh, mp_policy=FLOAT32, master_dtype=torch.float64)
        before = {name: full(p).clone() for name, p in model.named_parameters()}
        window = [_batch(rank, m, kind) for m in range(3)]
        fs.prepare_loss(model, impl=impl, router_loss="micro_batch")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        everything = [_batch(r, m, kind) for r in range(ranks) for m in range(3)]
        found = fs.evaluate(model, everything if rank == 0 else [])
        targets = fs.count_targets(window)
        for batch in window:  # a loop of one's own
            here = {name: value.to(device_here()) for name, value in batch.items()}
            fs.causal_lm_loss(model, here, num_targets=targets).backward()
        own = gradients_of(model)
        result = fs.train_step(model, window, optimizer, max_grad_norm=None)
    assert result.num_tokens == sum(len(ids) for own in rows for ids, _ in own)
    for loss, added in ((result.loss, result.router_loss), (found.loss, found.router_loss)):
        assert loss == pytest.approx(float(entropy), rel=1e-12)
        assert added == pytest.approx(float(router), rel=1e-6)  # transformers counts choices in float32
    moved = {name: before[name] - full(p) for name, p in model.named_parameters()}
    for gradients in (moved, own):
        assert largest_error(gradients, {name: p.grad for name, p in plain.named_parameters()}) <= 1e-6


@on_ranks(2)
def test_rows_that_ranks_share_have_no_routers_loss() -> None:
    model, batch = _mixture(), _batch(0, 0, PADDED)
    sharing_rows(model, mesh_here(cp=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for call in (
        lambda: fs.train_step(model, [batch], optimizer),
        lambda: fs.evaluate(model, [batch]),
        lambda: fs.loss_sum(model, {name: value.to(device_here()) for name, value in batch.items()}),
    ):
        with pytest.raises(fs.ModelLossError, match=r"context parallelism.*router_loss='off'"):
            call()
    fs.prepare_loss(model, router_loss="off")  # the advice
    assert fs.train_step(model, [batch], optimizer).router_loss == 0.0


@on_ranks(2)
def test_losses_of_tokens_need_no_routers_loss() -> None:
    """A mixture's config asks for it, and the mask is that of rows of which a rank has a part."""
    batch = _batch(0, 0, PADDED)
    plain, model = (tiny_model("mixtral", output_router_logits=True) for _ in range(2))
    expected = fs.token_losses(plain, batch).detach()
    sharing_rows(model, mesh_here(cp=2))
    found = fs.token_losses(model, {name: value.to(device_here()) for name, value in batch.items()})
    assert torch.allclose(found.detach().cpu(), expected.cpu(), rtol=1e-5, atol=1e-6)


def test_what_fills_a_pack_up_is_no_token() -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [9, 9], "labels": [-100, -100]}]
    for filled, tokens in ((5, 3), (8, 5), (6, 5)):
        pack = fs.PackedCollator(max_length=filled, padding="max_length", pad_token_id=1)(rows)
        assert num_tokens(pack) == tokens, pack
    # A row that is one id but has a target is a row.
    told = [rows[0], {"input_ids": [9, 9], "labels": [-100, 9]}]
    assert num_tokens(fs.PackedCollator(max_length=8)(told)) == 5
    assert num_tokens({"input_ids": torch.full((2, 4), 7)}) == 8


def test_a_config_that_asks_later_is_heard() -> None:
    model = tiny_model("mixtral", router_aux_loss_coef=0.5)
    batch = batch_of(_rows(0, 0), PADDED)
    fs.evaluate(model, [batch])
    model.config.output_router_logits = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert fs.train_step(model, [batch], optimizer).router_loss > 0
