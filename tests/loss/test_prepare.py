"""The choice of an implementation: what it leaves as it was, when it falls back, and that ranks agree."""

import copy
import itertools
import logging
import types
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_sft as fs
from tests.harness.architectures import class_names, tiny_architecture
from tests.harness.losses import (
    ADAPTERS,
    ADDED,
    Largest,
    adapted_model,
    gradients_of,
    own_batches,
    relative_error,
    shard_by_heads,
    window_gradients,
    with_loss,
)
from tests.harness.models import (
    FLOAT32,
    VOCAB,
    largest_error,
    oracle_gradients,
    oracle_loss,
    ragged_batches,
    tiny_model,
)
from tests.harness.ranks import mesh_here, on_ranks, run_distributed


@on_ranks(2)
def test_preparing_leaves_the_model_as_it_was() -> None:
    model = shard_by_heads(tiny_model("gpt2", attn_pdrop=0.1, resid_pdrop=0.1))
    model.transformer.h[0].eval()
    fs.loss_sum(with_loss(model, impl="logits"), own_batches(ragged_batches(2))[0])[0].backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    assert fs.prepare_loss(model) == "chunked"
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(
        b is buffers[name][0] and torch.equal(b, buffers[name][1]) for name, b in model.named_buffers()
    )
    assert all(torch.equal(p.grad.to_local(), gradients[n].to_local()) for n, p in model.named_parameters())
    assert not any("forward" in vars(module) for module in (model, model.lm_head))
    assert all(hasattr(p, "placements") for p in model.parameters()), "sharded again"


