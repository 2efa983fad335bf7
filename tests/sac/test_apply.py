"""Selective activation checkpointing: the ratio rule, and gradients that do not change by a bit."""

import copy
import math
import pickle
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fsdp_sft as fs
from tests.harness.losses import gradients_of
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.packs import assert_same


def _taken(length: int, numerator: int, denominator: int) -> list[int]:
    """As a line is drawn on a grid: steps of k/n from 1/2 on, and a block at each whole number reached."""
    taken, position = [], denominator  # in units of 1 / (2 n)
    for index in range(length):
        position += 2 * numerator
        if position >= 2 * denominator:
            taken.append(index)
            position -= 2 * denominator
    return taken


def test_ratio_rule_is_exact_for_every_fraction_of_the_blocks() -> None:
    for length in range(1, 129):
        for k in range(length + 1):
            expected = _taken(length, k, length)
            for ratio in (f"{k}/{length}", Fraction(k, length), k / length):
                assert fs.select_block_indices(length, ratio) == expected
            assert fs.select_block_indices(length, ratio, placement="prefix") == list(range(k))
    assert len(fs.select_block_indices(45, 0.7)) == 32
    assert fs.select_block_indices(0, 1) == []


@pytest.mark.parametrize(
    ("ratio", "message"),
    [
        ("0.1e9/1", "a text such as '1/3'"),
        ("½", "a text such as '1/3'"),
        ("1/3; import os", "a text such as '1/3'"),
        ("2**-1", "a text such as '1/3'"),
        ("nan", "a text such as '1/3'"),
        ("1/3\n1/3", "a text such as '1/3'"),
        (7, r"ratio must be in \[0, 1\], got 7; 0 checkpoints no block, and 1 every block"),
        (-0.25, r"got -0.25; 0 checkpoints no block"),
        (math.nan, "must be a number in"),
        (math.inf, "must be a number in"),
        ("1/0", "a text such as '1/3'"),
        ("4/3", "1 every block"),
        ("", "a text such as '1/3'"),
        ("9" * 10_000, "a text such as '1/3'"),
        ("-1/3", "1 every block"),
        ("1/3/3", "a text such as '1/3'"),
        *((ratio, "a number in") for ratio in (True, None, [1], Decimal("0.5"), 1j)),
    ],
)
def test_bad_ratios_are_refused_with_the_way_out(ratio: Any, message: str) -> None:
    with pytest.raises(TypeError if message == "a number in" else ValueError, match=message):
        fs.select_block_indices(8, ratio)


def _own_loss(model: Any) -> torch.Tensor:
    # A cache lays keys and values out differently, which moves the last bit.
    return model(**ragged_batches(2)[0], use_cache=False).loss


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    _own_loss(model).backward()
    return gradients_of(model)


def _forward_calls(model: nn.Module, block: nn.Module) -> int:
    """How often the block's inner part runs in a forward and a backward."""
    calls: list[nn.Module] = []
    inner = next(module for module in block.modules() if isinstance(module, nn.Linear))
    handle = inner.register_forward_pre_hook(lambda module, _: calls.append(module))
    _own_loss(model).backward()
    handle.remove()
    model.zero_grad()
    return len(calls)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_exactly_the_chosen_blocks_run_twice_in_training_until_removed(family: str) -> None:
    model = tiny_model(family)
    blocks = fs.find_blocks(model)
    chosen = fs.apply_sac(model, "1/3")
    assert {fqn: _forward_calls(model, block) for fqn, block in blocks.items()} == {
        fqn: 2 if fqn in chosen else 1 for fqn in blocks
    }
    assert fs.apply_sac(model, 1) == list(blocks)  # a second call replaces the first
    model.eval()
    assert all(_forward_calls(model, block) == 1 for block in blocks.values())
    model.train()
    fs.apply_sac(model, "1/3")
    fs.remove_sac(model)
    fs.remove_sac(model)
    assert all(_forward_calls(model, block) == 1 for block in blocks.values())


