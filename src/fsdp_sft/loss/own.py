"""Check that a model's own loss, ``model(..., labels=...)``, is the cross entropy that is computed here.

A model may add terms to it (a router's loss, a z-loss, heads that predict further tokens), smooth the labels,
ignore another label than -100, or not shift. The model is asked once, for its loss on a tiny batch. That loss
is compared with the cross entropy of the logits that the same forward returns, so that only the definition of
the loss can differ.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fsdp_sft._model.adapters import forward_parameters
from fsdp_sft._model.inputs import no_cache
from fsdp_sft._model.named import parameter_names
from fsdp_sft._model.sharded import compute_device
from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft._process.generators import unmoved
from fsdp_sft._tensors.packed_shard import values_of
from fsdp_sft.errors import abridged
from fsdp_sft.loss.balance import Balance, balanced_by, intercept
from fsdp_sft.loss.probe import ProbeError, evaluating, output_of
from fsdp_sft.loss.transform import numbers_of, wide
from fsdp_sft.targets import IGNORE_INDEX, shifted

_LENGTH = 8
# Largest relative difference of equal losses. Losses of narrower dtypes have been rounded; see ``near``.
_TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5}
# Parts of the names of numbers in configs and models that belong to a loss.
_OF_A_LOSS = ("loss", "coef", "smooth", "mtp", "nextn", "aux")


@dataclass(frozen=True)
class OwnLoss:
    """A model's own loss on a tiny batch, and what it is compared with.

    Attributes:
        loss: The model's own loss.
        expected: Mean cross entropy of the logits that the model returned.
        unshifted: Mean cross entropy with labels that are not shifted.
        aux_loss: The ``aux_loss`` of the model's output, a router's loss; None if there is none.
        balance: Router's loss as ``Balance`` computes it; None if the model computes it in another function.
        used: Options that the model passed to torch's cross entropy.
    """

    loss: torch.Tensor
    expected: float
    unshifted: float
    aux_loss: float | None
    balance: float | None
    used: dict[str, Any]

    @property
    def is_balanced(self) -> bool:
        """Whether the router's loss is the one that ``Balance`` computes."""
        aux, balance = self.aux_loss, self.balance
        return aux is not None and balance is not None and self.near(balance, aux)

    def near(self, value: float, reference: float) -> bool:
        """Whether two losses are equal at the precision of the model's loss."""
        tolerance = _TOLERANCE.get(self.loss.dtype, 2 * torch.finfo(self.loss.dtype).eps)
        return abs(value - reference) <= tolerance * max(abs(reference), 1e-3)

    def why_different(self, model: nn.Module) -> str:
        """How the loss differs from the cross entropy, as far as is known; empty if it does not."""
        if not math.isfinite(self.expected) and not math.isfinite(float(self.loss)):
            return _not_finite(model, float(self.loss))
        if self.near(float(self.loss), self.expected):
            return ""
        smoothing, ignored = self.used.get("label_smoothing"), self.used.get("ignore_index", IGNORE_INDEX)
        if smoothing:
            return f"it smooths labels by {smoothing}"
        if ignored != IGNORE_INDEX:
            return f"it ignores the label {ignored} and not {IGNORE_INDEX}"
        if self.near(float(self.loss), self.unshifted):
            return "it does not shift the labels: position t is held against label t"
        named = [f"{name}={value:g}" for name, value in numbers_of_a_loss(model).items() if value]
        seen = f" (numbers of it that a loss may have: {abridged(named)})" if named else ""
        return f"it adds something to the cross entropy, or computes something else{seen}"


class NotFinite(str):
    """Why a model's loss is NaN or infinite on any batch."""

    __slots__ = ()


def _not_finite(model: nn.Module, loss: float) -> NotFinite:
    """The reason for a loss that is not finite, with the weights that are not, of those on this rank."""
    broken = [
        name
        for parameter, name in parameter_names(model).items()
        if not bool(values_of(parameter.detach()).isfinite().all())
    ]
    where = f": {abridged(broken)} hold values that are not finite" if broken else ""
    return NotFinite(
        f"the loss of {type(unwrapped(model)).__name__} is {loss} on a tiny batch, before any step{where}. "
        "Load the weights again (load_weights checks that they are finite), or start from an earlier "
        "checkpoint"
    )


class Different(str):
    """Why a model's loss is not the cross entropy, found before it was computed."""

    __slots__ = ()


class Incomparable(str):
    """Why a loss that the model has cannot be compared with the cross entropy."""

    __slots__ = ()


