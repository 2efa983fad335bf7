"""What the simulated device tells (waits of the host, memory), and computes: the CPU's bits."""

import hashlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import fsdp_sft as fs
from tests.harness.models import FLOAT32, full, ragged_batches, tiny_model
from tests.harness.ranks import run_distributed
from tests.simulated.ranks import run_simulated

SLOW = 0.3  # seconds that a copy to the device takes
# What a line makes the host wait for on CUDA, by the kinds that the simulator reports.
WAITS: dict[str, tuple[Callable[[torch.Tensor], Any], list[str]]] = {
    "a product": (lambda x: (x @ x).relu_(), []),
    "views": (lambda x: x.t()[1:].unfold(0, 2, 1).reshape(-1).view(torch.int32), []),
    "a value": (lambda x: x.sum().item(), ["item"]),
    "a condition": (lambda x: bool((x > 0).all()), ["item"]),
    "a copy to the host": (lambda x: x.cpu(), ["copy to host"]),
    "a copy to pinned memory": (
        lambda x: torch.empty(8, 8, pin_memory=True).copy_(x, non_blocking=True),
        [],
    ),
    "a copy to pageable memory": (
        lambda x: torch.empty(8, 8).copy_(x, non_blocking=True),
        ["copy to pageable memory"],
    ),
    "a copy from pinned memory": (lambda x: x.copy_(torch.ones(8, 8).pin_memory(), non_blocking=True), []),
    "a blocking copy": (lambda x: x.copy_(torch.ones(8, 8).pin_memory()), ["copy to device"]),
    "a number": (lambda x: torch.tensor(1.0, device=x.device), ["copy to device"]),
    "a number that is filled in": (lambda x: torch.full((2,), 1.0, device=x.device), []),
    "indices of what is not zero": (lambda x: x.nonzero(), ["aten::nonzero"]),
    "a mask": (lambda x: x[x > 0], ["aten::index"]),
    "indices": (lambda x: x[torch.arange(3, device=x.device)], []),
    "indices of the host": (lambda x: x[torch.arange(3)], ["aten::index"]),
    "a number under a mask": (lambda x: x.index_put_((x > 0,), x.new_ones(())), []),
    "the device": (lambda x: torch.accelerator.synchronize(), ["device"]),
    "a stream": (lambda x: torch.accelerator.current_stream().synchronize(), ["stream"]),
    "an event": (lambda x: torch.accelerator.current_stream().record_event().synchronize(), ["event"]),
    "a stream that waits for another": (
        lambda x: torch.sim.Stream().wait_stream(torch.sim.current_stream()),
        [],
    ),
    "whether they are equal": (lambda x: torch.equal(x, x), ["aten::equal"]),
}


def _waits() -> dict[str, list[str]]:
    found = {}
    for name, (line, _) in WAITS.items():
        x = torch.ones(8, 8, device="sim")
        with torch.sim.record_syncs() as syncs:
            line(x)
        found[name] = [sync.kind for sync in syncs]
    return found


def test_the_host_waits_where_it_would_on_cuda() -> None:
    assert run_simulated(_waits, 1) == [{name: kinds for name, (_, kinds) in WAITS.items()}]


def _ahead() -> tuple[float, bool]:
    """Seconds that the host took to queue a chain of operators behind a slow copy; whether it is computed."""
    host, device = torch.arange(64.0).view(8, 8).pin_memory(), torch.zeros(8, 8, device="sim")

    def chain() -> torch.Tensor:
        device.copy_(host, non_blocking=True)
        x = nn.functional.layer_norm(device @ device.t(), (8,)) * 2
        return torch.cat([*x.split([3, 5]), x]).softmax(-1).sum(0)

    first = chain().cpu()  # with such arguments for the first time
    start = time.monotonic()
    second = chain()
    seconds = time.monotonic() - start
    return seconds, torch.equal(second.cpu(), first)


def test_the_host_runs_ahead_of_operators_it_has_met_before() -> None:
    ((seconds, equal),) = run_simulated(_ahead, 1, copy_delay=SLOW)
    assert equal
    assert seconds < SLOW / 2


