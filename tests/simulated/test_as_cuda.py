"""The library's branches on the name "cuda"."""

import torch

from fsdp_sft.attention.varlen import attention
from tests.simulated.as_cuda import answering_for_cuda
from tests.simulated.ranks import run_simulated


def _attention(device: str) -> list[torch.Tensor]:
    """Of packed rows, a window and grouped heads; output and gradients."""
    lengths = (3, 9, 1, 11)
    width = sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)

    def mask(q_length: int, q_offset: int) -> torch.Tensor:
        query = torch.arange(q_offset, q_offset + q_length, device=device)[:, None]
        key = torch.arange(width, device=device)
        return ((row[query] == row[key]) & (key <= query) & (key > query - 5))[None, None]

    found = attention.find_rows(mask, width, 0)
    assert found is not None
    assert found.bounds == tuple(bounds.tolist())
    generator = torch.Generator().manual_seed(2)
    tensors = [
        torch.randn(1, heads, width, 16, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    ]
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    out, _ = attention.attend_by_row(module, *tensors, found)
    (out.float() * torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)).sum().backward()
    return [out.detach().cpu(), *(t.grad.cpu() for t in tensors if t.grad is not None)]


def _attention_as_on_cuda() -> tuple[list[torch.Tensor], int]:
    calls = []
    kernel = attention.varlen_attn
    attention.varlen_attn = lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs)
    with answering_for_cuda(attention):
        return _attention("sim"), len(calls)


def test_attention_of_rows_takes_the_varlen_kernel_and_gives_the_same() -> None:
    ((actual, calls),) = run_simulated(_attention_as_on_cuda, 1)
    assert calls == 1
    for one, other in zip(actual, _attention("cpu"), strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)
