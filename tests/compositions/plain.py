"""The oracle: the same windows through the plain model in one process; no code of the library."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests import plain
from tests.compositions import options
from tests.compositions.architectures import GROWN, ROUTER_COEFFICIENT, count, summed_loss
from tests.compositions.axes import CAUSAL, Draw
from tests.compositions.rows import VOCABULARY, labels_of, rows_of, weights_of

Batch = dict[str, torch.Tensor]
Tensors = dict[str, torch.Tensor]


@dataclass
class Trained:
    """What training gave by step; the first gradients (after clipping), the first and the last parameters."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    router_losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)
    start: Tensors = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)


def grown(model: Any) -> Any:
    """The model with more tokens, each new row the mean of the old ones."""
    model.resize_token_embeddings(GROWN, mean_resizing=False)
    with torch.no_grad():
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight[VOCABULARY:] = table.weight[:VOCABULARY].double().mean(0).to(table.weight.dtype)
    return model


def adapted(draw: Draw, model: Any, start: Tensors) -> Any:
    """With peft's adapters, whose random parts are those of ``start``."""
    config = options.adapter_config(draw)
    if config is None:
        return model
    from peft import get_peft_model

    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if is_random(name):
            parameter.data.copy_(start[name])
    return model.train()


def disturb(model: nn.Module, relative: float) -> None:
    """Move every parameter by at most so much of itself: what another rounding would have made of it."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.mul_(1 + relative * (torch.rand(parameter.shape, generator=generator) * 2 - 1))


def is_random(name: str) -> bool:
    """Whether peft draws a parameter at random."""
    return "lora_A" in name


def train(
    draw: Draw,
    model: Any,
    windows: Sequence[Sequence[Batch]],
    held_out: Sequence[Batch],
    *,
    precision: torch.dtype,
) -> Trained:
    """Train a model on windows that hold the micro-batches of all ranks; the model is changed.

    Args:
        draw: Its options.
        model: Trained in place.
        windows: Of one rank after the other.
        held_out: Batches to evaluate on.
        precision: That it computes in.
    """
    model = model.double() if precision == torch.float64 else model
    one_by_one = precision == torch.float64 or draw["experts"] == "one by one"
    if one_by_one and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    call = _Computing(model, precision)
    options.twist(draw, call.copy)
    made = options.optimizers(draw, model)
    found = Trained(start={name: p.detach().clone() for name, p in model.named_parameters()})
    for step, window in enumerate(windows, start=1):
        options.change(draw, step, made, model, call.copy)
        if draw[f"before step {step}"] == "evaluate":
            found.evaluations.append(_evaluated(draw, call, held_out))
        _, norm = plain.step(
            model,
            _losses(draw, call, window, found),
            made,
            max_norm=options.max_norm(draw),
            keep=None if found.gradients else found.gradients,
        )
        found.norms.append(norm)
        call.refresh()
    found.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


def _losses(
    draw: Draw, call: "_Computing", window: Sequence[Batch], found: Trained
) -> Iterator[torch.Tensor]:
    """What is gone back through in a step, scaled; the gradients are not any more at its end."""
    targets = sum(_weight(draw, batch) for batch in window)
    scale = options.SCALE if draw["precision"].startswith("float16") else 1.0
    loss_sum = router = 0.0
    for batch in window:
        summed = torch.as_tensor(_summed(draw, call, batch))
        # Either is plain; which of them a sharded model gets is of no concern, but the rounding differs.
        yield scale * (
            summed / targets if draw["mesh"] in ("single", "torch DDP 2") else summed * (1 / targets)
        )
        loss_sum += float(summed.detach())
        call.hand_over()
    if _has_router(draw) and not options.loss_terms(draw):
        tokens = sum(len(row) for batch in window for row in rows_of(batch))
        for rows in filter(None, map(rows_of, window)):  # a pack may have none
            share = _router_loss(call, rows) * (sum(map(len, rows)) / tokens)
            yield share * scale
            router += float(share.detach())
            call.hand_over()
    for parameter in call.model.parameters():
        if parameter.grad is not None:
            parameter.grad /= scale
    found.losses.append(loss_sum / targets)
    found.router_losses.append(router)


def _has_router(draw: Draw) -> bool:
    return draw["architecture"] == "moe with router loss" and draw["loss"] not in ("loss_fn", "tokens")


def _router_loss(call: Any, rows: list[list[int]]) -> torch.Tensor:
    """The router's loss of a micro-batch, times its coefficient.

    As in Switch Transformers: choices of each expert a token, times its mean probability.
    """
    said = [call(input_ids=torch.tensor([row]), use_cache=False).router_logits for row in rows]
    given = torch.cat([torch.cat(layer) for layer in zip(*said, strict=True)]).softmax(-1)
    chosen = torch.zeros_like(given).scatter(1, given.topk(call.config.num_experts_per_tok).indices, 1)
    wide = given if given.dtype == torch.float64 else given.float()
    return ROUTER_COEFFICIENT * given.shape[1] * (chosen.to(wide.dtype).mean(0) * wide.mean(0)).sum()


def _summed(draw: Draw, call: Any, batch: Batch) -> torch.Tensor:
    # By rows where a pack has to come to that, and in float64: transformers' eager attention leaves NaN in
    # float64 where a position sees nothing, as padding behind a sliding window does.
    by_row = draw["architecture"] in CAUSAL and call.precision == torch.float64
    is_plain = draw["loss terms"] == "plain"
    if "position_ids" not in batch and not by_row and is_plain:
        return summed_loss(call, batch)
    total: Any = 0.0
    for row, labels, weights in zip(rows_of(batch), labels_of(batch), weights_of(batch), strict=True):
        own = {
            "input_ids": torch.tensor([row]),
            "attention_mask": torch.ones(1, len(row), dtype=torch.int64),
            "labels": torch.tensor([labels]),
        }
        total = total + (summed_loss(call, own) if is_plain else _with_terms(draw, call, own, weights))
    if _has_router(draw) and options.loss_terms(draw) and rows_of(batch):
        # A loss_fn of ``loss_sum``, in which the router's loss weighs as the targets do.
        total = total + _weight(draw, batch) * _router_loss(call, rows_of(batch))
    return total  # type: ignore[no-any-return]


def _with_terms(draw: Draw, call: Any, batch: Batch, weights: list[float]) -> torch.Tensor:
    """Of one row: each target's loss by its definition."""
    terms = options.loss_terms(draw)
    smoothing, z_loss = terms.get("label_smoothing", 0.0), terms.get("z_loss", 0.0)
    logits = call(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[0]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    total = torch.zeros((), dtype=logits.dtype)
    for place, label in enumerate(batch["labels"][0, 1:].tolist()):
        if label != -100:
            log_p = logits[place] - logits[place].logsumexp(0)
            loss = -(1 - smoothing) * log_p[label] - smoothing * log_p.mean()
            total = total + weights[place + 1] * (loss + z_loss * logits[place].logsumexp(0) ** 2)
    return total


def _weight(draw: Draw, batch: Batch) -> float:
    """What a batch counts for in the window's mean."""
    if draw["loss terms"] != "weights":
        return count(batch, draw["architecture"])
    pairs = zip(labels_of(batch), weights_of(batch), strict=True)
    return sum(
        w for labels, own in pairs for label, w in zip(labels[1:], own[1:], strict=True) if label != -100
    )


def _evaluated(draw: Draw, call: "_Computing", batches: Sequence[Batch]) -> float:
    call.model.eval()
    with torch.no_grad():
        total = sum(float(_summed(draw, call, batch)) for batch in batches)
    call.model.train()
    return total / sum(_weight(draw, batch) for batch in batches)


class _Computing:
    """A model as it computes: a copy whose parameters are cast, with gradients for the original."""

    def __init__(self, model: nn.Module, precision: torch.dtype) -> None:
        self.model, self.precision = model, precision
        self.copy = copy.deepcopy(model)
        self.config = getattr(model, "config", None)
        self.refresh()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.copy.train(self.model.training)(*inputs, **named)

    def refresh(self) -> None:
        """Take the original's values."""
        for own, cast in zip(self.model.parameters(), self.copy.parameters(), strict=True):
            cast.data = own.detach().to(self.precision)

    def hand_over(self) -> None:
        """Add the copy's gradients to the original's."""
        for own, cast in zip(self.model.parameters(), self.copy.parameters(), strict=True):
            if cast.grad is not None:
                own.grad = cast.grad.to(own.dtype) + (0 if own.grad is None else own.grad)
                cast.grad = None
