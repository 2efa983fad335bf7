"""Selective activation checkpointing: the ratio rule, equal gradients, and inputs that wait on the host."""

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
from fsdp_sft.sac.offload import Offload
from tests.harness.losses import gradients_of
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.packs import assert_same
from tests.simulated.ranks import run_simulated


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


# --- activations that wait in host memory: the same gradients, and less of the device --------------------


SLOW = 0.02
TOKENS, HIDDEN, BLOCKS = 1024, 32, 4
INPUT = TOKENS * HIDDEN * 4  # bytes of a block's input
Gradients = dict[str, torch.Tensor]


def _model() -> Any:
    return tiny_model("qwen3", hidden_size=HIDDEN, num_hidden_layers=BLOCKS)


def _batch(device: str, tokens: int = TOKENS) -> dict[str, Any]:
    ids = torch.arange(tokens).mul(7).remainder(90).view(1, -1).to(device)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _bytes_in_use() -> int:
    torch.accelerator.synchronize()
    return torch.accelerator.memory_stats()["requested_bytes.all.current"]


def _step(ratio: str, *, offload: bool) -> tuple[Gradients, int, int]:
    """Of the second step: gradients, what its forward left on the device, and the peak, in bytes."""
    model = _model().to("sim").train()
    fs.apply_sac(model, ratio, offload=offload)
    for tokens in (TOKENS, TOKENS - 3):
        model.zero_grad()
        before = _bytes_in_use()
        torch.accelerator.reset_peak_memory_stats()
        hidden = model.model(**_batch("sim", tokens)).last_hidden_state
        left = _bytes_in_use() - before
        hidden.square().sum().backward()
    torch.accelerator.synchronize()
    peak = torch.accelerator.memory_stats()["requested_bytes.all.peak"] - before
    return gradients_of(model), left, peak


@pytest.mark.parametrize(
    ("ratio", "gone", "less"), [("1", BLOCKS - 1, (BLOCKS - 3) * INPUT + 1), ("1/2", BLOCKS / 2 - 1, 0)]
)
def test_gradients_are_equal_and_the_device_has_less(ratio: str, gone: float, less: int) -> None:
    ((plain, left, peak),) = run_simulated(_step, 1, ratio, offload=False, copy_delay=SLOW)
    ((found, left_now, peak_now),) = run_simulated(_step, 1, ratio, offload=True, copy_delay=SLOW)
    assert any(gradient.abs().sum() > 0 for gradient in plain.values())
    assert_same(found, plain)
    # The newest visit stays until the next begins, and is the first that the backward needs.
    assert round((left - left_now) / INPUT, 1) == gone
    assert peak - peak_now >= less


def _offload_of(model: Any) -> Offload:
    own = model.model.layers[0].__dict__
    # Where transformers' layer recomputes its forward, it holds the function; otherwise the block does.
    recompute: Any = own.get("_gradient_checkpointing_func") or own["forward"].args[1]
    found = recompute.args[0]
    assert isinstance(found, Offload)
    return found


