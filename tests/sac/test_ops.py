"""What is recomputed and what is kept, counted; routers decide as before; gradients are the same bits."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_sft as fs
from fsdp_sft.sac.decisions import decides
from tests.harness.architectures import inputs_for, quiet, tiny_architecture
from tests.harness.losses import gradients_of, with_loss
from tests.harness.models import FLOAT32, largest_error, ragged_batches, tiny_model
from tests.harness.packs import assert_same
from tests.harness.ranks import device_here, mesh_here, on_ranks, run_distributed

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class _Counts(TorchDispatchMode):
    """How often each operation runs, in compiled code too."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Compiled code wraps operations that could draw random numbers: the wrapped one counts.
        wrapped = [a for a in args if isinstance(a, torch._ops.OpOverload) and "rng_state" in op.name()]
        name = [op, *wrapped][-1].name()
        self.by_name[name] = self.by_name.get(name, 0) + 1
        return op(*args, **(kwargs or {}))


def _step(model: Any, *, warm: bool = False) -> tuple[int, int, dict[str, torch.Tensor]]:
    """(matrix products, attention kernels, gradients) of one step."""
    batch = {**ragged_batches(2)[0], "use_cache": False}
    if warm:
        model(**batch).loss.backward()
        model.zero_grad()
    torch.manual_seed(7)
    with _Counts() as counts:
        model(**batch).loss.backward()
    return counts.by_name["aten::mm"], counts.by_name.get(ATTENTION, 0), gradients_of(model)


# What is recomputed per block: of 7 products all but the last, which early stop leaves out, and 1 attention.
SAVED = [
    ("o_proj", 5, 1),
    (["o_proj", "mlp.down_proj"], 5, 1),
    ("self_attn", 2, 0),
    (["mlp"], 4, 1),
    ("sdpa", 6, 0),
    (["q_proj", "k_proj"], 4, 1),
    (["sdpa", "self_attn.o_proj", "mlp.gate_proj"], 4, 0),
    (["self_attn", "mlp"], 0, 0),
]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_named_submodules_are_kept_and_the_rest_recomputed(backend: str | None) -> None:
    plain, attention, expected = _step(tiny_model("llama", num_hidden_layers=2))
    for save, products, kernels in SAVED:
        torch.compiler.reset()
        model = tiny_model("llama", num_hidden_layers=2)
        names = list(model.state_dict())
        assert fs.apply_sac(model, save=save) == ["model.layers.0", "model.layers.1"]
        assert list(model.state_dict()) == names
        if backend is not None:
            fs.compile_blocks(model, backend=backend, fullgraph=True)
        found = _step(model, warm=backend is not None)
        assert_same(found[2], expected)
        assert (found[0] - plain, found[1] - attention) == (2 * products, 2 * kernels), save


def test_a_ratio_chooses_the_blocks_that_keep_something() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    plain, attention, expected = _step(model)
    for arguments, chosen in (
        ({"ratio": "1/2"}, [0, 2]),
        ({"ratio": "1/2", "placement": "prefix"}, [0, 1]),
        ({"blocks": [0, -1]}, [0, 3]),
        ({}, [0, 1, 2, 3]),
        ({"ratio": 0}, []),
    ):
        assert fs.apply_sac(model, **arguments, save="self_attn") == [f"model.layers.{i}" for i in chosen]
        products, kernels, gradients = _step(model)
        assert (products - plain, kernels - attention) == (2 * len(chosen), 0)
        assert_same(gradients, expected)


def test_chosen_blocks_are_compiled_alone() -> None:
    model = tiny_model("llama")
    assert fs.compile_blocks(model, blocks=[-1], backend="aot_eager") == ["model.layers.2"]
    assert [vars(block).get("_compiled_call_impl") is not None for block in model.model.layers] == [0, 0, 1]


@on_ranks(2)
def test_groups_within_blocks_are_refused_whenever_they_were_made() -> None:
    for sharded_first in (True, False):
        model: Any = tiny_model("llama").train()
        if not sharded_first:
            fs.apply_sac(model, save="o_proj", blocks=[1])
        blocks = {**fs.find_blocks(model), "model.layers.1.mlp": model.model.layers[1].mlp}
        refused = r"^model\.layers\.1\.mlp is sharded as a group of its own .* call apply_sac without save="
        with pytest.raises(fs.UnsupportedModelError, match=refused):
            fs.shard_model(model, mesh=fs.build_mesh(device_type="cpu"), blocks=blocks)
            fs.apply_sac(model, save="o_proj")
        if sharded_first:  # the other block has no group inside
            fs.apply_sac(model, save="o_proj", blocks=[0])
            model(**ragged_batches(2)[0]).loss.backward()
            assert model.model.layers[0].self_attn.o_proj.weight.grad is not None


