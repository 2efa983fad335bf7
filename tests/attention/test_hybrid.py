"""Hybrid models: recurrences and short convolutions keep rows of a pack apart, or are refused."""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft.attention import hybrid
from tests.harness.architectures import tiny_architecture
from tests.harness.losses import gradients_of
from tests.harness.models import AllFloat64, full, largest_error
from tests.harness.packs import drawn_rows, gradients_of_separate_rows
from tests.harness.ranks import mesh_here, run_distributed

# Families whose rows are kept apart, and those that call what is not known.
APART = [
    *("BailingHybrid", "Bamba", "FalconH1", "KimiLinear", "Lfm2", "Lfm2Moe", "Lfm3"),
    *("NemotronH", "OlmoHybrid", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Zamba2"),
]
MIXED = [
    *(
        "FalconMamba",
        "GraniteMoeHybrid",
        "Inkling",
        "Jamba",
        "Mamba",
        "Mamba2",
        "MiniMax",
        "Qwen4Exp",
        "RecurrentGemma",
        "Rwkv",
    ),
    *("Zamba", "Zaya", "xLSTM"),
]
SINCE_5_24 = ["Inkling2", "Inkling2Loop", "LaraMini"]
if transformers.__version__ >= "5.24":
    APART += SINCE_5_24


def tiny_hybrid(family: str) -> Any:
    """A tiny model of a family without a cache, with random weights that are the same in each call."""
    model = tiny_architecture(f"{family}ForCausalLM")
    model.config.use_cache = False
    model.set_experts_implementation("eager")  # float64 has no other
    return model.train()


# One family of each kind of layer: gated delta rule, KDA, Mamba 2, convolution alone.
KINDS = ["Qwen3_5", "KimiLinear", "Bamba", "Lfm2"]


@pytest.mark.parametrize("family", APART)
def test_rows_of_a_pack_are_as_alone(family: str) -> None:
    report = fs.verify_packing(tiny_hybrid(family), max_length=100)
    assert report.error < 2e-6
    assert report.leak == 0
    assert report.unpacked > 1e-3


@pytest.mark.parametrize("family", MIXED)
def test_layers_that_call_unknown_functions_are_refused(family: str) -> None:
    with pytest.raises(fs.PackingError, match=f"not kept apart by {family}ForCausalLM"):
        fs.verify_packing(tiny_hybrid(family), max_length=64)


class _Convolves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(32, 32, 3, padding=2, groups=32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.conv(hidden.transpose(1, 2))[..., : hidden.shape[1]].transpose(1, 2)


def test_a_layer_that_convolves_by_itself_leaves_the_model_as_it_is() -> None:
    """A half of a model that is separated can leak less than a comparison shows."""
    model = tiny_hybrid("Lfm2")
    model.model.layers[0].feed_forward = _Convolves()
    hybrid.separate_rows(model)
    assert hybrid._SEPARATED not in vars(model.model)
    with pytest.raises(fs.PackingError, match="not kept apart"):
        fs.verify_packing(model, max_length=64)


def packed(rows: Any) -> dict[str, torch.Tensor]:
    return fs.PackedCollator(max_length=512)(rows)


@pytest.mark.parametrize("family", KINDS)
def test_gradients_are_those_of_the_rows_alone(family: str) -> None:
    rows = drawn_rows(7, longest=90)  # beyond a chunk of the recurrences
    with AllFloat64():
        plain, model = (tiny_hybrid(family).double() for _ in range(2))
        _, expected = gradients_of_separate_rows(plain, rows)
        hybrid.separate_rows(model)
        fs.causal_lm_loss(model, packed(rows), num_targets=1).backward()
        assert largest_error(gradients_of(model), expected) < 1e-11


def train_packed(family: str, ratio: int, dtype: torch.dtype | None) -> dict[str, Any]:
    model = tiny_hybrid(family)
    fs.apply_sac(model, ratio)
    fs.shard_model(model, mesh=mesh_here(), mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    before = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    rank = torch.distributed.get_rank()
    window = [packed(drawn_rows(5, seed=seed)) for seed in (rank, 2 + rank)]
    result = fs.train_step(model, window, torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=None)
    return {
        "loss": result.loss,
        "targets": result.num_targets,
        "steps": {name: before[name] - full(p.detach()) for name, p in model.named_parameters()},
    }


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("family", ["Qwen3_5", "NemotronH"])
def test_sharded_and_checkpointed_models_train_as_rows_alone_do(
    family: str, dtype: torch.dtype | None
) -> None:
    rows = [row for seed in range(4) for row in drawn_rows(5, seed=seed)]
    loss, expected = gradients_of_separate_rows(tiny_hybrid(family), rows)
    first, second = run_distributed(train_packed, 2, family, 1, dtype)
    assert first["loss"] == second["loss"]
    targets = first["targets"]
    expected = {name: gradient / targets for name, gradient in expected.items()}
    steps = {name: first["steps"][name] for name in expected}
    assert first["loss"] == pytest.approx(loss / targets, rel=2e-2 if dtype else 1e-5)
    norm = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    error = sum(float((steps[n] - g).square().sum()) for n, g in expected.items()) ** 0.5
    assert error < (8e-2 if dtype else 2e-5) * norm


def logits_of(model: Any, lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a pack, and of its rows alone."""
    ids = torch.randint(3, 90, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        together = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        alone = [model(input_ids=row, use_cache=False).logits[0] for row in ids.split(lengths, 1)]
    return together, torch.cat(alone)


def test_forwards_that_are_no_packs_do_not_change() -> None:
    plain, model = tiny_hybrid("Qwen3_5"), tiny_hybrid("Qwen3_5")
    ids = torch.arange(3, 33).view(2, 15)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    before = plain(**inputs).logits
    generated = plain.generate(ids, max_new_tokens=5, do_sample=False)
    hybrid.separate_rows(model)
    hybrid.separate_rows(model)
    assert torch.equal(model(**inputs).logits, before)
    assert torch.equal(plain(**inputs).logits, before)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), generated)


def test_several_packs_in_one_batch() -> None:
    model = tiny_hybrid("Bamba").eval()
    hybrid.separate_rows(model)
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.arange(40) % 13, torch.arange(40)])
    with torch.no_grad():
        both = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        for index, row in enumerate([ids[:1, :13], ids[:1, 13:26], ids[:1, 26:39]]):
            alone = model(input_ids=row, use_cache=False).logits
            torch.testing.assert_close(both[:1, 13 * index : 13 * index + 13], alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(both[1:], model(input_ids=ids[1:], use_cache=False).logits)


@pytest.mark.parametrize("family", ["Bamba", "Lfm2", "NemotronH"])
def test_sequences_of_a_batch_are_apart_whatever_says_where_they_begin(family: str) -> None:
    model = tiny_hybrid(family).eval()
    hybrid.separate_rows(model)
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    positions = (torch.arange(40) % 13)[None]
    with torch.no_grad():
        for given, same in (
            (
                {"position_ids": positions[0] if family == "NemotronH" else positions},
                {"position_ids": positions.expand(2, -1)},
            ),
            ({"seq_idx": torch.zeros(2, 40, dtype=torch.int32)}, {}),
        ):
            found, expected = (model(input_ids=ids, use_cache=False, **own).logits for own in (given, same))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class _InC(torch.nn.Module):
    forward = staticmethod(torch.sigmoid)


def test_a_module_whose_forward_is_no_python() -> None:
    model = tiny_hybrid("Lfm2")
    model.model.act = _InC()
    assert fs.verify_packing(model, max_length=64).leak == 0


@pytest.mark.parametrize("family", ["Qwen3_5", "Lfm2"])
def test_compiled_blocks_keep_rows_apart(family: str) -> None:
    model = tiny_hybrid(family)
    fs.compile_blocks(model, backend="eager")
    hybrid.separate_rows(model)
    together, alone = logits_of(model, [3, 70, 9])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


class Kernel:
    """A kernel of a package: takes the boundaries, notes them, and computes each row by torch."""

    def __init__(self, in_torch: Any, time: int) -> None:
        self.in_torch, self.time, self.seen = in_torch, time, []

    def by_rows(self, lengths: list[int], *sequences: torch.Tensor, **options: Any) -> Any:
        self.seen.append(lengths)
        rows = zip(*(x.split(lengths, self.time) for x in sequences), strict=True)
        return [self.in_torch(*row, **options) for row in rows]


def test_kernels_get_the_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
    from transformers.models.qwen3_next import modeling_qwen3_next as file

    convolution = Kernel(inspect.unwrap(file.causal_conv1d_fn), 2)
    rule = Kernel(inspect.unwrap(file.torch_chunk_gated_delta_rule), 1)

    def causal_conv1d_fn(
        x: Any, weight: Any, bias: Any = None, seq_idx: Any = None, activation: Any = None
    ) -> Any:
        lengths = [x.shape[2]] if seq_idx is None else seq_idx[0].bincount().tolist()
        return torch.cat(convolution.by_rows(lengths, x, weight=weight, bias=bias, activation=activation), 2)

    def chunk_gated_delta_rule(
        q: Any, k: Any, v: Any, g: Any, beta: Any, use_qk_l2norm_in_kernel: Any, cu_seqlens: Any = None
    ) -> Any:
        lengths = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
        outs = rule.by_rows(lengths, q, k, v, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        return torch.cat([out for out, _ in outs], 1), None

    ops = SimpleNamespace(gated_delta_rule=SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule))
    monkeypatch.setitem(sys.modules, "causal_conv1d", SimpleNamespace(causal_conv1d_fn=causal_conv1d_fn))
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(ops=ops))
    made = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")(convolution.in_torch)
    monkeypatch.setattr(file, "causal_conv1d_fn", made)
    made = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")(rule.in_torch)
    monkeypatch.setattr(file, "torch_chunk_gated_delta_rule", made)
    model = tiny_hybrid("Qwen3Next").eval()
    hybrid.separate_rows(model)
    together, alone = logits_of(model, [3, 70, 9])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    for kernel in (convolution, rule):
        assert [3, 70, 9] in kernel.seen
        assert [82] not in kernel.seen