def _odd(kind: str) -> Any:
    model = tiny_model("llama")
    forward = model.forward
    if kind == "square after the head":

        def squared(*args: Any, labels: Any = None, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            output.logits = output.logits.square()
            if labels is not None:
                output.loss = model.loss_function(output.logits, labels, VOCAB)
            return output

        model.forward = squared
    elif kind == "adapter":
        # A head with a parameter of its own that does nothing yet: its output alone would not show it.
        model.lm_head.lora = nn.Parameter(torch.zeros(VOCAB, 32))
        model.lm_head.forward = lambda hidden: nn.functional.linear(
            hidden, model.lm_head.weight + model.lm_head.lora
        )
    elif kind == "head used twice":
        model.forward = lambda *args, **kwargs: (
            model.lm_head(torch.ones(1, 1, 32)),
            forward(*args, **kwargs),
        )[1]
    elif kind == "no head":
        model.get_output_embeddings = lambda: None
    elif kind == "compiled":
        model.compile(backend="eager")
    return model


ODD = {
    "square after the head": "neither a scale nor a soft cap",
    "adapter": "not a plain nn.Linear",
    "head used twice": "calls the head 2 times",
    "no head": "names no output embeddings",
    "compiled": "compiled as a whole",
}


@pytest.mark.parametrize("kind", ODD)
def test_falls_back_with_a_reason(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = _odd(kind), ragged_batches(1)[0]
    with caplog.at_level(logging.INFO, "fsdp_sft.loss"):
        assert fs.prepare_loss(model) == "logits"
    (record,) = (one for one in caplog.records if one.name == "fsdp_sft.loss")
    assert record.levelno == logging.WARNING
    assert "loss of LlamaForCausalLM: full logits, because" in record.message
    assert ODD[kind] in record.message
    with pytest.raises(ValueError, match=f"cannot be computed by impl='chunked': .*{ODD[kind]}"):
        fs.prepare_loss(model, impl="chunked")
    assert fs.prepare_loss(model) == "logits"
    total, count = fs.loss_sum(model, batch)
    assert float(total.detach()) / count == pytest.approx(
        float(oracle_loss(model, [batch]).detach()), rel=1e-5
    )


def test_a_soft_cap_shows_even_where_logits_are_small() -> None:
    model = tiny_model("gemma2")
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-3)
    assert fs.prepare_loss(model) == "chunked"
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
    batch = ragged_batches(1)[0]
    fused, _ = fs.loss_sum(with_loss(model, impl="chunked"), batch)
    assert (
        relative_error(fused.detach(), fs.loss_sum(with_loss(model, impl="logits"), batch)[0].detach())
        <= 1e-6
    )


def test_a_choice_is_made_once_and_ends_with_its_model(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = tiny_model("llama"), ragged_batches(1)[0]
    with caplog.at_level(logging.INFO, "fsdp_sft.loss"):
        fs.prepare_loss(model)
        fs.loss_sum(model, batch)
        assert len(caplog.records) == 1, "probed once"
        fs.loss_sum(copy.deepcopy(model), batch)
        assert len(caplog.records) == 2, "a copy is another model"
        model.lm_head = nn.Linear(32, VOCAB + 3, bias=True)
        model.config.vocab_size = model.vocab_size = VOCAB + 3
        fs.prepare_loss(model)
        total, count = fs.loss_sum(model, batch)
    assert float(total.detach()) / count == pytest.approx(float(oracle_loss(model, [batch])), rel=1e-5)
    reference = weakref.ref(model)
    del model, total
    assert reference() is None, "nothing keeps the model alive"


def test_the_wrong_models_and_names_are_refused() -> None:
    for message, model, options in (
        ("impl must be one of", tiny_model("llama"), {"impl": "liger"}),
        ("encoder-decoder", tiny_model("t5"), {}),
        (r"cannot be compared.*meta tensor", tiny_model("llama").to("meta"), {}),
    ):
        with pytest.raises(ValueError, match=message):
            fs.prepare_loss(model, **options)
    with pytest.raises(fs.ModelLossError, match=r"cannot be compared.*Give train_step and"):
        fs.loss_sum(tiny_model("bert"), ragged_batches(1)[0])


@on_ranks(2, timeout=240)
def test_training_goes_on_after_a_probe_that_failed() -> None:
    batches = ragged_batches(4)
    for own_group, place in itertools.product((False, True), ("block", "head")):
        model = tiny_model("llama")
        _, expected = oracle_gradients(model, batches)
        shard_by_heads(model, own_group=own_group)

        def fail(_module: Any, args: tuple[Any, ...]) -> None:
            if args[0].shape[:2] == (2, 8):
                raise RuntimeError("no such shape")

        module = model.lm_head if place == "head" else model.model.layers[0].mlp
        handle = module.register_forward_pre_hook(fail)
        with pytest.raises(fs.ModelLossError, match="RuntimeError: no such shape"):
            fs.prepare_loss(model)
        assert fs.prepare_loss(model, compare=False) == "logits"
        actual = window_gradients(model, own_batches(batches))
        assert largest_error(actual, expected) <= 1e-6, (own_group, place)
        handle.remove()
        assert fs.prepare_loss(model) == "chunked"
        assert largest_error(window_gradients(model, own_batches(batches)), expected) <= 1e-6, (
            own_group,
            place,
        )


@on_ranks(2)
def test_ranks_agree_on_a_fall_back() -> None:
    model = shard_by_heads(tiny_model("llama"))
    with pytest.raises(ValueError, match="ranks call with different arguments"):
        fs.prepare_loss(model, impl="logits" if dist.get_rank() else "auto")
    if dist.get_rank() == 1:
        model.lm_head.forward = types.MethodType(nn.Linear.forward, model.lm_head)  # not plain on this one
    assert fs.prepare_loss(model) == "logits"
    with pytest.raises(ValueError, match=r"1 other ranks of the mesh could not|not a plain nn\.Linear"):
        fs.prepare_loss(model, impl="chunked")


@pytest.mark.slow
def test_every_causal_lm_is_fused_exactly_or_falls_back_with_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    fused, refused, reasons, errors = 0, 0, {}, {}
    for name in class_names():
        try:
            model = tiny_architecture(name).eval()
        except Exception as error:
            reasons[name] = f"not built: {error}"
            continue
        caplog.clear()
        try:
            chosen = fs.prepare_loss(model)
        except fs.ModelLossError as error:  # its own loss is another one
            reasons[name], refused = str(error), refused + 1
            continue
        if chosen == "logits":
            reasons[name] = caplog.records[-1].message
            continue
        gradients = []
        for impl in ("logits", "chunked"):
            fs.loss_sum(with_loss(model, impl=impl), batch)[0].backward()
            gradients.append(gradients_of(model))
        errors[name] = largest_error(gradients[1], gradients[0])
        fused += 1
    print(f"\n{fused} of {len(class_names())} fused, largest gradient error {max(errors.values()):.1e}")
    print("\n".join(f"{name}: {reason[:200]}" for name, reason in reasons.items()))
    assert max(errors.values()) <= 2e-6, max(errors, key=lambda name: errors[name])
    assert fused >= 0.9 * (len(class_names()) - refused) > 120


# --- heads that peft has changed, that somebody hooks, or whose scale changes later ---


def _window(model: Any, batches: list[Any]) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(7)  # of dropout
    total, targets = 0.0, fs.count_targets(batches)
    for batch in batches:
        loss = fs.causal_lm_loss(model, batch, num_targets=targets)
        loss.backward()
        total += float(loss.detach())
    return total, gradients_of(model)


@pytest.mark.parametrize("kind", [*ADAPTERS, *ADDED])
def test_the_loss_of_a_head_with_adapters_is_that_of_its_logits(kind: str) -> None:
    pytest.importorskip("peft")
    model, batches = adapted_model(kind, torch.float64), ragged_batches(2)
    torch.manual_seed(7)
    expected, gradients = oracle_gradients(model, batches)
    if kind in ADDED:
        with pytest.raises(fs.ModelLossError, match=r"not a plain nn\.Linear: .*peft"):
            fs.prepare_loss(model, impl="chunked")
    assert fs.prepare_loss(model) == ("logits" if kind in ADDED else "chunked")
    loss, own = _window(model, batches)
    assert loss == pytest.approx(expected, rel=1e-9)
    assert largest_error(own, gradients) <= 1e-9


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_head_with_adapters_needs_no_logits(kind: str) -> None:
    pytest.importorskip("peft")
    model, batch = adapted_model(kind, torch.float64), ragged_batches(2)[0]
    with model.disable_adapter():
        assert float(fs.loss_sum(with_loss(model, impl="chunked"), batch)[0].detach()) == pytest.approx(
            float(fs.loss_sum(with_loss(model, impl="logits"), batch)[0].detach()), rel=1e-9
        )
    fs.prepare_loss(model)
    rows = torch.randint(3, VOCAB, (1, 1000), generator=torch.Generator().manual_seed(0))
    long = {"input_ids": rows[:, :100].repeat(10, 1), "labels": rows[:, :100].repeat(10, 1)}
    with Largest() as largest:
        fs.loss_sum(model, long)[0].backward()
    assert largest.numel < 1000 * VOCAB, "as large as the logits"


def _check_sharded() -> None:
    batches = ragged_batches(2)
    mine = own_batches(batches)
    for kind, impl in (("modules_to_save", "chunked"), ("lora", "logits")):
        model = adapted_model(kind)
        loss, expected = oracle_gradients(model, batches)
        fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32)
        assert fs.prepare_loss(model) == impl, kind
        assert largest_error(_window(model, mine)[1], expected) <= 1e-6, kind
        assert fs.evaluate(model.eval(), mine).loss == pytest.approx(loss, rel=1e-6)


def test_sharded_heads_with_adapters() -> None:
    pytest.importorskip("peft")
    run_distributed(_check_sharded, 2)


def _doubled(_module: Any, _args: Any, output: Any) -> Any:
    if not isinstance(output, torch.Tensor):
        output.logits = output.logits * 2
        return output
    return output * 2


@pytest.mark.parametrize("place", ["lm_head", ""])
def test_a_hook_that_changes_the_logits_is_heeded(place: str) -> None:
    batch, model = ragged_batches(1)[0], tiny_model("llama")
    model.get_submodule(place).register_forward_hook(_doubled)
    expected = float(oracle_loss(model, [batch]).detach())
    try:
        total, count = fs.loss_sum(model, batch)
    except fs.ModelLossError:
        assert place == "", "the model's own loss is computed before this hook"
    else:
        assert float(total.detach()) / count == pytest.approx(expected, rel=1e-5)
        with pytest.raises(fs.ModelLossError, match="neither a scale nor a soft cap"):
            fs.loss_sum(with_loss(model, impl="chunked"), batch)


def test_hooks_that_change_nothing_of_the_logits_cost_nothing() -> None:
    """One before the head, whose work the head is given, one that only looks, and torch's own observers."""
    from torch.distributed.tensor.debug import CommDebugMode

    batch, model = ragged_batches(1)[0], tiny_model("llama")
    model.lm_head.register_forward_pre_hook(lambda _module, args: (args[0] * 0.5,))
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    expected = float(oracle_loss(model, [batch]).detach())
    fs.prepare_loss(model, impl="chunked")
    with CommDebugMode():
        total, count = fs.loss_sum(model, batch)
    assert float(total.detach()) / count == pytest.approx(expected, rel=1e-5)
    assert seen[-1] == (), "the loss in place of the logits, as prepare_loss says"
