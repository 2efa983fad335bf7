"""What a model adds to its loss: added, or refused by name, for every way of computing the loss."""

import copy
import logging
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

import fsdp_sft as fs
from tests.harness.losses import with_loss
from tests.harness.models import VOCAB, ragged_batches, tiny_config, tiny_model

COEFFICIENT = 0.5


def _qwen3_moe(**overrides: Any) -> Any:
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    common = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = tf.Qwen3MoeConfig(**{**common, **experts, "num_key_value_heads": 2, **overrides})
    return tf.Qwen3MoeForCausalLM(config).train()


MIXTURES: dict[str, Any] = {
    "mixtral": lambda **overrides: tiny_model("mixtral", **overrides),
    "qwen3-moe": _qwen3_moe,
}


def _mixture(kind: str = "mixtral", **overrides: Any) -> Any:
    settings = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT, **overrides}
    return MIXTURES[kind](**settings)


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
    said = [r.getMessage() for r in caplog.records if "router" in r.getMessage()]
    assert len(said) == 1
    assert "router_aux_loss_coef=0.02" in said[0]
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
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
    config = tf.BartConfig(vocab_size=VOCAB, **sizes, max_position_embeddings=64, is_encoder_decoder=False)
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
    count = int((batch["labels"] != -100).sum())
    result = fs.train_step(
        model,
        [batch],
        optimizer,
        loss_fn=lambda m, b: model(input_ids=b["input_ids"]).logits.float().square().sum(),
        count_fn=lambda b: count,
    )
    assert result.skipped is False


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
    batch = ragged_batches(2)[0]
    model = WithoutLogits(tiny_config("llama")).train()
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
    model = _changed(_entropy)
    batch = {**ragged_batches(2)[0], "extra": torch.ones(3)}
    with pytest.raises(fs.ModelLossError, match="returned a loss although it was given no labels"):
        fs.loss_sum(with_loss(model, impl=impl), batch)
