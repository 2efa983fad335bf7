"""How often the host waits for the device in a step: counted on the simulated accelerator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from tests.harness.models import tiny_model, windows_of_rank
from tests.simulated.ranks import run_simulated

SLOW = 0.002  # seconds that a copy takes
FORMS = ("step", "logits", "device batches", "router", "scaler")


def _waits_of(call: Callable[[], Any]) -> list[str]:
    """Where the host waited in a call, but for what the model's own code (a mixture's) waits for."""
    with torch.sim.record_syncs() as found:
        call()
    own = [sync for sync in found if not _is_of_the_model([frame.filename for frame in sync.stack])]
    return [f"{sync.kind}: {sync.stack[-1].filename}:{sync.stack[-1].lineno}" for sync in own]


def _is_of_the_model(files: list[str]) -> bool:
    """Whether the innermost file of the two libraries is transformers': our loss runs in its forward."""
    inner = next((file for file in reversed(files) if "/transformers/" in file or "/fsdp_sft/" in file), "")
    return "/transformers/" in inner


def _steps(form: str, micro_batches: int) -> dict[str, Any]:
    context = fs.init_distributed()
    plain = tiny_model("mixtral" if form == "router" else "llama").to(context.device)
    model: Any = fs.shard_model(plain, mesh=fs.build_mesh())
    fs.prepare_loss(
        model,
        impl="logits" if form == "logits" else "auto",
        router_loss="micro_batch" if form == "router" else None,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"scaler": torch.amp.GradScaler("sim", init_scale=8.0)} if form == "scaler" else {}
    *first, last = windows_of_rank(micro_batches, context.device if form == "device batches" else None)
    for window in first:
        fs.train_step(model, window, optimizer, **options)
    return {
        "step": _waits_of(lambda: fs.train_step(model, last, optimizer, **options)),
        "evaluate": _waits_of(lambda: fs.evaluate(model, last)),
        "touched": torch.sim.touched(),
    }


@pytest.mark.parametrize("form", FORMS)
def test_the_host_waits_once_in_a_step_and_once_in_an_evaluation(form: str) -> None:
    micro_batches = 3
    for rank, found in enumerate(run_simulated(_steps, 2, form, micro_batches, copy_delay=SLOW)):
        assert found["touched"] == [rank]
        # Of batches that are on the device already, what is looked at comes to the host once a window; a
        # scaler asks for itself in step().
        assert len(found["step"]) == (2 if form in ("device batches", "scaler") else 1), found["step"]
        more = micro_batches if form == "device batches" else 0
        assert len(found["evaluate"]) == 1 + more, found["evaluate"]
