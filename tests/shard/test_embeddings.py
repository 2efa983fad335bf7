"""Untied embedding and head in groups of their own: the numbers of the root's group, gathered less often."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fsdp_sft as fs
from fsdp_sft.shard import units
from fsdp_sft.shard.units import own_vocabulary
from tests.harness.losses import gradients_of
from tests.harness.models import FLOAT32, largest_error, tiny_model, windows_of_rank
from tests.harness.ranks import device_here, mesh_here, on_ranks


def _sharded(family: str, *, own: bool = True, **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if not own:
            patch.setattr(units, "own_vocabulary", lambda *_: (None, None))
        model = tiny_model(family)
        fs.apply_sac(model, "1/3")
        return fs.shard_model(model, mesh=mesh_here(), **options)


def _trained(model: Any, grad_sync: Any) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers: list[Any] = []
    windows = windows_of_rank(2, device_here())
    for window in windows:
        result = fs.train_step(model, window, optimizer, grad_sync=grad_sync)
        numbers += [result.loss, result.grad_norm]
    numbers.append(fs.evaluate(model, windows[0]).loss)
    ids = torch.tensor([[3, 4, 5]], device=device_here())
    numbers.append(model.eval().generate(ids, max_new_tokens=4, do_sample=False).tolist())
    return numbers


@on_ranks(2)
def test_numbers_are_those_of_the_roots_group() -> None:
    for family, grad_sync, options in (
        ("llama", "each", {}),
        ("llama", "last", {}),
        ("mixtral", "each", {"reshard_after_forward": False}),
    ):
        models = [_sharded(family, own=own, **options) for own in (True, False)]
        groups = [sum(isinstance(m, FSDPModule) for m in model.modules()) for model in models]
        assert groups[0] == groups[1] + 2
        assert fs.prepare_loss(models[0]) == fs.prepare_loss(models[1])
        first, second = (_trained(model, grad_sync) for model in models)
        assert first == second, (family, options)
    for family in ("qwen2-tied", "gemma3"):
        named = _sharded(family).named_modules()
        assert not any(isinstance(m, FSDPModule) for n, m in named if "embed" in n or "head" in n)


def _gathers(function: Any) -> int:
    """All-gathers that FSDP2 makes in a call."""
    gather = _fsdp_param_group.foreach_all_gather
    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", wraps=gather) as counted:
        function()
    return counted.call_count


@on_ranks(2)
def test_they_are_gathered_less_often() -> None:
    model = _sharded("llama")
    blocks = len(fs.find_blocks(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = windows_of_rank(1, device_here())[0][:1]
    fs.train_step(model, window, optimizer)  # what is checked at first has been
    # Forward: the root, the embedding, the blocks and the head. Backward: the blocks.
    assert _gathers(lambda: fs.train_step(model, window, optimizer)) == 3 + 2 * blocks
    ids = torch.tensor([[3, 4, 5]], device=device_here())
    model.eval()

    def generate(tokens: int) -> int:
        options = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
        return _gathers(lambda: model.generate(ids, **options))

    assert generate(2) == 3 + 2 * blocks
    assert generate(4) == 4 * blocks, "embedding and head stay gathered"


@on_ranks(2)
def test_reshard_frees_them() -> None:
    """As in the root's group: a forward without a backward leaves them gathered, and reshard() frees them."""
    model, batch = _sharded("llama"), windows_of_rank(1, device_here())[0][0]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            model(**batch)
        assert not isinstance(model.lm_head.weight, DTensor)
        model.reshard()
        assert all(isinstance(p, DTensor) for p in model.parameters())


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _head_again(model: Any, ids: torch.Tensor) -> torch.Tensor:
    output = model(input_ids=ids, output_hidden_states=True)
    return _loss(output.logits, ids) + _loss(model.lm_head(output.hidden_states[-1] / 2), ids)


def _embedded_after(model: Any, ids: torch.Tensor) -> torch.Tensor:
    output = model(input_ids=ids, output_hidden_states=True)
    apart = model.get_input_embeddings()(ids) - output.hidden_states[-1]
    return _loss(output.logits, ids) + apart.square().mean()


@on_ranks(2)
def test_loops_that_call_parts_of_the_model() -> None:
    """By themselves, beside one process."""
    rank = dist.get_rank()
    for loop in (_head_again, _embedded_after):
        model, plain = tiny_model("llama"), tiny_model("llama").to(device_here())
        fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32)
        for step in range(2):
            ids = torch.randint(3, 90, (4, 9), generator=torch.Generator().manual_seed(step)).to(
                device_here()
            )
            with torch.no_grad():
                model(input_ids=ids[:1])
            model.reshard()
            loop(model, ids[2 * rank : 2 * rank + 2]).backward()
            for half in ids.split(2):
                (loop(plain, half) / 2).backward()
            assert largest_error(gradients_of(model), gradients_of(plain)) < 1e-5, (loop.__name__, step)


class _UsesWeight(nn.Module):
    """A model of another library, which multiplies by its head's weight and never calls the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_what_may_be_used_without_a_call_stays_with_the_root() -> None:
    model = tiny_model("llama")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for arguments, expected in (
        ((_UsesWeight(), []), (None, None)),
        ((tiny_model("qwen2-tied"), []), (None, None)),
        ((model, []), (embedding, head)),
        ((model, [embedding]), (None, head)),
        ((model, [], {id(head.weight)}), (embedding, None)),
    ):
        assert own_vocabulary(*arguments) == expected
    model.again = embedding
    assert own_vocabulary(model, []) == (None, head)
