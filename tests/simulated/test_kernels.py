"""What only CUDA has, made of the CPU's operators; and what the host need not wait for."""

import time
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from fsdp_sft.attention.varlen import attention
from tests.simulated.ranks import run_simulated

SLOW = 0.3  # seconds that a copy to the device takes


def _rows_of_a_pack(device: str) -> list[torch.Tensor]:
    """Attention of packed rows, with a window and grouped heads: output and gradients."""
    lengths = (3, 9, 1, 11)
    width, row = sum(lengths), torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).to(device)

    def mask(q_length: int, q_offset: int) -> torch.Tensor:
        query = torch.arange(q_offset, q_offset + q_length, device=device)[:, None]
        key = torch.arange(width, device=device)
        return ((row[query] == row[key]) & (key <= query) & (key > query - 5))[None, None]

    found = attention.find_rows(mask, width, 0)
    generator = torch.Generator().manual_seed(2)
    tensors = [
        torch.randn(1, heads, width, 16, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    ]
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    out, _ = attention.attend_by_row(module, *tensors, found)
    (out.float() * torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)).sum().backward()
    return [out.detach().float().cpu(), *(t.grad.float().cpu() for t in tensors)]


def _with_flash() -> tuple[list[torch.Tensor], int]:
    """As where torch has varlen flash attention; and how often that was called."""
    attention._has_flash = lambda device: True  # type: ignore[assignment]
    with mock.patch.object(attention, "varlen_attn", side_effect=varlen_attn) as kernel:
        return _rows_of_a_pack("sim"), kernel.call_count


def test_packs_take_the_kernel_of_rows_where_there_is_one() -> None:
    ((actual, calls),) = run_simulated(_with_flash, 1)
    assert calls == 1
    for one, other in zip(actual, _rows_of_a_pack("cpu"), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def _ahead() -> tuple[float, bool]:
    """Seconds that the host took to queue a chain of operators behind a slow copy; whether it is computed."""
    host, device = torch.arange(64.0).view(8, 8).pin_memory(), torch.zeros(8, 8, device="sim")

    def chain() -> torch.Tensor:
        device.copy_(host, non_blocking=True)
        x = F.layer_norm(device @ device.t(), (8,)) * 2
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