class _SeesCrossEntropy(TorchFunctionMode):
    """Records the options of calls to torch's cross entropy, and raises for a label that is out of range.

    On CUDA such a label would fail an assertion in a kernel, after which the process cannot use the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[str, Any] = {}
        self.different = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            self._note(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's names
        target: torch.Tensor,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = IGNORE_INDEX,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        """Record the options of a cross entropy, and raise for a negative label that it does not ignore."""
        noted = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        self.used.update({name: value for name, value in noted.items() if value not in (IGNORE_INDEX, 0.0)})
        if not target.is_floating_point():
            held = target[target != ignore_index]
            if held.numel() and int(held.min()) < 0:
                self.different = f"it ignores the label {ignore_index} and not {int(held.min())}"
                raise ValueError(self.different)


def ask(model: nn.Module, router: bool | None) -> OwnLoss | str:
    """Ask the model for its own loss on a tiny batch.

    Training mode is tried first, because a model may add terms there that it leaves out in evaluation, and
    then evaluation mode. The model is left as it was.

    Args:
        model: Model with its weights, sharded or not.
        router: Value of the forward's argument ``output_router_logits``; None leaves the argument out.

    Returns:
        The loss and what it is compared with, or the reason why the model gives none.

    Collective: all ranks of the model's mesh, by one forward or a few.
    """
    parameters = forward_parameters(model)
    if "labels" not in parameters and not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return "its forward takes no labels"
    why = ""
    for training in (True, False):
        try:
            found = _in_mode(model, router, training)
        except ProbeError as error:
            found = Incomparable(f"its forward with labels raises ({error})")
        if isinstance(found, (OwnLoss, Different)):
            return found
        why = why or found
    return why


def numbers_of_a_loss(model: nn.Module) -> dict[str, float]:
    """Numbers of the model and its config that a loss may use, judged by their names."""
    found: dict[str, float] = {}
    for _, name, value in numbers_of(model):
        if any(part in name.lower() for part in _OF_A_LOSS):
            found.setdefault(name, value)
    return found


@dataclass(frozen=True)
class Coefficient:
    """The coefficient of a model's router loss, read from where the model reads it.

    Attributes:
        holder: The model or the config that holds it.
        name: Name of the attribute.
    """

    holder: Any
    name: str

    def read(self) -> float:
        """Its present value."""
        return float(getattr(self.holder, self.name))


def coefficient_of(model: nn.Module, own: OwnLoss) -> Coefficient | None:
    """The coefficient that times ``aux_loss`` gives what the loss adds to the cross entropy, if any does."""
    if own.aux_loss is None:
        return None
    for coefficient in router_coefficients(model):
        if own.near(own.expected + coefficient.read() * own.aux_loss, float(own.loss)):
            return coefficient
    return None


def router_coefficients(model: nn.Module) -> Iterator[Coefficient]:
    """Numbers that may be the coefficient of a router's loss.

    Those named like one come first, and those of the model before those of its config.
    """
    for likely in (True, False):
        for holder, name, _ in numbers_of(model):
            speaks = "coef" in name and ("aux" in name or "router" in name)
            of_a_loss = any(part in name.lower() for part in ("coef", "aux", "loss", "router"))
            if speaks if likely else of_a_loss and not speaks:
                yield Coefficient(holder, name)


def _in_mode(model: nn.Module, router: bool | None, training: bool) -> OwnLoss | str:
    """``ask`` in training or in evaluation mode."""
    device = compute_device(model)
    ids = torch.arange(3, 3 + 2 * _LENGTH, device=device).view(2, -1)
    with evaluating(model):
        inner: Any = unwrapped(model)
        embedding = getattr(inner, "get_input_embeddings", lambda: None)()
        rows = getattr(embedding, "num_embeddings", None) or int(ids.max()) + 1
        ids %= rows
        labels = _labels(model, ids, rows)
        inputs: dict[str, Any] = {"input_ids": ids, "labels": labels, **no_cache(model)}
        if router is not None:
            inputs["output_router_logits"] = router
        model.train(training)
        seen, balance = _SeesCrossEntropy(), Balance(replaces=False)
        intercept(model)
        try:
            with balanced_by(balance), unmoved([device]):
                output = output_of(model, inputs, seen)
        except ProbeError:
            if not seen.different:
                raise
            return Different(seen.different)
        loss = getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return "its forward with labels returns no loss"
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor):
            del inputs["labels"]
            logits = getattr(output_of(model, inputs, seen), "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.shape[:2] != ids.shape or logits.ndim != 3:
            return Incomparable("its forward returns no logits to compute the cross entropy of")
        aux = getattr(output, "aux_loss", None)
        return OwnLoss(
            loss.detach().reshape(()),
            _cross_entropy(logits, shifted(labels)),
            _cross_entropy(logits, labels),
            float(aux) if isinstance(aux, torch.Tensor) else None,
            None if balance.loss is None else float(balance.loss),
            seen.used,
        )


def _labels(model: nn.Module, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Labels in which models may differ: unequal numbers of targets per row, special tokens, -100."""
    labels = ids.roll(1, dims=0)
    config: Any = getattr(unwrapped(model), "config", None)
    special = [getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
    for column, token in enumerate(special, start=2):
        if isinstance(token, int) and 0 <= token < rows:
            labels[0, column] = token
    labels[0, 6] = IGNORE_INDEX
    labels[1, 1:5] = IGNORE_INDEX
    return labels


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean cross entropy of logits ``(B, S, V)`` for targets ``(B, S)``."""
    targets = targets.to(logits.device).flatten()
    return float(F.cross_entropy(wide(logits).flatten(0, 1), targets, ignore_index=IGNORE_INDEX))