# What checkpointing costs and saves.


def test_six_of_seven_matmuls_are_recomputed_with_early_stop() -> None:
    model = tiny_model("llama")
    plain = _step(model)[0]
    assert plain == 3 * (7 * 3 + 1), "7 in a block and the head; forward and two in the backward"
    for ratio, blocks in ((0, 0), ("1/3", 1), (1, 3)):
        fs.apply_sac(model, ratio)
        early = _step(model)[0] - plain
        fs.apply_sac(model, ratio, early_stop=False)
        assert (early, _step(model)[0] - plain) == (6 * blocks, 7 * blocks)


def _collectives(family: str, ratio: Any, order: str) -> dict[str, int]:
    model = tiny_model(family)
    for step in order:
        if step == "s":
            fs.apply_sac(model, ratio)
        else:
            fs.shard_model(model, mesh=mesh_here())  # in bfloat16, T5 has float32 groups inside of its blocks
    batch = {**ragged_batches(2)[0], "use_cache": False}
    for _ in range(2):  # the first step of FSDP2 learns the order of its groups
        with _Counts() as counts:
            model(**batch).loss.backward()
    return {name: count for name, count in counts.by_name.items() if name.startswith("c10d")}


@pytest.mark.parametrize("family", ["llama", "t5", "mixtral", "gpt2"])
@on_ranks(2)
def test_checkpointing_adds_no_collective(family: str) -> None:
    plain = _collectives(family, 0, "f")
    assert len(plain) == 2, f"all-gathers and reduce-scatters, got {plain}"
    for ratio, order in itertools.product(("1/3", 1), ("sf", "fs")):
        counted = _collectives(family, ratio, order)
        assert counted == plain, (ratio, order, counted, plain)


# --- gradients are those without it, bit by bit: families, ratios, ranks, orders, compile ------------------

RATIOS = (0, "1/4", "1/3", "1/2", "2/3", 1)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.2},
    "qwen3": {"attention_dropout": 0.2},
    "gemma3": {"attention_dropout": 0.2},
    "mixtral": {"attention_dropout": 0.2, "router_jitter_noise": 0.2},
    "gpt2": {"resid_pdrop": 0.2, "attn_pdrop": 0.2, "embd_pdrop": 0.2},
    "t5": {"dropout_rate": 0.2},
}
# Submodules that are kept where the rest of their blocks is recomputed.
KEPT: dict[str, Any] = {
    "llama": "self_attn",
    "gpt2": ["c_proj", "sdpa"],
    "mixtral": ["self_attn", "mlp"],
}
HYBRIDS = ("BambaForCausalLM", "JambaForCausalLM", "Zamba2ForCausalLM", "FalconH1ForCausalLM")


def _gradients_with(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model(**inputs).loss.backward()
    gradients = gradients_of(model)
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    return gradients


def _gradients_prepared(
    family: str, way: dict[str, Any], order: str, backend: str | None
) -> dict[str, torch.Tensor]:
    """Gradients of one fresh model prepared in one order: of a letter each, sac, compile and shard."""
    torch.compiler.reset()
    model = tiny_model(family, **FAMILIES[family])
    for step in order:
        if step == "s":
            fs.apply_sac(model, **way)
        elif step == "f":
            fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32)
        elif backend is not None:
            fs.compile_blocks(model, backend=backend)
    return _gradients_with(model, {**ragged_batches(2)[0], "use_cache": False})


def _check_matrix(
    families: list[str], ratios: tuple[Any, ...], orders: list[str], backend: str | None
) -> None:
    for family, order in itertools.product(families, orders):
        plain = _gradients_prepared(family, {}, order.replace("s", ""), backend)
        ways = [{"ratio": ratio} for ratio in ratios]
        if family in KEPT and backend is None:
            ways.append({"save": KEPT[family]})
        for way in ways:
            assert_same(_gradients_prepared(family, way, order, backend), plain, f"{family}, {way}, {order}")


def test_eager_gradients_are_bit_equal_on_one_process_without_sharding() -> None:
    _check_matrix(list(FAMILIES), RATIOS, ["s"], None)


@pytest.mark.parametrize(
    ("world_size", "ratios"), [(2, ("1/3", 1)), (1, RATIOS), (2, RATIOS)], ids=["2", "1, all", "2, all"]
)
def test_eager_gradients_are_bit_equal_when_sharded_in_both_orders(world_size: int, ratios: Any) -> None:
    run_distributed(_check_matrix, world_size, list(FAMILIES), ratios, ["sf", "fs"], None)


