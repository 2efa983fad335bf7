"""What a model adds to its loss: added, or refused by name, for every way of computing the loss."""

import copy
import logging
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as tf
from torch import nn

import fsdp_sft as fs
from fsdp_sft.loss import num_tokens
from tests.harness.long_rows import PACKED, PADDED, batch_of, plain_loss, rows_of, sharing_rows
from tests.harness.losses import gradients_of, with_loss
from tests.harness.models import (
    FLOAT32,
    TINY,
    VOCAB,
    AllFloat64,
    full,
    largest_error,
    ragged_batches,
    tiny_config,
    tiny_model,
)
from tests.harness.ranks import device_here, mesh_here, on_ranks

COEFFICIENT = 0.5


def _qwen3_moe(**overrides: Any) -> Any:
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    config = tf.Qwen3MoeConfig(**{**TINY, **experts, "num_hidden_layers": 2, **overrides})
    return tf.Qwen3MoeForCausalLM(config).train()


MIXTURES: dict[str, Any] = {
    "mixtral": lambda **overrides: tiny_model("mixtral", **overrides),
    "qwen3-moe": _qwen3_moe,
}


def _mixture(kind: str = "mixtral", **overrides: Any) -> Any:
    return MIXTURES[kind](**{"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT, **overrides})


@pytest.mark.parametrize("impl", ["auto", "logits"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_the_routers_loss_is_the_models_own(kind: str, impl: Any) -> None:
    model, batch = _mixture(kind), ragged_batches(2)[0]
    own = float(model(**batch).loss)
    plain = copy.deepcopy(model)
    plain.config.output_router_logits = False
    entropy = float(plain(**batch).loss)
    assert own - entropy > 0.5
    with pytest.raises(ValueError, match="take num_targets from count_targets"):
        fs.causal_lm_loss(model, batch, num_targets=int(fs.count_targets([batch])))
    # Off, or on without the config's word; a coefficient that is changed counts at once.
    for one, router_loss, expected in (
        (model, None, own),
        (model, "off", entropy),
        (plain, "micro_batch", own),
    ):
        total, targets = fs.loss_sum(with_loss(one, impl=impl, router_loss=router_loss), batch)
        assert float(total / targets) == pytest.approx(expected, rel=1e-6)
    plain.router_aux_loss_coef = 2 * COEFFICIENT
    total, targets = fs.loss_sum(plain, batch)
    assert float(total / targets) == pytest.approx(2 * own - entropy, rel=1e-6)


def test_what_is_left_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = _mixture(output_router_logits=False, router_aux_loss_coef=0.02)
    batch = ragged_batches(2)[0]
    with caplog.at_level(logging.WARNING, logger="fsdp_sft"):
        for _ in range(2):
            fs.loss_sum(model, batch)
        fs.loss_sum(with_loss(_mixture(output_router_logits=False), router_loss="off"), batch)
        fs.loss_sum(tiny_model("llama"), batch)
    (said,) = (r.getMessage() for r in caplog.records if "router" in r.getMessage())
    assert "router_aux_loss_coef=0.02" in said
    with pytest.raises(ValueError, match="router_loss must be None"):
        fs.loss_sum(with_loss(model, router_loss="window"), batch)
    with pytest.raises(fs.ModelLossError, match="has no router's loss"):
        fs.loss_sum(with_loss(tiny_model("llama"), router_loss="micro_batch"), batch)


class Changed(tf.LlamaForCausalLM):
    """A Llama whose own loss is ``self.own(logits, labels)``."""

    own: Any = None

    def forward(self, input_ids: Any, labels: Any = None, extra: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        if labels is not None:
            output.loss = self.own(output.logits, labels)
        if extra is not None:
            output.loss = extra.mean()
        return output


def _entropy(logits: Any, labels: Any, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


def _further(logits: Any, labels: Any) -> torch.Tensor:
    """A head that predicts the token after the next: MTP."""
    return _entropy(logits, labels) + 0.3 * _entropy(logits[:, :-1], labels[:, 1:])


def _changed(own: Any) -> Any:
    torch.manual_seed(0)
    model = Changed(tiny_config("llama")).train()
    model.own = own
    return model


def _blip() -> Any:
    from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

    config = tf.BlipTextConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        is_decoder=True, label_smoothing=0.1, encoder_hidden_size=32, bos_token_id=1, sep_token_id=2,
    )  # fmt: skip
    return BlipTextLMHeadModel(config).train()


def _bart() -> Any:
    config = tf.BartConfig(
        vocab_size=VOCAB, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=32,
        max_position_embeddings=64, is_encoder_decoder=False,
    )  # fmt: skip
    return tf.BartForCausalLM(config).train()


def _only_in_training() -> Any:
    model = _changed(None)
    model.own = lambda logits, labels: _entropy(logits, labels) + 0.1 * model.training
    return model


REFUSED: dict[str, Any] = {
    "label smoothing of a config": _blip,
    "a family that does not shift": _bart,
    "another ignored label": lambda: _changed(
        lambda logits, labels: _entropy(logits, labels.where(labels != -100, 7))
    ),
    "a special token left out": lambda: _changed(
        lambda logits, labels: _entropy(logits, labels.where(labels != 2, -100))
    ),
    "a z-loss": lambda: _changed(
        lambda logits, labels: _entropy(logits, labels) + 1e-3 * logits.logsumexp(-1).square().mean()
    ),
    "further tokens": lambda: _changed(_further),
    "means of rows": lambda: _changed(
        lambda logits, labels: sum(_entropy(logits[i : i + 1], labels[i : i + 1]) for i in (0, 1)) / 2
    ),
    "only in training": _only_in_training,
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_of_another_kind_is_refused_with_both_numbers(case: str) -> None:
    model, batch = REFUSED[case](), ragged_batches(2)[0]
    message = r"on a tiny batch it is \d.*, and the cross entropy \d"
    model.eval()
    with pytest.raises(fs.ModelLossError, match=message):
        fs.evaluate(model, [batch])
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with pytest.raises(fs.ModelLossError, match=rf"{message}.*loss_fn"):
            fs.train_step(model, [batch], optimizer)
    with pytest.raises(fs.ModelLossError, match=message):
        fs.prepare_loss(model, impl="logits")
    # The way that the message names is open.
    assert not fs.train_step(
        model,
        [batch],
        optimizer,
        loss_fn=lambda m, b: model(input_ids=b["input_ids"]).logits.float().square().sum(),
        count_fn=lambda b: int((b["labels"] != -100).sum()),
    ).skipped


class Silent(nn.Module):
    """A model of nobody's: no config, no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, 8)
        self.lm_head = nn.Linear(8, VOCAB)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> Any:
        return tf.modeling_outputs.CausalLMOutput(logits=self.lm_head(self.wte(input_ids)))


def _raising(logits: Any, labels: Any) -> torch.Tensor:
    raise NotImplementedError("not with labels")


def test_nothing_to_compare_with_is_no_obstacle(caplog: pytest.LogCaptureFixture) -> None:
    batch = ragged_batches(2)[0]
    with caplog.at_level(logging.INFO, logger="fsdp_sft"):
        for model in (Silent(), _changed(lambda logits, labels: None)):
            before = torch.get_rng_state()
            total, targets = fs.loss_sum(model, batch)
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            assert float(total / targets) == pytest.approx(float(_entropy(logits, batch["labels"])), rel=1e-6)
            assert torch.equal(before, torch.get_rng_state())


class WithoutLogits(Changed):
    """Returns a loss or logits, as models do whose head and loss are one kernel."""

    def forward(self, input_ids: Any = None, labels: Any = None, **inputs: Any) -> Any:
        output = super().forward(input_ids=input_ids, labels=labels, **inputs)
        if labels is not None:
            output.logits = None
        return output


def test_a_loss_without_logits_is_compared_with_those_of_another_forward() -> None:
    batch, model = ragged_batches(2)[0], WithoutLogits(tiny_config("llama")).train()
    model.own = _entropy
    assert float(fs.loss_sum(model, batch)[0]) > 0
    model = copy.deepcopy(model)  # a copy is another model
    model.own = _further
    with pytest.raises(fs.ModelLossError, match="on a tiny batch"):
        fs.loss_sum(model, batch)


def test_a_loss_that_cannot_be_compared_is_refused_or_left_out_by_name() -> None:
    model, batch = _changed(_raising), ragged_batches(2)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    refused = (
        r"cannot be compared, because .*NotImplementedError: not with labels.*prepare_loss\(model, compare"
    )
    with pytest.raises(fs.ModelLossError, match=refused):
        fs.train_step(model, [batch], optimizer)
    fs.prepare_loss(model, compare=False)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = float(_entropy(logits, batch["labels"]))
    assert fs.train_step(model, [batch], optimizer).loss == pytest.approx(expected, rel=1e-6)
    with pytest.raises(fs.ModelLossError, match=refused):
        fs.prepare_loss(model, impl="logits")  # and is compared again
    with pytest.raises(fs.ModelLossError, match=r"no router's loss .* or compare=False leaves it out"):
        fs.prepare_loss(_mixture(), router_loss="micro_batch", compare=False)


@pytest.mark.parametrize("impl", ["auto", "logits"])
def test_a_loss_that_only_a_batch_calls_forth_is_refused(impl: Any) -> None:
    model, batch = with_loss(_changed(_entropy), impl=impl), ragged_batches(2)[0]
    with pytest.raises(fs.ModelLossError, match="returned a loss although it was given no labels"):
        fs.loss_sum(model, {**batch, "extra": torch.ones(3)})


# --- a router's loss of micro-batches: beside all rows by themselves in one plain process ------------------

# By rank and micro-batch: unequal, rows of one token, no target in the first row of each.
LENGTHS = [
    [[9, 3, 12], [4, 2], [17]],
    [[2, 2], [11, 6], [1, 8, 5]],
    [[20], [3, 3, 3], [7, 2]],
    [[5, 10], [6], [14, 2]],
]


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
    router = torch.zeros((), dtype=torch.float64)
    all_rows = [row for rows in micro_batches for row in rows]
    tokens = sum(len(ids) for ids, _ in all_rows)
    for rows in micro_batches:
        said = [model(input_ids=ids[None], output_router_logits=True).router_logits for ids, _ in rows]
        loss = _balance_loss(model, tuple(torch.cat(layer) for layer in zip(*said, strict=True)))
        router = router + COEFFICIENT * loss * sum(len(ids) for ids, _ in rows) / tokens
    return plain_loss(model, all_rows), router


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
    plain, model = _mixture(dtype=torch.float64), _mixture(dtype=torch.float64)
    rows = [_rows(r, m) for r in range(ranks) for m in range(3)]
    with AllFloat64():
        entropy, router = _plain(plain, rows)
        (entropy + router).backward()
        fs.shard_model(model, mesh=mesh_here(**shape), mp_policy=FLOAT32, master_dtype=torch.float64)
        before = {name: full(p).clone() for name, p in model.named_parameters()}
        window = [_batch(rank, m, kind) for m in range(3)]
        fs.prepare_loss(model, impl=impl, router_loss="micro_batch")
        everything = [_batch(r, m, kind) for r in range(ranks) for m in range(3)]
        found = fs.evaluate(model, everything if rank == 0 else [])
        targets = fs.count_targets(window)
        for batch in window:  # a loop of one's own
            here = {name: value.to(device_here()) for name, value in batch.items()}
            fs.causal_lm_loss(model, here, num_targets=targets).backward()
        own = gradients_of(model)
        result = fs.train_step(model, window, torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=None)
    assert result.num_tokens == sum(len(ids) for own in rows for ids, _ in own)
    for one in (result, found):
        assert (one.loss, one.router_loss) == (
            pytest.approx(float(entropy), rel=1e-12),
            pytest.approx(float(router), rel=1e-6),  # transformers counts choices in float32
        )
    moved = {name: before[name] - full(p) for name, p in model.named_parameters()}
    for gradients in (moved, own):
        assert largest_error(gradients, {name: p.grad for name, p in plain.named_parameters()}) <= 1e-6


@on_ranks(2)
def test_rows_that_ranks_share_have_no_routers_loss() -> None:
    model, batch = _mixture(dtype=torch.float64), _batch(0, 0, PADDED)
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
        pack = fs.PackedCollator(max_length=filled, pad_to_multiple_of=filled)(rows)
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
    assert fs.train_step(model, [batch], torch.optim.SGD(model.parameters(), lr=0.1)).router_loss > 0