class Block(nn.Module):
    """A block that transformers knows nothing of."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(drop), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(self.drop(torch.relu(self.up(x))))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Block(0.3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.trunk:
            x = block(x, scale=0.5)
        return x


def _plain_gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    model(torch.linspace(-1, 1, 24).view(3, 8)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "way",
    [{"ratio": 0.5}, {"save": "up", "blocks": [0, 2]}, {"save": ["up", "drop"], "ratio": 0.5}],
    ids=["recomputed", "a product kept", "random numbers kept"],
)
def test_blocks_of_other_origin_are_wrapped_without_renaming(way: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Plain()
    expected, names = _plain_gradients(model), list(model.state_dict())
    assert fs.apply_sac(model, **way) == ["trunk.0", "trunk.2"]
    assert list(model.state_dict()) == names
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, _plain_gradients(clone), expected))
        with torch.no_grad():
            clone.trunk[0].up.weight.zero_()
        assert not all(map(torch.equal, _plain_gradients(clone), expected)), "the copy runs its own weights"
    calls = []
    for i, block in enumerate(model.trunk):
        block.up.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
    assert all(map(torch.equal, _plain_gradients(model), expected))
    assert sorted(calls) == [0, 0, 1, 2, 2, 3]
    fs.remove_sac(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    calls.clear()
    assert all(map(torch.equal, _plain_gradients(model), expected))
    assert sorted(calls) == [0, 1, 2, 3]


@pytest.mark.parametrize("ratio", [1, "1/3"])
def test_generation_in_training_mode_is_refused(ratio: Any) -> None:
    """transformers takes the cache from checkpointed blocks, and their text would be wrong."""
    model, prompt = tiny_model("llama"), torch.arange(3, 9).view(1, 6)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.eval().generate(prompt, **options)
    fs.apply_sac(model, ratio)
    assert torch.equal(model.generate(prompt, **options), expected)
    model.train()
    cached = {"past_key_values": transformers.DynamicCache()}
    for call, given in ((model.generate, options), (torch.compile(model, backend="eager"), cached)):
        with torch.no_grad(), pytest.raises(fs.UnsupportedModelError, match=r"call model.eval\(\) before"):
            call(prompt, **given)
    assert torch.equal(model.generate(prompt, use_cache=False, **options), expected)
    model(prompt, labels=prompt, use_cache=True).loss.backward()
    fs.remove_sac(model)
    assert torch.equal(model.generate(prompt, **options), expected)


def test_caches_of_composite_models_are_off_too() -> None:
    model = tiny_model("t5")
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    assert len(configs) > 1
    before = [config.use_cache for config in configs.values()]
    fs.apply_sac(model, 1)
    assert not any(config.use_cache for config in configs.values())
    fs.remove_sac(model)
    assert [config.use_cache for config in configs.values()] == before


def test_blocks_can_be_listed() -> None:
    model = tiny_model("llama")
    assert fs.apply_sac(model, blocks=[2, 0]) == ["model.layers.0", "model.layers.2"]
    assert fs.apply_sac(model, blocks=[-1, "model.layers.2"]) == ["model.layers.2"]
    blocks = fs.find_blocks(model)
    assert [_forward_calls(model, block) for block in blocks.values()] == [1, 1, 2]
    assert fs.apply_sac(model, blocks=blocks) == list(blocks), "what find_blocks returned is a list of FQNs"
    assert fs.apply_sac(model, blocks=["model.layers.1.mlp", "lm_head"]) == ["model.layers.1.mlp", "lm_head"]
    named = (model.get_submodule("model.layers.1.mlp"), blocks["model.layers.1"])
    assert [_forward_calls(model, module) for module in named] == [2, 1]
    assert_same(_gradients(model), _gradients(tiny_model("llama")))
    assert fs.apply_sac(model, blocks=[]) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"blocks": [3]}, ValueError, "block 3 does not exist: LlamaForCausalLM has 3 blocks"),
        ({"blocks": [-4]}, ValueError, "block -4 does not exist"),
        ({"blocks": ["model.layer.0"]}, ValueError, "did you mean one of .*model.layers.0"),
        ({"blocks": [""]}, ValueError, "no module ''"),
        ({"blocks": ["model.layers"]}, ValueError, "name its elements"),
        ({"blocks": [True]}, TypeError, "FQNs and positions"),
        ({"blocks": [nn.Linear(1, 1)]}, TypeError, "FQNs and positions"),
        ({}, ValueError, "either a ratio such as '1/3' or blocks="),
        ({"ratio": 1, "blocks": [0]}, ValueError, "either a ratio such as '1/3' or blocks="),
        ({"ratio": 1, "placement": "random"}, ValueError, "placement must be one of"),
        ({"save": "o_proj", "offload": True}, ValueError, "leave out save="),
        *(
            ({"save": save}, ValueError, "no submodule")
            for save in ([""], [3], "proj", "model.layers.0", "model.layers.0.mlp")
        ),
        ({"save": "out_proj"}, ValueError, "is called 'out_proj'; they have .*'self_attn.o_proj'"),
        ({"ratio": 0, "save": "out_proj"}, ValueError, "no submodule of these blocks is called 'out_proj'"),
    ],
)
def test_bad_choices_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    model = tiny_model("llama")
    fs.apply_sac(model, blocks=[0])
    with pytest.raises(error, match=message):
        fs.apply_sac(model, **arguments)
    assert _forward_calls(model, fs.find_blocks(model)["model.layers.0"]) == 2, "left as it was"


class Breaking(Block):
    """One in whose middle a compiled graph breaks."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        x = self.up(x) * scale
        torch._dynamo.graph_break()
        return self.down(x)


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "the whole model"])
@pytest.mark.parametrize("kind", [Block, Breaking], ids=["one graph", "a graph break"])
def test_blocks_of_other_origin_compile(kind: type[Block], whole: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Plain()
    model.trunk = nn.ModuleList(kind(0.0) for _ in range(2))
    expected = _plain_gradients(model)
    fs.apply_sac(model, 1)
    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": kind is Block}
    model.compile(**options) if whole else fs.compile_blocks(model, **options)
    for _ in range(2):
        found = _plain_gradients(model)
        assert len(found) == len(expected) > 0
        assert all(map(torch.equal, found, expected))