# Each model is compiled anew in each order, which takes three seconds a model.
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_compiled_gradients_are_bit_equal(family: str) -> None:
    run_distributed(_check_matrix, 2, [family], ("1/2",), ["scf", "cfs"], "aot_eager")


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_models_are_bit_equal_too(name: str) -> None:
    model = tiny_architecture(name).train()
    inputs = inputs_for(model)
    expected = _gradients_with(model, inputs)
    for ratio in ("1/2", 1):
        assert fs.apply_sac(model, ratio)
        assert_same(_gradients_with(model, inputs), expected)


# --- a recomputed router sends every token where its forward has sent it -----------------------------------


class Disturbed(nn.Module):
    """A router whose every second call, the recomputation, moves one expert by a unit in the last place."""

    def __init__(self, router: Any, *, disturb: bool) -> None:
        super().__init__()
        self.weight, self.top_k, self.disturb, self.calls = router.weight, router.top_k, disturb, 0

    def forward(self, hidden: torch.Tensor) -> Any:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = F.linear(hidden, self.weight)
        self.calls += 1
        with torch.no_grad():
            up = torch.nextafter(logits, torch.full_like(logits, torch.inf)) - logits
            up[:, [0, 1, 3]] = 0
        logits = logits + up * (self.disturb and self.calls % 2 == 0)
        values, indices = logits.softmax(-1).topk(self.top_k, dim=-1)
        values /= values.sum(-1, keepdim=True)
        return logits, values, indices


def _tied(*, disturb: bool) -> Any:
    """A mixture whose second and third expert are tied for every token, and are other experts."""
    model = tiny_model("mixtral", num_experts_per_tok=1).to(device_here())
    for block in model.model.layers:
        with torch.no_grad():
            block.mlp.gate.weight[1] *= 100  # so that a unit in the last place shows behind the softmax
            block.mlp.gate.weight[2] = block.mlp.gate.weight[1]
        block.mlp.gate = Disturbed(block.mlp.gate, disturb=disturb)
    return with_loss(model, router_loss="off")


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    summed, _ = fs.loss_sum(model, _batch())
    summed.backward()
    return gradients_of(model)


def _batch() -> dict[str, torch.Tensor]:
    return {name: value.to(device_here()) for name, value in ragged_batches(2)[0].items()}


@pytest.mark.parametrize("chosen", [{"ratio": 1}, {"save": "self_attn"}], ids=["1", "operations"])
def test_a_recomputed_router_decides_as_before(chosen: dict[str, Any]) -> None:
    plain = _gradients(_tied(disturb=False))
    model = _tied(disturb=True)
    fs.apply_sac(model, **chosen)
    _gradients(model)  # its first forward asks about the model's own loss
    seen: list[torch.Tensor] = []  # what the experts of each block are given, by call
    for block in model.model.layers:
        block.mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1].clone()))
        block.mlp.gate.calls = 0
    found = _gradients(model)
    forward, again = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(forward) == len(model.model.layers) == len(again)
    assert all(map(torch.equal, forward, reversed(again)))
    assert largest_error(found, plain) <= 1e-5
    assert {int(i) for indices in forward for i in indices.flatten()} <= {0, 1, 3}


def test_a_second_backward_decides_the_same() -> None:
    model = tiny_model("mixtral").to(device_here())
    fs.apply_sac(model, 1)
    summed, _ = fs.loss_sum(with_loss(model, router_loss="off", impl="logits"), _batch())
    parameters = list(model.parameters())
    first = torch.autograd.grad(summed, parameters, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(summed, parameters)))


class Choosing(nn.Module):
    """Everything that decides, on one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        total = y.topk(2, dim=0).values.sum() + (y.sort(descending=True).values * torch.arange(6.0)).sum()
        total = total + y.max(dim=0, keepdim=True).values.sum() + y.min(dim=1).values.square().sum()
        total = total + y.kthvalue(2).values.sum() + y.median(dim=-1).values.sum()
        chosen = F.one_hot(y.argmax(-1), 6) + F.one_hot(y.argsort(stable=True)[:, 0], 6)
        return x + (total + chosen * y).tanh()


def test_every_operation_that_decides_is_repeated() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Choosing(), Choosing()), torch.randn(5, 6)
    model(x).sum().backward()
    expected = gradients_of(model)
    fs.apply_sac(model, blocks=["0", "1"])
    model(x).sum().backward()
    assert_same(gradients_of(model), expected)


def test_only_blocks_that_decide_pay() -> None:
    with quiet():
        for name, expected in {
            "LlamaForCausalLM": False,
            "Gemma3ForCausalLM": False,
            "MambaForCausalLM": False,
            "MixtralForCausalLM": True,
            "PhimoeForCausalLM": True,
            "GptOssForCausalLM": True,
        }.items():
            assert any(map(decides, fs.find_blocks(tiny_architecture(name)).values())) == expected, name
