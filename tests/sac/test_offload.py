"""Activations that wait in host memory: the same gradients, and less of the device."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft.sac.offload import Offload
from tests.harness.device import mesh_here
from tests.harness.models import full, ragged_batches, tiny_model
from tests.simulated.ranks import run_simulated

SLOW = 0.02
TOKENS, HIDDEN, BLOCKS = 1024, 32, 4
INPUT = TOKENS * HIDDEN * 4  # bytes of a block's input


def _model(kind: str = "qwen3", **overrides: Any) -> Any:
    shape = {"hidden_size": HIDDEN, "num_hidden_layers": BLOCKS, "intermediate_size": 48, **overrides}
    return tiny_model(kind, **shape)


def _batch(device: str, tokens: int = TOKENS) -> dict[str, Any]:
    ids = torch.arange(tokens).mul(7).remainder(90).view(1, -1).to(device)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _gradients(form: str, *, offload: bool, ragged: int) -> tuple[dict[str, torch.Tensor], int, int]:
    """Of the last step: gradients, what its forward left on the device, and the peak, in bytes."""
    model = _model().to("sim").train()
    fs.apply_sac(model, "1/2" if form == "half" else 1, offload=offload)
    stats = torch.accelerator.memory_stats
    for step in range(2):
        model.zero_grad()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = stats()["requested_bytes.all.current"]
        hidden = model.model(**_batch("sim", TOKENS - ragged * step)).last_hidden_state
        torch.accelerator.synchronize()
        left = stats()["requested_bytes.all.current"] - before
        hidden.square().sum().backward()
        torch.accelerator.synchronize()
    peak = stats()["requested_bytes.all.peak"] - before
    return {name: p.grad.cpu() for name, p in model.model.named_parameters()}, left, peak


def _both(forms: list[str], ragged: int) -> list[tuple[str, bool, float, int]]:
    """(form, equal gradients or not, blocks' inputs that are not on the device, bytes less at the peak)"""
    found = []
    for form in forms:
        plain, left, peak = _gradients(form, offload=False, ragged=ragged)
        offloaded, less_left, less_peak = _gradients(form, offload=True, ragged=ragged)
        equal = all(torch.equal(plain[name], offloaded[name]) for name in plain)
        moved = any(gradient.abs().sum() > 0 for gradient in plain.values())
        found.append((form, equal and moved, (left - less_left) / INPUT, peak - less_peak))
    return found


def test_gradients_are_equal_and_the_device_has_less() -> None:
    (found,) = run_simulated(_both, 1, ["whole", "half"], 3, copy_delay=SLOW)
    assert [form for form, equal, _, _ in found if not equal] == []
    for form, _, left, peak in found:
        # The newest visit stays until the next begins, and is the first that the backward needs.
        assert round(left, 1) == {"whole": BLOCKS - 1, "half": BLOCKS / 2 - 1}[form]
        assert peak > (BLOCKS - 3) * INPUT if form != "half" else peak >= 0


def _orders() -> dict[str, Any]:
    model = _model().to("sim").train()
    batches = [_batch("sim", tokens) for tokens in (TOKENS, TOKENS // 2 + 3)]
    alone = []
    for batch in batches:
        model(**batch).loss.backward()
        alone.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    fs.apply_sac(model, 1, offload=True)

    def are(expected: list[torch.Tensor]) -> bool:
        equal = all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
        model.zero_grad()
        return equal

    found: dict[str, Any] = {}
    one, two = (model(**batch).loss for batch in batches)
    one.backward()
    found["the older of two forwards"] = are(alone[0])
    two.backward()
    found["the newer of two forwards"] = are(alone[1])
    loss = model(**batches[0]).loss
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    found["twice"] = are(alone[0])
    del one, two, loss
    own = _offload_of(model)
    for step in range(4):
        dropped = model(**batches[step % 2]).loss
        del dropped
        loss = model(**batches[1]).loss
        loss.backward()
        del loss
        found[f"after a graph that was dropped {step}"] = are(alone[1])
    model.eval()
    with torch.no_grad():
        latest = own.latest
        model(**batches[0])
    found["an evaluation leaves nothing"] = own.latest is latest
    twin = copy.deepcopy(model).train()
    twin(**batches[0]).loss.backward()
    found["a copy has copies of its own"] = _offload_of(twin) is not own and own.latest is latest
    found["a copy's gradients"] = all(
        torch.equal(p.grad, e) for p, e in zip(twin.parameters(), alone[0], strict=True)
    )
    return found


def _offload_of(model: Any) -> Offload:
    own = model.model.layers[0].__dict__
    # Where transformers' layer recomputes its forward, it holds the function; otherwise the block does.
    recompute: Any = own.get("_gradient_checkpointing_func") or own["forward"].args[1]
    found = recompute.args[0]
    assert isinstance(found, Offload)
    return found


def test_any_order_of_forwards_and_backwards() -> None:
    (found,) = run_simulated(_orders, 1, copy_delay=0.003)
    assert [name for name, holds in found.items() if not holds] == []


class _ByName(nn.Module):
    """Blocks that take their hidden states by another name than the first argument."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, scale: float, *, hidden: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
            return hidden + scale * self.down(torch.relu(self.up(hidden))) + first

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, HIDDEN)
        self.layers = nn.ModuleList(self.Block() for _ in range(BLOCKS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = hidden = self.embed(ids)
        for block in self.layers:
            hidden = block(0.5, hidden=hidden, first=first)
        return hidden


def _by_name(frozen: bool) -> tuple[bool, float]:
    torch.manual_seed(0)
    model = _ByName().to("sim")
    model.embed.requires_grad_(not frozen)
    ids = torch.arange(TOKENS, device="sim").remainder(100)
    gradients, left = [], []
    for offload in (False, True):
        fs.apply_sac(model, blocks=[f"layers.{i}" for i in range(BLOCKS)], offload=offload)
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_stats()["requested_bytes.all.current"]
        loss = model(ids).square().sum()
        torch.accelerator.synchronize()
        left.append(torch.accelerator.memory_stats()["requested_bytes.all.current"] - before)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)), (left[0] - left[1]) / INPUT


@pytest.mark.parametrize("frozen", [False, True])
def test_hidden_states_are_found_by_whatever_name(frozen: bool) -> None:
    ((equal, less),) = run_simulated(_by_name, 1, frozen)
    assert equal
    assert less >= BLOCKS - 2


class _Changing(nn.Module):
    """Blocks, or a model around them, that change in place what a checkpoint keeps."""

    class Block(nn.Module):
        def __init__(self, form: str) -> None:
            super().__init__()
            self.form = form
            self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            x = x.mul_(0.5) if self.form == "at its begin" else x
            inner = self.up(torch.tanh(x + bias))
            out = self.down(torch.relu(inner))
            return x.add_(out) if self.form == "at its end" else x + out

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.embed, self.bias = form, nn.Embedding(100, HIDDEN), nn.Parameter(torch.ones(HIDDEN))
        self.layers = nn.ModuleList(self.Block(form) for _ in range(BLOCKS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        bias = self.bias.expand(TOKENS, HIDDEN).contiguous()  # one for all blocks, with a gradient
        for block in self.layers:
            before, hidden = hidden, block(hidden, bias)
            if self.form == "by the model":
                before.add_(1)
        return hidden


def _changed(form: str) -> list[Any]:
    found: list[Any] = []
    ids = torch.arange(TOKENS, device="sim").remainder(100)
    for offload in (False, True):
        model = _Changing(form).to("sim")
        blocks = [f"layers.{i}" for i in range(BLOCKS)]
        fs.apply_sac(model, blocks=blocks, offload=offload)
        try:
            torch.accelerator.synchronize()
            before = torch.accelerator.memory_stats()["requested_bytes.all.current"]
            loss = model(ids).square().sum()
            torch.accelerator.synchronize()
            left = torch.accelerator.memory_stats()["requested_bytes.all.current"] - before
            loss.backward()
            found.append((left, [p.grad.cpu() for p in model.parameters()]))
        except RuntimeError as error:
            found.append(str(error))
    return found


def _changes() -> dict[str, str]:
    found = {}
    for form in ("not at all", "at its begin", "at its end", "by the model"):
        plain, offloaded = _changed(form)
        if isinstance(plain, str) or isinstance(offloaded, str):
            told = [
                isinstance(one, str) and ("inplace" in one or "mutated" in one) for one in (plain, offloaded)
            ]
            found[form] = "both are told" if all(told) else f"{plain}, {offloaded}"
        else:
            equal = all(torch.equal(a, b) for a, b in zip(plain[1], offloaded[1], strict=True))
            gone = (plain[0] - offloaded[0]) / INPUT
            # The bias that blocks share is on the device once, as it was.
            found[form] = "equal" if equal and gone > BLOCKS - 1.3 else f"{equal}, {gone}"
    return found


def test_changes_in_place_are_told_as_without_it() -> None:
    (found,) = run_simulated(_changes, 1, copy_delay=0.005)
    assert found.pop("not at all") == "equal"
    assert set(found.values()) == {"both are told"}, found


def _without_gradients() -> int:
    model = _model().to("sim").train()
    fs.apply_sac(model, 1, offload=True)
    with torch.inference_mode():
        model(**_batch("sim"))
    with torch.no_grad():
        model(**_batch("sim"))
    return len(_offload_of(model).latest)


def test_without_gradients_nothing_leaves() -> None:
    assert run_simulated(_without_gradients, 1) == [0]


def test_compiled_blocks_are_refused_in_either_order() -> None:
    model = _model()
    fs.apply_sac(model, 1, offload=True)
    with pytest.raises(ValueError, match=r"'model.layers.0' is compiled, and offload=True"):
        fs.compile_blocks(model, backend="eager")
    fs.remove_sac(model)
    fs.compile_blocks(model, backend="eager")
    with pytest.raises(ValueError, match=r"'model.layers.0' is compiled, and offload=True"):
        fs.apply_sac(model, 1, offload=True)
    with pytest.raises(ValueError, match="leave out save="):
        fs.apply_sac(_model(), save="o_proj", offload=True)


def test_on_a_cpu_nothing_moves() -> None:
    model, plain = _model().train(), _model().train()
    fs.apply_sac(model, 1, offload=True)
    model = pickle.loads(pickle.dumps(model))
    for one in (model, plain):
        one(**_batch("cpu")).loss.backward()
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert _offload_of(model).latest == []


def _sharded() -> bool:
    steps = []
    for offload in (False, True):
        model = _model(dtype=torch.bfloat16)
        fs.apply_sac(model, "1/2", offload=offload)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fs.shard_model(model, mesh=mesh_here(), mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = ragged_batches(4)[dist.get_rank() :: 2]
        results = [fs.train_step(model, batches, optimizer) for _ in range(2)]
        assert fs.evaluate(model, batches).loss < results[0].loss
        steps.append([full(p) for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


def test_sharded_in_bfloat16() -> None:
    assert run_simulated(_sharded, 2, copy_delay=SLOW) == [True] * 2