def _where_it_waits() -> tuple[str, str | None, str]:
    parameter = torch.ones(4, device="sim", requires_grad=True)
    parameter.register_hook(lambda gradient: print(gradient.sum().item()))
    with torch.sim.record_syncs() as syncs:
        (parameter * 2).sum().backward()
    (sync,) = syncs
    frame = sync.stack[-1]
    return Path(frame.filename).name, frame.line, sync.thread


def test_a_wait_comes_with_the_line_that_caused_it() -> None:
    ((name, line, thread),) = run_simulated(_where_it_waits, 1)
    assert name == Path(__file__).name
    assert "gradient.sum().item()" in str(line)
    assert thread != "MainThread"  # of the backward, where a trace of the main thread shows nothing


def _memory() -> dict[str, int]:
    device = torch.device("sim", 0)
    before = torch.accelerator.memory_allocated(device)
    kept = torch.empty(1000, device=device)  # 4000 bytes, in blocks of 512
    with_kept = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    big = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    del big
    small = torch.empty(1, device=device)
    found = {
        "kept": with_kept - before,
        "peak": torch.accelerator.max_memory_allocated(device) - before,
        "now": torch.sim.memory_allocated(device) - before,
        "requested": torch.accelerator.memory_stats(device)["requested_bytes.all.current"],
        "on the other": torch.accelerator.memory_allocated(1),
    }
    reserved = torch.accelerator.memory_reserved(device)
    free, total = torch.accelerator.get_memory_info(device)
    assert reserved == total - free >= found["peak"]
    del kept, small
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(device) == before == 0
    return found


def test_memory_is_counted_as_the_caching_allocator_of_cuda_counts_it() -> None:
    assert run_simulated(_memory, 1) == [
        {
            "kept": 4096,
            "peak": 4096 + (1 << 20),
            "now": 4096 + 512,
            "requested": 4004,
            "on the other": 0,
        }
    ]


# --- how collectives fail: as NCCL's do, which hang until a watchdog ends the process -----------------------

SECONDS = 2.0


