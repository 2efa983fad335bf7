"""Forwards that are judged when the host waits for the device, and not before."""

from typing import Any

import pytest
import torch

import fsdp_sft as fs
from tests.harness.models import full, tiny_model, windows_of_rank
from tests.simulated.ranks import run_simulated

SLOW = 0.002  # seconds that a copy takes


def _changed_head() -> str:
    context = fs.init_distributed()
    model = fs.shard_model(tiny_model("llama").to(context.device), mesh=fs.build_mesh())
    forward, changes = model.forward, False

    def tempered(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits.relu() if changes else output.logits
        return output

    model.forward = tempered
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    window = windows_of_rank(2, None)[0]
    fs.train_step(model, window, optimizer)
    before = [full(p).detach().cpu() for p in model.parameters()]
    changes = context.rank == 1  # it alone sees it, and all have to say it
    messages = []
    for call in (lambda: fs.train_step(model, window, optimizer), lambda: fs.evaluate(model, window)):
        with pytest.raises(fs.ModelLossError) as caught:
            call()
        messages.append(str(caught.value))
    after = [full(p).detach().cpu() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return messages[0]


def test_a_head_that_changes_on_one_rank_stops_the_step_on_all() -> None:
    for message in run_simulated(_changed_head, 2, copy_delay=SLOW):
        assert "no longer makes" in message
