"""A chosen block proves that it is recomputed, or the first training forward is an error."""

import concurrent.futures
import copy
import pickle
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.models import full, ragged_batches, tiny_model
from tests.harness.ranks import run_distributed


class Block(nn.Module):
    """A block that transformers knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.down(torch.relu(self.up(x)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.trunk:
            x = block(x)
        return x


def _plain_gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 24).view(3, 8)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _llama_loss(model: Any) -> torch.Tensor:
    return model(**ragged_batches(2)[0], use_cache=False).loss


class Nano(nn.Module):
    """The trunk as nanoGPT, litgpt and nanochat have it."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"h": nn.ModuleList(Block() for _ in range(4)), "ln_f": nn.LayerNorm(8)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.transformer["h"]:
            x = block(x)
        return self.transformer["ln_f"](x)


def test_a_trunk_in_a_namespace_is_recomputed_and_sharded() -> None:
    torch.manual_seed(0)
    model = Nano()
    expected = _plain_gradients(model)
    assert fs.apply_sac(model, 1) == [f"transformer.h.{i}" for i in range(4)]
    calls = []
    model.transformer["h"][0].up.register_forward_pre_hook(lambda *_: calls.append(0))
    assert all(map(torch.equal, _plain_gradients(model), expected))
    assert len(calls) == 2
    with pytest.raises(ValueError, match=r"'transformer' \(ModuleDict\) only holds other modules"):
        fs.apply_sac(model, blocks=["transformer"])
    run_distributed(_check_nano_sharded, 1)


def _check_nano_sharded() -> None:
    torch.manual_seed(0)
    model = Nano()
    expected = _plain_gradients(model)
    mesh = mesh_here()
    with pytest.raises(
        ValueError, match=r"blocks\['transformer.h'\] \(ModuleList\) only holds other modules"
    ):
        fs.shard_model(model, mesh=mesh, blocks={"transformer.h": model.transformer["h"]})
    fs.apply_sac(model, 1)
    fs.shard_model(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    assert all(map(torch.equal, map(full, _plain_gradients(model)), expected))


class Bypassed(Plain):
    """Calls a block's parts and never the block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.trunk:
            x = x + block.down(torch.relu(block.up(x)))
        return x


def _replace_forward(model: nn.Module) -> None:
    for block in model.trunk:
        block.forward = lambda x, block=block: Block.forward(block, x)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_whose_parts_run_outside_of_its_checkpoint_is_an_error(compiled: bool) -> None:
    x = torch.ones(3, 8)
    torch.compiler.reset()
    for make, spoil in ((Bypassed, lambda _: None), (Plain, _replace_forward)):
        model = make()
        fs.apply_sac(model, 0.5)
        spoil(model)
        if compiled and make is Bypassed:
            fs.compile_blocks(model, backend="aot_eager")
        with torch.no_grad():
            model(x)
        model.eval()(x)
        model.train()
        for _ in range(2):
            with pytest.raises(
                fs.UnsupportedModelError, match=r"trunk.0 \(Block\) was chosen by apply_sac, but .*'up'"
            ):
                model(x)
        fs.remove_sac(model)
        model(x)
    llama = tiny_model("llama")
    fs.apply_sac(llama, save="o_proj")
    llama.gradient_checkpointing_disable()
    with pytest.raises(fs.UnsupportedModelError, match=r"model.layers.0 .* chosen by apply_sac.*'self_attn'"):
        _llama_loss(llama)
    fs.apply_sac(llama, save="o_proj")
    _llama_loss(llama).backward()


class Skipping(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            x = pool.submit(self.trunk[1], x).result()
        return x + self.trunk[2].norm(x)  # 0 and 3 are left out


def test_parts_that_run_where_they_may_are_no_error() -> None:
    """Skipped blocks, shared ones, threads, parts called from elsewhere, copies, adapters put in later."""
    model = Skipping()
    model.shared = model.trunk[2].up  # not of one block alone
    fs.apply_sac(model, 1)
    clone = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for one in (model, clone):
        one(torch.ones(3, 8)).sum().backward()
        one.shared(torch.ones(3, 8))
    with pytest.raises(fs.UnsupportedModelError, match=r"trunk.3 "):
        model.trunk[3].up(torch.ones(3, 8))
    llama = tiny_model("llama")
    fs.apply_sac(llama, 1)
    adapted = peft.get_peft_model(
        llama, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp"], task_type="CAUSAL_LM")
    )
    adapted.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, use_cache=False)
    adapted.train()
    calls = []
    llama.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda *_: calls.append(0))
    _llama_loss(adapted).backward()
    assert len(calls) == 2
    albert = nn.Module()
    albert.trunk = nn.ModuleList([Block()] * 3)
    fs.apply_sac(albert, blocks=["trunk.0"])
    Plain.forward(albert, torch.ones(3, 8)).sum().backward()


@pytest.mark.parametrize("whole", [False, True])
def test_blocks_of_other_origin_compile_without_a_graph_break(whole: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Nano()
    expected = _plain_gradients(model)
    fs.apply_sac(model, 1)
    if whole:
        model.compile(backend="aot_eager", fullgraph=True)
    else:
        fs.compile_blocks(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert all(map(torch.equal, _plain_gradients(model), expected))


def test_a_graph_break_inside_of_a_checkpoint_is_no_error() -> None:
    torch.compiler.reset()

    class Breaking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.up(x)
            torch._dynamo.graph_break()
            return self.down(x)

    for whole in (False, True):
        model = Plain()
        model.trunk = nn.ModuleList(Breaking() for _ in range(2))
        expected = _plain_gradients(model)
        fs.apply_sac(model, 1)
        model.compile(backend="aot_eager") if whole else fs.compile_blocks(model, backend="aot_eager")
        found = _plain_gradients(model)
        assert len(found) == len(expected) > 0
        assert all(map(torch.equal, found, expected))
