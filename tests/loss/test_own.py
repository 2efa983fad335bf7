"""What a model adds to its loss: added, or refused by name, for every way of computing the loss."""

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import fsdp_sft as fs
from tests.harness.device import device_type, mesh_here
from tests.harness.losses import with_loss
from tests.harness.models import VOCAB, full, largest_error, ragged_batches, tiny_config, tiny_model
from tests.harness.ranks import run_distributed

FLOAT32 = MixedPrecisionPolicy()
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


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def _oracle(model: Any, window: list[dict[str, Any]]) -> tuple[float, float]:
    """(mean cross entropy, router's part) of a window; gradients of the sum are left in ``model``."""
    targets = sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)
    tokens = sum(int(b["attention_mask"].sum()) for b in window)
    loss, router = torch.zeros(()), torch.zeros(())
    for batch in window:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        output = model(**inputs, output_router_logits=True)
        flat = output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        loss = loss + F.cross_entropy(*flat, reduction="sum") / targets
        share = int(batch["attention_mask"].sum()) / tokens
        router = router + COEFFICIENT * share * output.aux_loss
    (loss + router).backward()
    return float(loss), float(router)


@pytest.mark.parametrize("impl", ["auto", "logits"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_the_routers_loss_is_the_models_own(kind: str, impl: Any) -> None:
    model = _mixture(kind)
    batch = ragged_batches(2)[0]
    own = model(**batch).loss
    own.backward()
    expected = _gradients(model)
    model.zero_grad()
    loss = fs.causal_lm_loss(with_loss(model, impl=impl), batch, num_targets=fs.count_targets([batch]))
    loss.backward()
    assert float(loss) == pytest.approx(float(own), rel=1e-6)
    assert largest_error(_gradients(model), expected) <= 1e-5
    total, targets = fs.loss_sum(with_loss(model, impl=impl), batch)
    assert float(total / targets) == pytest.approx(float(own), rel=1e-6)
    # Off, or on without the config's word; a coefficient that is changed counts at once.
    plain = copy.deepcopy(model)
    plain.config.output_router_logits = False
    entropy = float(plain(**batch).loss)
    assert float(own) - entropy > 0.5
    off, _ = fs.loss_sum(with_loss(model, impl=impl, router_loss="off"), batch)
    assert float(off / targets) == pytest.approx(entropy, rel=1e-6)
    asked, _ = fs.loss_sum(with_loss(plain, impl=impl, router_loss="micro_batch"), batch)
    assert float(asked / targets) == pytest.approx(float(own), rel=1e-6)
    model.router_aux_loss_coef = 2 * COEFFICIENT
    doubled, _ = fs.loss_sum(with_loss(model, impl=impl), batch)
    assert float(doubled / targets) == pytest.approx(2 * float(own) - entropy, rel=1e-6)


def _check_window(mesh_shape: dict[str, int], grad_sync: Any, options: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = ragged_batches(2 * ranks)  # the last has no target, but tokens that are routed
    plain = _mixture()
    loss, router = _oracle(plain, batches)
    expected = _gradients(plain)
    model = _mixture()
    if "sac" in options:
        fs.apply_sac(model, 1)
    if "compile" in options:
        fs.compile_blocks(model, backend="aot_eager")
    fs.shard_model(model, mesh=mesh_here(**mesh_shape), mp_policy=FLOAT32)
    mine = batches[rank::ranks]
    before = {name: full(p).clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(device_type(), init_scale=32.0) if "scaler" in options else None
    if "logits" in options:
        fs.prepare_loss(model, impl="logits")
    result = fs.train_step(model, mine, optimizer, max_grad_norm=None, grad_sync=grad_sync, scaler=scaler)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.router_loss == pytest.approx(router, rel=1e-6)
    moved = {name: before[name] - full(p) for name, p in model.named_parameters()}
    assert largest_error(moved, expected) <= 1e-4
    # Evaluation, with a rank that has nothing of its own.
    plain = _mixture().eval()
    with torch.no_grad():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.copy_(full(q))
    plain.requires_grad_(False)
    targets = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    tokens = sum(int(b["attention_mask"].sum()) for b in batches)
    entropy = router = 0.0
    for batch in batches:
        output = plain(**{k: v for k, v in batch.items() if k != "labels"}, output_router_logits=True)
        flat = output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        entropy += float(F.cross_entropy(*flat, reduction="sum")) / targets
        router += COEFFICIENT * float(output.aux_loss) * int(batch["attention_mask"].sum()) / tokens
    found = fs.evaluate(model, batches if rank == 0 else [])
    assert found.loss == pytest.approx(entropy, rel=1e-5)
    assert found.router_loss == pytest.approx(router, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "mesh_shape", "grad_sync", "options"),
    [
        (2, {}, "last", "sac scaler"),
        # Slow: it compiles.
        pytest.param(2, {}, "each", "compile", marks=pytest.mark.slow),
        (2, {"dp_replicate": 2, "dp_shard": 1}, "each", "logits"),
        pytest.param(4, {"dp_replicate": 2}, "reduce_scatter", "sac compile", marks=pytest.mark.slow),
    ],
)
def test_a_micro_batch_of_the_router_weighs_by_its_tokens(
    ranks: int, mesh_shape: dict[str, int], grad_sync: str, options: str
) -> None:
    run_distributed(_check_window, ranks, mesh_shape, grad_sync, options)


def test_the_loop_of_ones_own_weighs_by_tokens_too() -> None:
    batches = ragged_batches(3)
    plain, model = _mixture(), _mixture()
    loss, router = _oracle(plain, batches)
    count = fs.count_targets(batches)
    assert count.num_tokens == sum(int(b["attention_mask"].sum()) for b in batches)
    total = 0.0
    for batch in batches:
        part = fs.causal_lm_loss(model, batch, num_targets=count)
        part.backward()
        total += float(part)
    assert total == pytest.approx(loss + router, rel=1e-6)
    assert largest_error(_gradients(model), _gradients(plain)) <= 1e-5
    with pytest.raises(ValueError, match="take num_targets from count_targets"):
        fs.causal_lm_loss(model, batches[0], num_targets=int(count))


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


@pytest.mark.parametrize("impl", ["auto", "chunked", "logits"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_of_another_kind_is_refused_with_both_numbers(case: str, impl: Any) -> None:
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
        fs.prepare_loss(model, impl=impl)
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
    torch.manual_seed(0)
    model = WithoutLogits(tiny_config("llama", attention_dropout=0.2)).train()
    model.own = _entropy
    expected, _ = fs.loss_sum(copy.deepcopy(model).eval(), batch)
    assert float(expected) > 0
    model = copy.deepcopy(model)  # a copy is another model
    model.own = _further
    with pytest.raises(fs.ModelLossError, match="on a tiny batch"):
        fs.loss_sum(model, batch)


@pytest.mark.parametrize("impl", ["auto", "chunked", "logits"])
def test_a_loss_that_cannot_be_compared_is_refused_or_left_out_by_name(impl: Any) -> None:
    model, batch = _changed(_raising), ragged_batches(2)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    refused = (
        r"cannot be compared, because .*NotImplementedError: not with labels.*prepare_loss\(model, compare"
    )
    for _ in range(2):
        with pytest.raises(fs.ModelLossError, match=refused):
            fs.train_step(model, [batch], optimizer)
    with pytest.raises(fs.ModelLossError, match=refused):
        fs.prepare_loss(model, impl=impl)
    fs.prepare_loss(model, impl=impl, compare=False)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    for _ in range(2):
        loss = fs.train_step(model, [batch], optimizer).loss
        assert loss == pytest.approx(float(_entropy(logits, batch["labels"])), rel=1e-6)
    with pytest.raises(fs.ModelLossError, match=refused):
        fs.prepare_loss(model, impl=impl)
    with pytest.raises(fs.ModelLossError, match=refused):
        fs.train_step(model, [batch], optimizer)


def test_what_is_left_out_by_name_has_no_routers_loss() -> None:
    model, batch = _mixture(), ragged_batches(2)[0]
    fs.prepare_loss(model, compare=False)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    total, targets = fs.loss_sum(model, batch)
    expected = _entropy(model(**inputs).logits, batch["labels"])
    assert float(total / targets) == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(fs.ModelLossError, match=r"no router's loss .* or compare=False leaves it out"):
        fs.prepare_loss(model, router_loss="micro_batch", compare=False)
    fs.prepare_loss(model)  # and is compared again
    with_router, _ = fs.loss_sum(model, batch)
    assert float(with_router) > 1.01 * float(total)


def _ada_lora() -> None:
    """AdaLora adds a penalty of its matrices to the loss, in a way that raises for sharded ones."""
    import peft

    config = peft.AdaLoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], init_r=4, target_r=2, total_step=10
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model("llama"), config)
    plain = copy.deepcopy(model)
    batch = ragged_batches(2)[0]
    fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    with pytest.raises(fs.ModelLossError, match=r"cannot be compared.*prepare_loss\(model, compare=False\)"):
        fs.train_step(model, [batch], optimizer)
    with pytest.raises(fs.ModelLossError, match="on a tiny batch"):
        fs.loss_sum(plain, batch)
    with pytest.raises(ValueError, match="ranks call with different arguments"):
        fs.prepare_loss(model, compare=dist.get_rank() == 0)
    fs.prepare_loss(model, compare=False)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    expected = _entropy(
        plain.to(device_type())(**{k: v.to(device_type()) for k, v in inputs.items()}).logits,
        batch["labels"].to(device_type()),
    )
    loss = fs.train_step(model, [batch], optimizer).loss
    assert loss == pytest.approx(float(expected), rel=1e-5)


def test_the_penalty_of_ada_lora_is_not_dropped_in_silence() -> None:
    run_distributed(_ada_lora, 2)


@pytest.mark.parametrize("impl", ["auto", "logits"])
def test_a_loss_that_only_a_batch_calls_forth_is_refused(impl: Any) -> None:
    model = _changed(_entropy)
    batch = {**ragged_batches(2)[0], "extra": torch.ones(3)}
    with pytest.raises(fs.ModelLossError, match="returned a loss although it was given no labels"):
        fs.loss_sum(with_loss(model, impl=impl), batch)