def _differ(how: str) -> tuple[str, float, float]:
    """What a failing collective raises, how long a call takes, and how long it is waited for."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"  # failures raise; by default they end the process
    group = dist.new_group(backend="cpu:gloo,sim:simccl", timeout=timedelta(seconds=SECONDS))
    dist.barrier()
    start = time.monotonic()
    dist.all_reduce(torch.ones(1, device="sim"), group=group, async_op=True).wait()
    queued = time.monotonic() - start
    message = ""
    try:
        if how == "away" and dist.get_rank() == 1:
            time.sleep(1.5 * SECONDS)
        else:
            tensor = torch.ones(4 + dist.get_rank(), device="sim")
            dist.all_reduce(tensor, group=group)
            tensor.tolist()
    except dist.DistBackendError as error:
        message = str(error)
    return message, queued, time.monotonic() - start


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("away", "not every rank has called it"),
        ("sizes", "rank 0 calls all_reduce of 4 Float, reduction 0; rank 1 calls all_reduce of 5 Float"),
    ],
)
def test_ranks_that_differ_hang_until_the_time_out(how: str, says: str) -> None:
    (message, queued, waited), _ = run_simulated(_differ, 2, how, fresh=True)
    assert "Watchdog caught collective operation timeout" in message
    assert says in message
    assert queued < SECONDS / 2, "the host must not wait for a collective"
    assert waited > 0.9 * SECONDS


# --- results are the CPU's, bit by bit ---------------------------------------------------------------------

RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    # Not chunked: the device has products of 16 bits into 32, which the loss takes where it finds them.
    "bfloat16": (
        "llama",
        {},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32), "loss_impl": "logits"},
    ),
    "dropout": ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}, {}),
}


def _digest(tensors: list[torch.Tensor]) -> str:
    bits = [tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return hashlib.sha256(b"".join(bits)).hexdigest()


def _train(
    family: str,
    overrides: dict[str, Any],
    mp_policy: MixedPrecisionPolicy | None = None,
    loss_impl: Any = "auto",
) -> list[Any]:
    """Losses and gradient norms of two steps, and a digest of what they leave."""
    context = fs.init_distributed()
    model = tiny_model(family, **overrides).to(context.device)
    fs.shard_model(model, mesh=fs.build_mesh(), mp_policy=mp_policy or FLOAT32)
    fs.prepare_loss(model, impl=loss_impl)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    found: list[Any] = []
    for seed in range(2):
        step = fs.train_step(
            model, ragged_batches(4, seed=seed)[context.rank :: context.world_size], optimizer
        )
        found += [step.loss, step.grad_norm]
    return [*found, _digest([full(p).detach() for p in model.parameters()])]


@pytest.mark.parametrize("name", RUNS)
def test_training_is_the_cpus_bit_by_bit(name: str) -> None:
    family, overrides, options = RUNS[name]
    expected = run_distributed(_train, 2, family, overrides, **options)
    assert run_simulated(_train, 2, family, overrides, **options) == expected


def _convolved(x: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for own in (
        nn.Conv1d(16, 4, 3, padding=2, stride=2, groups=2),
        nn.Conv1d(16, 16, 3, bias=False),
        nn.ConvTranspose1d(16, 4, 3, groups=2),
    ):
        module, values = own.to(x.device), x.view(2, 16, 16).detach().requires_grad_()
        module(values).square().sum().backward()
        found += [p.grad for p in (values, *module.parameters()) if p.grad is not None]
    return found


OPERATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "product": lambda x: x @ x.t(),
    "bfloat16 product": lambda x: x.bfloat16() @ x.bfloat16().t(),
    "reductions": lambda x: [x.sum(0), x.mean(), x.amax(1), x.std(1), x.norm(), x.logsumexp(0)],
    "softmax": lambda x: x.log_softmax(-1),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        *(x.view(1, 4, 8, 16),) * 3, is_causal=True
    ),
    "norm": lambda x: torch.nn.functional.layer_norm(x, (16,)),
    "sorted": lambda x: [*x.sort(1), *x.topk(3)],
    "chosen": lambda x: [x[x > 0], x.nonzero(), x.where(x > 0, 0), x.gather(1, x.argsort(1))],
    "lists": lambda x: [*torch._foreach_mul([x, x[0]], 3.0), torch._foreach_norm([x])[0]],
    "complex numbers": lambda x: torch.view_as_real(torch.view_as_complex(x.view(32, 8, 2)) * 1j),
    "strided results": lambda x: (x.t() * 2, x.t().clone(), x[:, ::2].exp()),
    "nothing": lambda x: [x[:0].sum(), x[:0] * 2, x[:0] @ x.t()],
    "made there": lambda x: [
        torch.arange(7, device=x.device),
        torch.eye(3, device=x.device),
        x.new_full((2,), 3),
    ],
    "random": lambda x: [torch.rand_like(x), torch.nn.functional.dropout(x, 0.5), x.bernoulli(0.5)],
    "convolutions": _convolved,
    "written to": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
}


def _results(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, operator in OPERATORS.items():
        torch.manual_seed(3)
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).to(device)
        made = []
        for _ in range(3):  # what has been met before may be done otherwise
            results = operator(x)
            made += [results] if isinstance(results, torch.Tensor) else results
        assert all(result.device.type == device for result in made), name
        found[name] = [(t.dtype, t.shape, t.stride(), _digest([t])) for t in made]
    return found


def test_operators_give_the_cpus_bits_shapes_and_strides() -> None:
    (actual,) = run_simulated(_results, 1, "sim")
    expected = _results("cpu")
    assert {name: found for name, found in actual.items() if found != expected[name]} == {}


def _recomputed_in_a_graph() -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient through dropout in a compiled graph, kept and recomputed."""

    def block(values: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(values.sin(), 0.5).cos()

    def recomputing(values: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, values, use_reentrant=False)

    found = []
    for function in (block, recomputing):
        values = torch.arange(64.0, device="sim", requires_grad=True)
        torch.manual_seed(3)
        torch.compile(function, backend="aot_eager")(values).sum().backward()
        found.append(values.grad.cpu())
    return found[0], found[1]


def test_a_graph_that_recomputes_draws_the_same_numbers() -> None:
    ((expected, found),) = run_simulated(_recomputed_in_a_graph, 1)
    assert 10 < int((expected == 0).sum()) < 54
    assert torch.equal(found, expected)
