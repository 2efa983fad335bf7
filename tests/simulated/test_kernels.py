"""What only CUDA has, made of the CPU's operators; and what the host need not wait for."""

import itertools
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from fsdp_sft.attention.varlen import attention
from tests.simulated.ranks import run_simulated

SLOW = 0.3  # seconds that a copy to the device takes


def _wide_products() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(what the device makes of products of 16 bits into 32, what is expected)"""
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        a, b, c = torch.randn(5, 8).to(dtype), torch.randn(8, 6).to(dtype), torch.randn(5, 6)
        x, y, z = (tensor.to("sim") for tensor in (a, b, c))
        product, wide = a.float() @ b.float(), {"out_dtype": torch.float32}
        found.append((torch.mm(x, y, **wide), product))
        found.append((torch.bmm(x[None], y[None], **wide), product[None]))
        found.append((torch.addmm(z, x, y, **wide), torch.addmm(c, a.float(), b.float())))
    with pytest.raises(RuntimeError, match="out_dtype must be"):
        torch.mm(x, y, out_dtype=torch.bfloat16)
    return [(one.cpu(), expected) for one, expected in found]


def test_products_of_16_bits_into_32() -> None:
    (found,) = run_simulated(_wide_products, 1)
    for one, expected in found:
        torch.testing.assert_close(one, expected, rtol=1e-6, atol=1e-6)


def _counts() -> tuple[list[int], torch.dtype, dict[str, int]]:
    values = torch.tensor([0, 3, 3, 1], dtype=torch.int32, device="sim")
    with torch.sim.counted() as counts:
        found = torch.histc(values, bins=4, min=0, max=3)
    return found.tolist(), found.dtype, dict(counts.syncs)


def test_histograms_of_integers() -> None:
    assert run_simulated(_counts, 1) == [([1, 1, 0, 2], torch.int32, {})]


def _plain_attention(
    query: Any, key: Any, value: Any, bounds: list[int], window: tuple[int, int]
) -> torch.Tensor:
    """Row by row, in float64; tensors are ``(tokens, heads, head size)``."""
    outs = []
    for start, end in itertools.pairwise(bounds):
        q, k, v = (x[start:end].double().transpose(0, 1) for x in (query, key, value))
        groups = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        distance = torch.arange(end - start) - torch.arange(end - start)[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen &= (distance >= -window[0]) if window[0] >= 0 else seen
        seen &= (distance <= window[1]) if window[1] >= 0 else seen
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1))
    return torch.cat(outs)


def _errors_of_attention(window: tuple[int, int]) -> list[float]:
    """Largest errors of the output and of three gradients."""
    bounds = [0, 5, 6, 14]
    drawn = [torch.randn(14, heads, 16).bfloat16() for heads in (4, 2, 2)]
    weight = torch.randn(14, 4, 16)
    found: list[list[torch.Tensor]] = []
    for device in ("cpu", "sim"):
        tensors = [t.detach().to(device).requires_grad_() for t in drawn]
        if device == "cpu":
            out = _plain_attention(*tensors, bounds, window)
        else:
            rows: Any = torch.tensor(bounds, dtype=torch.int32, device=device)
            out = varlen_attn(*tensors, rows, rows, 8, 8, window_size=window, enable_gqa=True)
        (out.float() * weight.to(device)).sum().backward()
        found.append([out.detach().cpu().double(), *(t.grad.cpu().double() for t in tensors)])
    return [float((one - other).abs().max()) for one, other in zip(*found, strict=True)]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 2)])
def test_attention_of_rows_of_unequal_lengths(window: tuple[int, int]) -> None:
    (errors,) = run_simulated(_errors_of_attention, 1, window)
    assert max(errors) < 0.05, errors  # bfloat16 of values around 1 to 4


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


def _ahead() -> tuple[float, bool, list[str]]:
    """Seconds that the host took to queue a chain of operators behind a slow copy."""
    host, device = torch.arange(64.0).view(8, 8).pin_memory(), torch.zeros(8, 8, device="sim")

    def chain() -> torch.Tensor:
        device.copy_(host, non_blocking=True)
        x = F.layer_norm(device @ device.t(), (8,)) * 2
        return torch.cat([*x.split([3, 5]), x]).softmax(-1).sum(0)

    first = chain().cpu()  # with such arguments for the first time
    start = time.monotonic()
    with torch.sim.counted() as counts:
        second = chain()
    seconds = time.monotonic() - start
    return seconds, torch.equal(second.cpu(), first), sorted(counts.own_waits)


def test_the_host_runs_ahead_of_operators_it_has_met_before() -> None:
    ((seconds, equal, waited),) = run_simulated(_ahead, 1, copy_delay=SLOW)
    assert (equal, waited) == (True, [])
    assert seconds < SLOW / 2


def _out_of_range() -> str:
    table, rows = torch.zeros(4, 2, device="sim"), torch.tensor([1, 3], device="sim")
    F.embedding(rows, table)
    F.embedding(rows + 7, table)  # queued: the host learns of it where it next waits
    with pytest.raises(IndexError) as error:
        torch.accelerator.synchronize()
    return str(error.value)


def test_an_error_on_the_device_is_met_where_the_host_next_waits() -> None:
    assert "index out of range" in run_simulated(_out_of_range, 1)[0]
