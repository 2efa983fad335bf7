"""Activations that wait in host memory: the same gradients, and less of the device."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_sft as fs
from fsdp_sft.sac.offload import Offload
from tests.harness.losses import gradients_of
from tests.harness.models import tiny_model
from tests.simulated.ranks import run_simulated

SLOW = 0.02
TOKENS, HIDDEN, BLOCKS = 1024, 32, 4
INPUT = TOKENS * HIDDEN * 4  # bytes of a block's input
Gradients = dict[str, torch.Tensor]


def _model() -> Any:
    return tiny_model("qwen3", hidden_size=HIDDEN, num_hidden_layers=BLOCKS)


def _batch(device: str, tokens: int = TOKENS) -> dict[str, Any]:
    ids = torch.arange(tokens).mul(7).remainder(90).view(1, -1).to(device)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _bytes_in_use() -> int:
    torch.accelerator.synchronize()
    return torch.accelerator.memory_stats()["requested_bytes.all.current"]


def _equal(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _step(ratio: str, *, offload: bool) -> tuple[Gradients, int, int]:
    """Of the second step: gradients, what its forward left on the device, and the peak, in bytes."""
    model = _model().to("sim").train()
    fs.apply_sac(model, ratio, offload=offload)
    for tokens in (TOKENS, TOKENS - 3):
        model.zero_grad()
        before = _bytes_in_use()
        torch.accelerator.reset_peak_memory_stats()
        hidden = model.model(**_batch("sim", tokens)).last_hidden_state
        left = _bytes_in_use() - before
        hidden.square().sum().backward()
    torch.accelerator.synchronize()
    peak = torch.accelerator.memory_stats()["requested_bytes.all.peak"] - before
    return gradients_of(model), left, peak


@pytest.mark.parametrize(
    ("ratio", "gone", "less"), [("1", BLOCKS - 1, (BLOCKS - 3) * INPUT + 1), ("1/2", BLOCKS / 2 - 1, 0)]
)
def test_gradients_are_equal_and_the_device_has_less(ratio: str, gone: float, less: int) -> None:
    ((plain, left, peak),) = run_simulated(_step, 1, ratio, offload=False, copy_delay=SLOW)
    ((found, left_now, peak_now),) = run_simulated(_step, 1, ratio, offload=True, copy_delay=SLOW)
    assert any(gradient.abs().sum() > 0 for gradient in plain.values())
    assert _equal(found, plain)
    # The newest visit stays until the next begins, and is the first that the backward needs.
    assert round((left - left_now) / INPUT, 1) == gone
    assert peak - peak_now >= less


def _offload_of(model: Any) -> Offload:
    own = model.model.layers[0].__dict__
    # Where transformers' layer recomputes its forward, it holds the function; otherwise the block does.
    recompute: Any = own.get("_gradient_checkpointing_func") or own["forward"].args[1]
    found = recompute.args[0]
    assert isinstance(found, Offload)
    return found


def _orders() -> list[str]:
    """What does not come out as without offload, in words."""
    wrong: list[str] = []

    def compare(expected: Gradients, what: str) -> None:
        if not _equal(gradients_of(model), expected):
            wrong.append(what)

    model = _model().to("sim").train()
    batches = [_batch("sim", tokens) for tokens in (TOKENS, TOKENS // 2 + 3)]
    expected = []
    for batch in batches:
        model(**batch).loss.backward()
        expected.append(gradients_of(model))
    fs.apply_sac(model, 1, offload=True)
    own = _offload_of(model)
    for without_gradients in (torch.inference_mode, torch.no_grad):
        with without_gradients():
            model(**batches[0])
    assert own.latest == []
    older, newer = (model(**batch).loss for batch in batches)
    older.backward()
    compare(expected[0], "the older of two forwards")
    newer.backward()
    compare(expected[1], "the newer of two forwards")
    loss = model(**batches[0]).loss
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    compare(expected[0], "a second backward")
    del older, newer, loss
    for step in range(4):
        dropped = model(**batches[step % 2]).loss
        del dropped
        model(**batches[1]).loss.backward()
        compare(expected[1], "after a graph that was dropped")
    latest = own.latest
    model = copy.deepcopy(model)
    model(**batches[0]).loss.backward()
    assert own.latest is latest
    assert _offload_of(model) is not own
    compare(expected[0], "a copy")
    return wrong


def test_any_order_of_forwards_and_backwards() -> None:
    assert run_simulated(_orders, 1, copy_delay=0.003) == [[]]


class _OfOnesOwn(nn.Module):
    """Blocks that take their hidden states by another name, or change in place what a checkpoint keeps."""

    class Block(nn.Module):
        def __init__(self, form: str) -> None:
            super().__init__()
            self.form = form
            self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            x = x.mul_(0.5) if self.form == "at its begin" else x
            out = self.down(torch.relu(self.up(torch.tanh(x + bias))))
            return x.add_(out) if self.form == "at its end" else x + out

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.embed, self.bias = form, nn.Embedding(100, HIDDEN), nn.Parameter(torch.ones(HIDDEN))
        self.embed.requires_grad_(form != "by name, the embedding frozen")
        self.layers = nn.ModuleList(self.Block(form) for _ in range(BLOCKS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        bias = self.bias.expand(TOKENS, HIDDEN).contiguous()  # one for all blocks, with a gradient
        for block in self.layers:
            before = hidden
            hidden = block(x=hidden, bias=bias) if "by name" in self.form else block(hidden, bias)
            if self.form == "by the model" and block is self.layers[0]:
                before.add_(1)  # while it is copied; that of the last block is on the device still
        return hidden


def _of_ones_own(form: str) -> list[Any]:
    """Without offload and with it: (bytes that the forward leaves on the device, gradients), or the error."""
    found: list[Any] = []
    ids = torch.arange(TOKENS, device="sim").remainder(100)
    for offload in (False, True):
        model = _OfOnesOwn(form).to("sim")
        fs.apply_sac(model, blocks=[f"layers.{i}" for i in range(BLOCKS)], offload=offload)
        before = _bytes_in_use()
        try:
            loss = model(ids).square().sum()
            left = _bytes_in_use() - before
            loss.backward()
            found.append((left, gradients_of(model)))
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("form", "least"),
    [("by position", BLOCKS - 1.3), ("by name", BLOCKS - 1.3), ("by name, the embedding frozen", BLOCKS - 2)],
)
def test_hidden_states_are_found_by_whatever_name(form: str, least: float) -> None:
    (((plain, expected), (left, found)),) = run_simulated(_of_ones_own, 1, form, copy_delay=0.005)
    assert _equal(found, expected)
    # The bias that blocks share is on the device once, as it was.
    assert (plain - left) / INPUT >= least


@pytest.mark.parametrize("form", ["at its begin", "at its end", "by the model"])
def test_changes_in_place_are_told_as_without_it(form: str) -> None:
    (messages,) = run_simulated(_of_ones_own, 1, form, copy_delay=0.005)
    assert ["inplace" in message or "mutated" in message for message in messages] == [True, True], messages


def test_compiled_blocks_are_refused_in_either_order() -> None:
    model = _model()
    fs.apply_sac(model, 1, offload=True)
    with pytest.raises(ValueError, match=r"'model.layers.0' is compiled, and offload=True"):
        fs.compile_blocks(model, backend="eager")
    fs.remove_sac(model)
    fs.compile_blocks(model, backend="eager")
    with pytest.raises(ValueError, match=r"'model.layers.0' is compiled, and offload=True"):
        fs.apply_sac(model, 1, offload=True)


def test_on_a_cpu_nothing_moves() -> None:
    model, plain = _model(), _model()
    fs.apply_sac(model, 1, offload=True)
    model = pickle.loads(pickle.dumps(model))
    for one in (model, plain):
        one(**_batch("cpu")).loss.backward()
    assert _equal(gradients_of(model), gradients_of(plain))
    assert _offload_of(model).latest == []