def _check_orders() -> None:
    model = _model().to("sim").train()
    batches = [_batch("sim", tokens) for tokens in (TOKENS, TOKENS // 2 + 3)]
    expected = []
    for batch in batches:
        model(**batch).loss.backward()
        expected.append(gradients_of(model))
    fs.apply_sac(model, 1, offload=True)
    own = _offload_of(model)
    for without_gradients in (torch.inference_mode, torch.no_grad):
        with without_gradients():
            model(**batches[0])
    assert own.latest == []
    older, newer = (model(**batch).loss for batch in batches)
    older.backward()
    assert_same(gradients_of(model), expected[0], "the older of two forwards")
    newer.backward()
    assert_same(gradients_of(model), expected[1], "the newer of two forwards")
    loss = model(**batches[0]).loss
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_same(gradients_of(model), expected[0], "a second backward")
    del older, newer, loss
    for step in range(4):
        dropped = model(**batches[step % 2]).loss
        del dropped
        model(**batches[1]).loss.backward()
        assert_same(gradients_of(model), expected[1], "after a graph that was dropped")
    latest = own.latest
    model = copy.deepcopy(model)
    model(**batches[0]).loss.backward()
    assert own.latest is latest
    assert _offload_of(model) is not own
    assert_same(gradients_of(model), expected[0], "a copy")


def test_any_order_of_forwards_and_backwards() -> None:
    run_simulated(_check_orders, 1, copy_delay=0.003)


class _OfOnesOwn(nn.Module):
    """Blocks that take their hidden states by another name, or change in place what a checkpoint keeps."""

    class Block(nn.Module):
        def __init__(self, form: str) -> None:
            super().__init__()
            self.form = form
            self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            x = x.mul_(0.5) if self.form == "at its begin" else x
            out = self.down(torch.relu(self.up(torch.tanh(x + bias))))
            return x.add_(out) if self.form == "at its end" else x + out

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.embed, self.bias = form, nn.Embedding(100, HIDDEN), nn.Parameter(torch.ones(HIDDEN))
        self.embed.requires_grad_(form != "by name, the embedding frozen")
        self.layers = nn.ModuleList(self.Block(form) for _ in range(BLOCKS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        bias = self.bias.expand(TOKENS, HIDDEN).contiguous()  # one for all blocks, with a gradient
        for block in self.layers:
            before = hidden
            hidden = block(x=hidden, bias=bias) if "by name" in self.form else block(hidden, bias)
            if self.form == "by the model" and block is self.layers[0]:
                before.add_(1)  # while it is copied; that of the last block is on the device still
        return hidden


def _of_ones_own(form: str) -> list[Any]:
    """Without offload and with it: (bytes that the forward leaves on the device, gradients), or the error."""
    found: list[Any] = []
    ids = torch.arange(TOKENS, device="sim").remainder(100)
    for offload in (False, True):
        model = _OfOnesOwn(form).to("sim")
        fs.apply_sac(model, blocks=[f"layers.{i}" for i in range(BLOCKS)], offload=offload)
        before = _bytes_in_use()
        try:
            loss = model(ids).square().sum()
            left = _bytes_in_use() - before
            loss.backward()
            found.append((left, gradients_of(model)))
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("form", "least"),
    [("by position", BLOCKS - 1.3), ("by name", BLOCKS - 1.3), ("by name, the embedding frozen", BLOCKS - 2)],
)
def test_hidden_states_are_found_by_whatever_name(form: str, least: float) -> None:
    (((plain, expected), (left, found)),) = run_simulated(_of_ones_own, 1, form, copy_delay=0.005)
    assert_same(found, expected)
    # The bias that blocks share is on the device once, as it was.
    assert (plain - left) / INPUT >= least


@pytest.mark.parametrize("form", ["at its begin", "at its end", "by the model"])
def test_changes_in_place_are_told_as_without_it(form: str) -> None:
    (messages,) = run_simulated(_of_ones_own, 1, form, copy_delay=0.005)
    assert ["inplace" in message or "mutated" in message for message in messages] == [True, True], messages


def test_compiled_blocks_are_refused_in_either_order() -> None:
    model = _model()
    fs.apply_sac(model, 1, offload=True)
    with pytest.raises(ValueError, match=r"'model.layers.0' is compiled, and offload=True"):
        fs.compile_blocks(model, backend="eager")
    fs.remove_sac(model)
    fs.compile_blocks(model, backend="eager")
    with pytest.raises(ValueError, match=r"'model.layers.0' is compiled, and offload=True"):
        fs.apply_sac(model, 1, offload=True)


def test_on_a_cpu_nothing_moves() -> None:
    model, plain = _model(), _model()
    fs.apply_sac(model, 1, offload=True)
    model = pickle.loads(pickle.dumps(model))
    for one in (model, plain):
        one(**_batch("cpu")).loss.backward()
    assert_same(gradients_of(model), gradients_of(plain))
    assert _offload_of(model).latest == []
