"""Packing: every row once, apart from its neighbours, fairly dealt, and resumed at any number of ranks."""

import copy
import itertools
import json
import math
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, IterableDataset

import fsdp_sft as fs
from tests.distributed import run_distributed
from tests.models import VOCAB, full, largest_error, tiny_model

# --- pack_lengths -----------------------------------------------------------------------------------------


def naive_best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Tokens of each pack, ascending, by looking at every pack for every row."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, space in enumerate(free) if space >= length]
        if fitting:
            free[min(fitting, key=lambda i: free[i])] -= length
        else:
            free.append(capacity - length)
    return sorted(capacity - space for space in free)


def fewest_packs(lengths: list[int], capacity: int) -> int:
    """By trying every assignment."""

    def search(rest: tuple[int, ...], loads: tuple[int, ...]) -> int:
        if not rest:
            return len(loads)
        best = len(loads) + len(rest)
        for i in range(len(loads) + 1):
            load = (loads[i] if i < len(loads) else 0) + rest[0]
            if load <= capacity:
                best = min(best, search(rest[1:], (*loads[:i], load, *loads[i + 1 :])))
        return best

    return search(tuple(lengths), ())


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3000), st.data())
def test_packs_are_those_of_best_fit_decreasing(capacity: int, data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    packs = fs.pack_lengths(lengths, capacity)
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    tokens = sorted(sum(lengths[row] for row in pack) for pack in packs)
    assert tokens == naive_best_fit_decreasing(lengths, capacity)
    assert packs == fs.pack_lengths(torch.tensor(lengths, dtype=torch.int32), capacity)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 12), max_size=7))
def test_few_packs_more_than_the_fewest_possible(lengths: list[int]) -> None:
    best = fewest_packs(lengths, 12)
    assert best <= len(fs.pack_lengths(lengths, 12)) <= 11 * best / 9 + 6 / 9


@pytest.mark.parametrize("capacity", [1023, 1024, 1025, 4096, 1 << 20])
def test_many_rows_fill_packs(capacity: int) -> None:
    generator = random.Random(0)
    lengths = [generator.randint(1, capacity // 3) for _ in range(5000)]
    packs = fs.pack_lengths(lengths, capacity)
    assert max(sum(lengths[row] for row in pack) for pack in packs) <= capacity
    assert sorted(itertools.chain(*packs)) == list(range(5000))
    assert len(packs) <= math.ceil(sum(lengths) / capacity) + 5


def test_a_quarter_of_a_million_lengths_take_no_quadratic_time() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(1, 4096) for _ in range(250_000)]
    start = time.process_time()
    fs.pack_lengths(lengths, 4096)
    assert time.process_time() - start < 2, "about 0.3 s; benchmarks/packing.py measures"


@pytest.mark.parametrize(
    ("lengths", "capacity", "error", "match"),
    [
        ([3, 9], 8, ValueError, "row 1 has 9 tokens, a pack holds 1 to 8; truncate"),
        ([3, 0], 8, ValueError, "row 1 has 0 tokens.*empty rows"),
        ([-1], 8, ValueError, "row 0 has -1 tokens"),
        ([3, True], 8, TypeError, r"lengths\[1\] must be an integer, got True"),
        ([3, math.nan], 8, TypeError, r"lengths\[1\]"),
        ([3.0], 8, TypeError, r"lengths\[0\]"),
        (["3"], 8, TypeError, r"lengths\[0\]"),
        ([None], 8, TypeError, r"lengths\[0\]"),
        ("34", 8, TypeError, "list of integers"),
        (7, 8, TypeError, "list of integers"),
        (torch.tensor([1.5]), 8, TypeError, r"lengths\[0\]"),
        (torch.tensor([True]), 8, TypeError, r"lengths\[0\]"),
        (torch.ones(2, 2, dtype=torch.int64), 8, TypeError, r"lengths\[0\]"),
        ([1], 0, ValueError, "capacity"),
        ([1], True, TypeError, "capacity"),
        ([1], 8.0, TypeError, "capacity"),
        ([10**30], 8, ValueError, "row 0"),
    ],
)
def test_bad_lengths_are_refused(lengths: Any, capacity: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        fs.pack_lengths(lengths, capacity)


def test_no_lengths_give_no_packs() -> None:
    assert fs.pack_lengths([], 8) == []


# --- PackedCollator ---------------------------------------------------------------------------------------


def row(*ids: int, targets: int | None = None) -> dict[str, list[int]]:
    """A row that trains its last ``targets`` tokens, or all."""
    labels = list(ids)
    if targets is not None:
        labels[: len(ids) - targets] = [-100] * (len(ids) - targets)
    return {"input_ids": list(ids), "labels": labels}


def as_lists(batch: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    assert {(v.dtype, v.ndim, v.shape[0]) for v in batch.values()} == {(torch.int64, 2, 1)}
    return {name: value[0].tolist() for name, value in batch.items()}


def test_rows_are_joined_and_no_first_token_is_told_from_the_row_before() -> None:
    rows = [row(5, 6, 7), row(8), row(9, 10, targets=1), row(11, 12, targets=0)]
    before = copy.deepcopy(rows)
    batch = as_lists(fs.PackedCollator(max_length=8)(rows))
    assert batch == {
        "input_ids": [5, 6, 7, 8, 9, 10, 11, 12],
        "labels": [-100, 6, 7, -100, -100, 10, -100, -100],
        "position_ids": [0, 1, 2, 0, 0, 1, 0, 1],
    }
    assert rows == before
    encoded = [fs.EncodedChat(r["input_ids"], r["labels"]) for r in rows]
    assert as_lists(fs.PackedCollator(max_length=8)(encoded)) == batch
    tensors = [{name: torch.tensor(values) for name, values in r.items()} for r in rows]
    assert as_lists(fs.PackedCollator(max_length=8)(tensors)) == batch


def test_padding_is_a_row_of_its_own_without_targets() -> None:
    rows = [row(5, 6, 7), row(8, 9)]
    expected = {
        "input_ids": [5, 6, 7, 8, 9, 3, 3, 3],
        "labels": [-100, 6, 7, -100, 9, -100, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 0, 1, 2],
    }
    fixed = fs.PackedCollator(max_length=8, padding="max_length", pad_token_id=3)
    assert as_lists(fixed(rows)) == expected
    multiple = fs.PackedCollator(max_length=7, pad_to_multiple_of=4, pad_token_id=3)
    assert as_lists(multiple(rows)) == expected


def test_an_empty_pack_and_a_single_token_leave_something_to_shift() -> None:
    collator = fs.PackedCollator(max_length=8)
    nothing = {"input_ids": [0, 0], "labels": [-100, -100], "position_ids": [0, 1]}
    assert as_lists(collator([])) == nothing
    assert as_lists(collator([row(7)])) == {**nothing, "input_ids": [7, 0], "position_ids": [0, 0]}
    assert fs.count_targets([collator([])]) == 0


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([row(1, 2, 3), row(4, 5)], "5 tokens, max_length is 4; give PackedSampler the same"),
        ([{"input_ids": [1, 2]}], "labels"),
        ([{"input_ids": [1, 2], "labels": [1]}], "one length"),
        ([{"input_ids": [], "labels": []}], "length of at least 1"),
        ([{"input_ids": [1.5], "labels": [1]}], "integers"),
        ([{"messages": []}], "encode_chat first"),
        ([[1, 2]], "encode_chat first"),
        (row(1, 2), r"wrap it as \[row\]"),
    ],
)
def test_bad_rows_are_refused(rows: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fs.PackedCollator(max_length=4)(rows)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_length": 0}, ValueError),
        ({"max_length": True}, TypeError),
        ({"max_length": 4.0}, TypeError),
        ({"max_length": 4, "padding": "fixed"}, ValueError),
        ({"max_length": 4, "pad_to_multiple_of": -8}, ValueError),
        ({"max_length": 4, "pad_token_id": -1}, ValueError),
    ],
)
def test_bad_collator_options_are_refused(options: dict[str, Any], error: type) -> None:
    with pytest.raises(error, match=next(reversed(options))):
        fs.PackedCollator(**options)


def test_sizes_of_rows() -> None:
    assert fs.row_sizes([row(5, 6, 7), row(8), row(9, 10, targets=0)]) == ([3, 1, 2], [2, 0, 0])
    with pytest.raises(ValueError, match="row 1: "):
        fs.row_sizes([row(5), {"input_ids": [1]}])


# --- a packed batch trains as its rows do -----------------------------------------------------------------


def drawn_rows(count: int, *, longest: int = 24, seed: int = 3) -> list[dict[str, list[int]]]:
    """Rows of 1 to ``longest`` tokens; one has no target and one consists of a single token."""
    generator = random.Random(seed)
    rows = []
    for index in range(count):
        length = {0: 1}.get(index) or generator.randint(2, longest)
        ids = [generator.randrange(3, VOCAB) for _ in range(length)]
        rows.append(row(*ids, targets=0 if index == 1 else generator.randint(1, length)))
    return rows


def gradients_of_separate_rows(model: Any, rows: list[dict[str, list[int]]]) -> tuple[float, dict[str, Any]]:
    """Sum over the targets of rows that go through the model one by one, written out plainly."""
    model = copy.deepcopy(model)
    total = torch.zeros(())
    for one in rows:
        logits = model(input_ids=torch.tensor([one["input_ids"]])).logits[0]
        for position in range(1, len(one["labels"])):
            if one["labels"][position] != -100:
                total = total - F.log_softmax(logits[position - 1], -1)[one["labels"][position]]
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("padding", ["longest", "max_length"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "mixtral"])
def test_gradients_of_a_pack_are_the_sum_over_its_rows(family: str, attention: str, padding: str) -> None:
    model = tiny_model(family, attn_implementation=attention, use_cache=True)
    rows = drawn_rows(6)
    loss, expected = gradients_of_separate_rows(model, rows)
    batch = fs.PackedCollator(max_length=128, padding=padding)(rows)
    targets = sum(label != -100 for one in rows for label in one["labels"][1:])
    packed = fs.causal_lm_loss(model, batch, num_targets=targets) * targets
    packed.backward()
    actual = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert model.config.use_cache is True
    assert float(packed.detach()) == pytest.approx(loss, rel=1e-6)
    assert largest_error(actual, expected) < 1e-6


def test_the_plain_call_leaks_so_that_the_test_above_can_fail() -> None:
    model = tiny_model("llama", use_cache=True)
    rows = drawn_rows(6)
    _, expected = gradients_of_separate_rows(model, rows)
    batch = fs.PackedCollator(max_length=128)(rows)
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    F.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], reduction="sum").backward()
    actual = {name: p.grad for name, p in model.named_parameters()}
    assert largest_error(actual, expected) > 1e-2, "with a cache, transformers does not look at position_ids"


# --- verify_packing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "mixtral"])
def test_models_that_keep_rows_apart_pass(family: str, attention: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, attn_implementation=attention, use_cache=True).to(dtype)
    report = fs.verify_packing(model, max_length=100)
    assert report.error < (2e-6 if dtype == torch.float32 else 3e-2)
    assert report.leak == 0 or report.leak < 4 * report.noise
    assert report.unpacked > 0.5


def fresh(cls: str, **config: Any) -> Any:
    """A model as its class initialises it: the smallest signal there is."""
    torch.manual_seed(0)
    config_cls = getattr(tf, cls.replace("ForCausalLM", "") + "Config")
    return getattr(tf, cls)(config_cls(vocab_size=VOCAB, **config))


SMALL = {"hidden_size": 32, "num_hidden_layers": 3}
HEADS = {**SMALL, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
LEAKING = {
    "state (Mamba)": lambda: fresh("MambaForCausalLM", **SMALL),
    "state (Mamba 2)": lambda: fresh("Mamba2ForCausalLM", **SMALL, num_heads=8, head_dim=8, n_groups=2),
    "state (RWKV)": lambda: fresh("RwkvForCausalLM", **SMALL, attention_hidden_size=32),
    "some layers with a state (Jamba)": lambda: fresh(
        "JambaForCausalLM", **HEADS, attn_layer_period=2, attn_layer_offset=1, num_experts=2
    ),
    "convolution of three tokens (LFM2)": lambda: fresh(
        "Lfm2ForCausalLM", **HEADS, layer_types=["conv", "full_attention", "conv"]
    ),
    "ALiBi (Bloom)": lambda: fresh("BloomForCausalLM", hidden_size=32, n_layer=3, n_head=4),
    "ALiBi (Falcon)": lambda: fresh("FalconForCausalLM", **SMALL, num_attention_heads=4, alibi=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LEAKING)
def test_models_that_do_not_keep_rows_apart_are_refused(kind: str, dtype: torch.dtype) -> None:
    model = LEAKING[kind]().to(dtype)
    with pytest.raises(fs.PackingError, match=f"not kept apart by {type(model).__name__} with .* attention"):
        fs.verify_packing(model, max_length=64)


class Wrapped(tf.LlamaForCausalLM):
    """Llama with another way to call it."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool = True, **inputs: Any) -> Any:
        return super().forward(input_ids, **self.changed(input_ids, {"use_cache": use_cache, **inputs}))


class Deaf(Wrapped):
    def changed(self, input_ids: torch.Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "position_ids": None}


class Caching(Wrapped):
    def changed(self, input_ids: torch.Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "use_cache": True}


class CountsByIndex(Wrapped):
    """Keeps rows apart, but position 0 is that of the pack."""

    def changed(self, input_ids: torch.Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        if (positions := inputs.get("position_ids")) is None:
            return inputs
        starts = (positions == 0).cumsum(-1)
        seen = (starts[:, :, None] == starts[:, None]).tril()[:, None]
        index = torch.arange(input_ids.shape[1])[None]
        return {**inputs, "position_ids": index**2 // 16, "attention_mask": seen}


class NoPositions(tf.LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:  # type: ignore[override]
        return super().forward(input_ids, use_cache=use_cache)


class Breaks(Wrapped):
    def changed(self, input_ids: torch.Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("no kernel for this")


@pytest.mark.parametrize(
    ("cls", "match"),
    [
        (Deaf, "not kept apart by Deaf"),
        (Caching, "not kept apart by Caching"),
        (CountsByIndex, "not kept apart by CountsByIndex"),
        (NoPositions, "NoPositions takes no position_ids"),
        (Breaks, "Breaks with sdpa attention cannot run a pack of 64 tokens.*no kernel for this"),
    ],
)
def test_what_a_forward_may_do_wrong_is_found(cls: type, match: str) -> None:
    model = tiny_model("llama")
    model.__class__ = cls
    with pytest.raises(fs.PackingError, match=match):
        fs.verify_packing(model, max_length=16)


def test_an_effect_that_only_long_packs_have_is_found_at_their_length() -> None:
    # Llama 4 scales the attention of its layers without rotation by a token's index, from floor_scale on.
    options = {**HEADS, "num_hidden_layers": 4, "head_dim": 8, "floor_scale": 96, "attn_scale": 2.0}
    torch.manual_seed(0)
    config = tf.Llama4TextConfig(vocab_size=VOCAB, intermediate_size_mlp=48, num_local_experts=2, **options)
    model = tf.Llama4ForCausalLM(config)
    assert fs.verify_packing(model, max_length=64).error < 1e-5
    with pytest.raises(fs.PackingError, match="shorter max_length if only long packs fail"):
        fs.verify_packing(model, max_length=400)


def test_weights_that_tell_nothing_are_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    with pytest.raises(fs.PackingError, match="cannot be told"):
        fs.verify_packing(model, max_length=64)
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with pytest.raises(fs.PackingError, match="not finite"):
        fs.verify_packing(model, max_length=64)


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(fs.PackingError, match="load its weights first"):
        fs.verify_packing(tiny_model("llama").to("meta"), max_length=64)


@pytest.mark.parametrize("max_length", [0, True, 4.0, None])
def test_bad_lengths_of_the_probe_are_refused(max_length: Any) -> None:
    with pytest.raises(ValueError, match="max_length"):
        fs.verify_packing(tiny_model("llama"), max_length=max_length)


def test_a_pack_may_be_longer_than_the_positions_a_model_has() -> None:
    model = tiny_model("gpt2")
    assert fs.verify_packing(model, max_length=1000).error < 1e-5, "128 positions, rows of at most 128"


def state_of(model: Any) -> dict[str, Any]:
    return {
        "parameters": {n: full(p.detach()).clone() for n, p in model.named_parameters()},
        "gradients": {
            n: None if p.grad is None else full(p.grad).clone() for n, p in model.named_parameters()
        },
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "lengths": {n: getattr(m, "max_seq_len_cached", None) for n, m in model.named_modules()},
        "random": torch.get_rng_state(),
        "cache": model.config.use_cache,
    }


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


class Counting(Wrapped):
    def changed(self, input_ids: torch.Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        self.calls.add_(1)
        return inputs


def test_the_model_is_left_as_it_was() -> None:
    # Dynamic frequencies are buffers that a long forward replaces; dropout is random.
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = tiny_model("llama", rope_parameters=rope, attention_dropout=0.5, max_position_embeddings=64)
    model.model.layers[1].eval()
    model(input_ids=torch.randint(0, VOCAB, (1, 9))).logits.sum().backward()
    before = state_of(model)
    model.model.rotary_emb(torch.zeros(1, 90, 8), torch.arange(90)[None])
    assert not torch.equal(model.model.rotary_emb.inv_freq, before["buffers"]["model.rotary_emb.inv_freq"])
    model.model.rotary_emb(torch.zeros(1, 9, 8), torch.arange(9)[None])
    before = state_of(model)
    fs.verify_packing(model, max_length=64)
    assert_same(state_of(model), before)
    model.register_buffer("calls", torch.zeros(()))
    model.__class__ = Counting
    before = state_of(model)
    fs.verify_packing(model, max_length=64)
    assert_same(state_of(model), before)
    model.__class__ = Caching
    with pytest.raises(fs.PackingError):
        fs.verify_packing(model, max_length=64)
    assert_same(state_of(model), before)


def verify_sharded(family: str, dtype: torch.dtype | None, sac_ratio: str, attention: str) -> dict[str, Any]:
    model = tiny_model(family, attn_implementation=attention, use_cache=True)
    fs.apply_sac(model, sac_ratio)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    fs.shard_model(model, mesh=fs.build_mesh(device_type="cpu"), mp_policy=policy)
    rows = drawn_rows(6)
    batch = fs.PackedCollator(max_length=128)(rows)
    before = state_of(model)
    report = fs.verify_packing(model, max_length=100)
    assert_same(state_of(model), before)
    fs.causal_lm_loss(model, batch, num_targets=1).backward()  # the mean over ranks is that of one
    gradients = {name: full(p.grad) for name, p in model.named_parameters()}
    return {"report": vars(report), "gradients": gradients if dtype is None else None}


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("mixtral", "eager"), ("gpt2", "sdpa")])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_sharded_models_are_verified_and_train_as_separate_rows_do(
    family: str, attention: str, dtype: torch.dtype | None
) -> None:
    results = run_distributed(verify_sharded, 2, family, dtype, "1/3", attention)
    for result in results:
        assert result["report"] == results[0]["report"]
        assert result["report"]["tolerance"] == (6e-2 if dtype else 1e-4), "the dtype that it computes in"
    if dtype is None:
        _, expected = gradients_of_separate_rows(
            tiny_model(family, attn_implementation=attention), drawn_rows(6)
        )
        # Every rank has the whole pack, so the loss counts twice and is averaged once.
        actual = {name: gradient / 2 for name, gradient in results[0]["gradients"].items()}
        assert largest_error(actual, expected) < 1e-6


def refuse_sharded(broken_rank: int | None) -> tuple[str, str]:
    import torch.distributed as dist

    model = tiny_model("llama")
    fs.shard_model(model, mesh=fs.build_mesh(device_type="cpu"))
    if broken_rank is None:
        torch.manual_seed(0)
        model = LEAKING["state (Mamba)"]()
        fs.shard_model(model, mesh=fs.build_mesh(device_type="cpu"))
    elif dist.get_rank() == broken_rank:
        forward = model.forward
        model.forward = lambda *args, position_ids=None, **kwargs: forward(*args, **kwargs)
    try:
        fs.verify_packing(model, max_length=64)
    except fs.PackingError as error:
        return str(error), "".join(getattr(error, "__notes__", []))
    return "", ""


@pytest.mark.parametrize("broken_rank", [None, 0, 2])
def test_all_ranks_reach_one_verdict(broken_rank: int | None) -> None:
    verdicts = run_distributed(refuse_sharded, 3, broken_rank)
    assert len(set(verdicts)) == 1
    name = "Mamba" if broken_rank is None else "Llama"
    assert f"not kept apart by {name}ForCausalLM" in verdicts[0][0]
    if broken_rank is not None:
        assert f"rank {broken_rank} failed first" in verdicts[0][1]


# --- PackedSampler ----------------------------------------------------------------------------------------


def chat_lengths(count: int, *, seed: int = 0, longest: int = 512) -> tuple[list[int], list[int]]:
    """Lengths with a long tail, and targets that are between nothing and nearly all of a row."""
    generator = random.Random(seed)
    lengths = [min(longest, 2 + int(generator.lognormvariate(4, 1))) for _ in range(count)]
    return lengths, [int(length * generator.betavariate(1, 1.5)) for length in lengths]


LENGTHS, TARGETS = chat_lengths(400)


def samplers(
    ranks: int, lengths: Any = LENGTHS, targets: Any = TARGETS, **options: Any
) -> list[fs.PackedSampler]:
    options = {"max_length": 512, "num_targets": targets, **options}
    return [fs.PackedSampler(lengths, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


def take(group: list[fs.PackedSampler], rounds: int | None = None) -> list[list[list[int]]]:
    """``rounds`` packs of each rank in step, or all, reported as consumed: [round][rank][row]."""
    taken = [list(itertools.islice(sampler, rounds)) for sampler in group]
    assert len({len(packs) for packs in taken}) == 1, "as many batches on every rank"
    for sampler in group:
        sampler.mark_consumed(len(taken[0]))
    return [list(packs) for packs in zip(*taken, strict=True)]


def rows_of(rounds: list[list[list[int]]]) -> Counter[int]:
    return Counter(row for one in rounds for pack in one for row in pack)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_an_epoch_has_every_row_once(ranks: int, shuffle: bool) -> None:
    group = samplers(ranks, shuffle=shuffle)
    lengths = [len(sampler) for sampler in group]
    rounds = take(group)
    assert lengths == [len(rounds)] * ranks
    assert rows_of(rounds) == Counter(range(400))
    assert all(pack and sum(LENGTHS[row] for row in pack) <= 512 for one in rounds for pack in one)
    fewest = len(fs.pack_lengths(LENGTHS, 512))
    assert len(rounds) == -(-fewest // ranks)
    assert {(sampler.epoch, sampler.position) for sampler in group} == {(1, 0)}
    again = take(group)
    assert rows_of(again) == Counter(range(400))
    assert (again == rounds) is (not shuffle)


@pytest.mark.parametrize("later", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_resuming_in_an_epoch_loses_no_row_and_sees_none_twice(ranks: int, later: int) -> None:
    whole = take(samplers(ranks))
    for done in (1, len(whole) // 2, len(whole) - 1):
        first = samplers(ranks)
        start = take(first, done)
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in first]
        assert states == [states[0]] * ranks, "the state is global"
        second = samplers(later)
        for sampler in second:
            sampler.load_state_dict(states[0])
        rest = take(second)
        assert rows_of(start) + rows_of(rest) == Counter(range(400))
        if later == ranks:
            assert start + rest == whole
        assert {(sampler.epoch, sampler.position) for sampler in second} == {(1, 0)}


def test_the_number_of_ranks_may_change_again_and_again() -> None:
    seen: Counter[int] = Counter()
    state = None
    for ranks, rounds in ((2, 5), (3, 4), (3, 2), (1, 7), (4, 3), (2, None)):
        group = samplers(ranks)
        for sampler in group:
            if state is not None:
                sampler.load_state_dict(state)
        seen += rows_of(take(group, rounds))
        state = group[0].state_dict()
    assert seen == Counter(range(400))
    assert state is not None
    assert (state["epoch"], state["consumed"]) == (1, [[2, 0]])


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_fewer_rows_than_ranks_need(ranks: int) -> None:
    (rounds,) = take(samplers(ranks, lengths=[3, 4], targets=[1, 1], max_length=8))
    assert sorted(map(len, rounds)) == [0] * (ranks - 2) + [1, 1]
    batch = fs.PackedCollator(max_length=8)([])
    assert (batch["labels"] == -100).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_data_on_any_ranks(data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=40))
    first, second = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    group = samplers(first, lengths=lengths, targets=None, max_length=16)
    start = take(group, data.draw(st.integers(0, len(group[0]))))
    later = samplers(second, lengths=lengths, targets=None, max_length=16)
    for sampler in later:
        sampler.load_state_dict(group[0].state_dict())
    rest = take(later) if later[0].epoch == 0 else []
    assert rows_of(start) + rows_of(rest) == Counter(range(len(lengths)))


def spread(rounds: list[list[list[int]]], sizes: list[int]) -> tuple[float, float]:
    """(mean over rounds of the largest over the mean of ranks; the same of the sums over all rounds)."""
    loads = [[sum(sizes[row] for row in pack) for pack in one] for one in rounds]
    totals = [sum(column) for column in zip(*loads, strict=True)]
    per_round = [max(load) * len(load) / sum(load) for load in loads if sum(load)]
    return sum(per_round) / len(per_round), max(totals) * len(totals) / sum(totals)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_about_as_many_tokens_and_targets(ranks: int) -> None:
    lengths, targets = chat_lengths(20_000, seed=1, longest=2048)
    group = samplers(ranks, lengths=lengths, targets=targets, max_length=2048)
    rounds = take(group)[:-1]
    tokens_each, tokens_all = spread(rounds, lengths)
    targets_each, targets_all = spread(rounds, targets)
    assert tokens_each < 1.002
    assert tokens_all < 1.001
    assert targets_each < 1.04
    assert targets_all < 1.01
    packs = [pack for one in rounds for pack in one]
    random.Random(0).shuffle(packs)
    unsorted = [packs[i : i + ranks] for i in range(0, len(packs), ranks)]
    assert spread(unsorted, targets)[0] - 1 > 4 * (targets_each - 1), "rounds of packs as they come"


def test_rounds_do_not_come_in_the_order_of_their_targets() -> None:
    lengths, targets = chat_lengths(20_000, seed=1, longest=2048)
    rounds = take(samplers(4, lengths=lengths, targets=targets, max_length=2048))[:-1]
    sums = torch.tensor([sum(targets[row] for pack in one for row in pack) for one in rounds]).double()
    correlation = torch.corrcoef(torch.stack([sums[:-1], sums[1:]]))[0, 1]
    assert abs(float(correlation)) < 4 / math.sqrt(len(rounds))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_workers_fetched_ahead_are_not_lost(workers: int) -> None:
    rows = drawn_rows(60)
    lengths, targets = fs.row_sizes(rows)

    def loader(sampler: fs.PackedSampler) -> DataLoader[Any]:
        collate = fs.PackedCollator(max_length=48)
        return DataLoader(rows, batch_sampler=sampler, collate_fn=collate, num_workers=workers)

    def sampler(state: Any = None) -> fs.PackedSampler:
        made = fs.PackedSampler(lengths, max_length=48, num_targets=targets, seed=5)
        if state is not None:
            made.load_state_dict(state)
        return made

    whole = [batch["input_ids"].tolist() for batch in loader(sampler())]
    first = sampler()
    start = []
    for batch in itertools.islice(loader(first), 4):
        start.append(batch["input_ids"].tolist())
        first.mark_consumed(1)
    rest = [batch["input_ids"].tolist() for batch in loader(sampler(first.state_dict()))]
    assert start + rest == whole


def test_windows_report_packs_and_a_resumed_loop_continues() -> None:
    rows = drawn_rows(60)
    lengths, targets = fs.row_sizes(rows)

    def run(sampler: fs.PackedSampler, steps: int) -> list[list[Any]]:
        loader = DataLoader(rows, batch_sampler=sampler, collate_fn=fs.PackedCollator(max_length=48))
        seen: list[list[Any]] = []
        while len(seen) < steps:
            for window in fs.windows(loader, 3):
                seen.append([batch["input_ids"].tolist() for batch in window])
                if len(seen) == steps:
                    break
        return seen

    def sampler() -> fs.PackedSampler:
        return fs.PackedSampler(lengths, max_length=48, num_targets=targets, seed=5)

    per_epoch = -(-len(sampler()) // 3)
    whole = run(sampler(), 2 * per_epoch + 1)
    for stop in (1, per_epoch - 1, per_epoch, per_epoch + 1):
        first, second = sampler(), sampler()
        start = run(first, stop)
        second.load_state_dict(first.state_dict())
        assert start + run(second, len(whole) - stop) == whole, stop


def test_epochs_can_be_set_and_the_current_one_is_not_restarted() -> None:
    (sampler,) = samplers(1)
    first = list(sampler)
    sampler.mark_consumed(4)
    sampler.set_epoch(0)
    assert list(sampler) == first[4:]
    assert len(sampler) == len(first) - 4
    sampler.set_epoch(2)
    assert list(sampler) not in (first, first[4:])
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.end_epoch()
    assert sampler.epoch == 0, "it has not begun"


def test_states_of_other_data_are_refused() -> None:
    (sampler,) = samplers(1)
    state = sampler.state_dict()
    for key in ("num_rows", "max_length", "seed", "shuffle", "rows_crc32", "version"):
        with pytest.raises(ValueError, match=f"{key}={state[key] + 1}"):
            sampler.load_state_dict({**state, key: state[key] + 1})
    with pytest.raises(ValueError, match="lacks"):
        sampler.load_state_dict({"epoch": 1})
    for wrong in ({"consumed": [[1, 10**6]]}, {"consumed": [[0, 3]]}, {"consumed": [[1, -1]]}, {"epoch": -1}):
        with pytest.raises(ValueError, match="sampler state has epoch="):
            sampler.load_state_dict({**state, **wrong})
    assert sampler.state_dict() == state, "a refused state changes nothing"
    other = fs.PackedSampler(LENGTHS[::-1], max_length=512, num_targets=TARGETS[::-1])
    with pytest.raises(ValueError, match="rows_crc32"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"lengths": []}, ValueError, "no rows"),
        ({"lengths": [3, 600], "targets": None}, ValueError, "row 1 has 600 tokens"),
        ({"lengths": [3, True], "targets": None}, TypeError, r"lengths\[1\]"),
        ({"targets": TARGETS[:-1]}, ValueError, "399 entries, lengths 400"),
        ({"targets": [10**6] * 400}, ValueError, "row 0 .*cannot have 1000000 targets"),
        ({"targets": [-1] * 400}, ValueError, "row 0 .*cannot have -1 targets"),
        ({"targets": [0.5] * 400}, TypeError, r"num_targets\[0\]"),
        ({"max_length": 0}, ValueError, "capacity|max_length"),
    ],
)
def test_impossible_samplers_are_refused(options: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        samplers(1, **options)
    with pytest.raises(ValueError, match="rank must be in"):
        fs.PackedSampler(LENGTHS, max_length=512, num_replicas=2, rank=2)


def deal_on_ranks(rows: list[dict[str, list[int]]], state: Any, rounds: int | None) -> dict[str, Any]:
    lengths, targets = fs.row_sizes(rows)
    sampler = fs.PackedSampler(lengths, max_length=48, num_targets=targets)
    if state is not None:
        sampler.load_state_dict(state)
    loader = DataLoader(
        rows, batch_sampler=sampler, collate_fn=fs.PackedCollator(max_length=48), num_workers=1
    )
    seen = []
    for batch in itertools.islice(loader, rounds):
        starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
        seen += [part.tolist() for part in batch["input_ids"][0].tensor_split(starts[1:])]
        sampler.mark_consumed(1)
    return {"rows": seen, "state": sampler.state_dict()}


def test_real_ranks_share_an_epoch_and_another_number_of_them_finishes_it() -> None:
    rows = drawn_rows(60)
    first = run_distributed(deal_on_ranks, 2, rows, None, 5)
    assert first[0]["state"] == first[1]["state"]
    second = run_distributed(deal_on_ranks, 3, rows, first[0]["state"], None)
    seen = Counter(tuple(ids) for result in first + second for ids in result["rows"] if set(ids) != {0})
    assert seen == Counter(tuple(one["input_ids"]) for one in rows)
    assert {result["state"]["epoch"] for result in second} == {1}


# --- PackedStream -----------------------------------------------------------------------------------------


class Source(IterableDataset):
    """A stream that counts what is read of it."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.read, self.most_ahead = rows, 0, 0

    def __iter__(self) -> Any:
        for one in self.rows:
            self.read += 1
            yield one


class Skipping(Source):
    skipped = 0

    def skip(self, number: int) -> Source:
        self.skipped = number
        return Source(self.rows[number:])


def streams(ranks: int, rows: Any, **options: Any) -> list[fs.PackedStream]:
    options = {"max_length": 48, "buffer_size": 17, **options}
    return [fs.PackedStream(rows, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


def take_rows(group: list[fs.PackedStream], rounds: int | None = None) -> list[list[list[Any]]]:
    taken = [list(itertools.islice(stream, rounds)) for stream in group]
    assert len({len(packs) for packs in taken}) == 1
    for stream in group:
        stream.mark_consumed(len(taken[0]))
    return [list(packs) for packs in zip(*taken, strict=True)]


def ids_of(rounds: list[list[list[Any]]]) -> Counter[Any]:
    return Counter(tuple(r["input_ids"]) for one in rounds for pack in one for r in pack)


STREAMED = drawn_rows(100)
ALL_IDS = Counter(tuple(one["input_ids"]) for one in STREAMED)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_stream_is_packed_within_its_buffer(ranks: int) -> None:
    rounds = take_rows(streams(ranks, STREAMED))
    assert ids_of(rounds) == ALL_IDS
    sizes = [sum(len(r["input_ids"]) for r in pack) for one in rounds for pack in one]
    assert 0 < min(sizes) <= max(sizes) <= 48
    source = Source(STREAMED)
    next(iter(fs.PackedStream(source, max_length=48, buffer_size=17, num_replicas=1, rank=0)))
    assert source.read == 17


@pytest.mark.parametrize("later", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", [list, Source, Skipping])
def test_a_resumed_stream_loses_no_row_and_repeats_none(kind: Any, ranks: int, later: int) -> None:
    whole = take_rows(streams(ranks, STREAMED))
    for done in range(0, len(whole), 3):
        first = streams(ranks, kind(STREAMED))
        start = take_rows(first, done)
        state = json.loads(json.dumps(first[-1].state_dict()))
        source = kind(STREAMED)
        second = streams(later, source)
        for stream in second:
            stream.load_state_dict(state)
        rest = take_rows(second)
        assert ids_of(start) + ids_of(rest) == ALL_IDS
        if ranks == later:
            assert start + rest == whole
        if kind is Skipping:
            assert source.skipped == state["rows_before"]
    assert state["rows_before"] >= 17, "used-up buffers are not packed again"


def test_a_stream_goes_on_to_its_next_epoch() -> None:
    (stream,) = streams(1, STREAMED)
    whole = take_rows([stream])
    state = stream.state_dict()
    assert (state["epoch"], state["position"]) == (0, len(whole))
    (resumed,) = streams(1, STREAMED)
    resumed.load_state_dict(state)
    assert take_rows([resumed], 2) == whole[:2], "it was consumed to its end"
    assert (resumed.epoch, resumed.position) == (1, 2)
    resumed.end_epoch()
    assert (resumed.epoch, resumed.position) == (2, 0)
    assert take_rows([resumed]) == whole
    assert list(streams(1, [])[0]) == []


def test_a_stream_feeds_a_loader_and_tokenised_rows_may_come_from_workers() -> None:
    source = DataLoader(STREAMED, batch_size=None, num_workers=2)  # type: ignore[arg-type]
    (stream,) = streams(1, source)
    collator = fs.PackedCollator(max_length=48)
    batches = list(DataLoader(stream, batch_size=None, collate_fn=collator))
    expected = [collator(pack) for (pack,) in take_rows(streams(1, STREAMED))]
    assert_same(dict(enumerate(batches)), dict(enumerate(expected)))
    with pytest.raises(RuntimeError, match="num_workers=0 here"):
        list(DataLoader(stream, batch_size=None, collate_fn=collator, num_workers=1))


def test_windows_report_the_packs_of_a_stream() -> None:
    (stream,) = streams(1, STREAMED)
    loader = DataLoader(stream, batch_size=None, collate_fn=fs.PackedCollator(max_length=48))
    whole = [[b["input_ids"].tolist() for b in window] for window in fs.windows(loader, 2)]
    assert (stream.epoch, stream.position) == (1, 0)
    next(itertools.islice(fs.windows(loader, 2), 4, None))
    assert stream.position == 10
    (resumed,) = streams(1, STREAMED)
    resumed.load_state_dict(stream.state_dict())
    loader = DataLoader(resumed, batch_size=None, collate_fn=fs.PackedCollator(max_length=48))
    assert [[b["input_ids"].tolist() for b in window] for window in fs.windows(loader, 2)] == whole[5:]


def test_a_bad_row_of_a_stream_is_named() -> None:
    rows = [*STREAMED[:20], row(*range(1, 60))]
    with pytest.raises(ValueError, match="row 3 has 59 tokens") as caught:
        list(streams(1, rows)[0])
    assert "from row 17 of the stream" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="labels"):
        list(streams(1, [{"input_ids": [1]}])[0])


@pytest.mark.parametrize(
    ("options", "error"),
    [({"buffer_size": 0}, ValueError), ({"buffer_size": True}, TypeError), ({"max_length": 1.5}, TypeError)],
)
def test_impossible_streams_are_refused(options: dict[str, Any], error: type) -> None:
    with pytest.raises(error, match=next(iter(options))):
        streams(1, STREAMED, **options)
    with pytest.raises(ValueError, match="rank must be in"):
        fs.PackedStream(STREAMED, max_length=48, num_replicas=2, rank=-1)


def test_states_of_other_streams_are_refused() -> None:
    (stream,) = streams(1, STREAMED)
    state = stream.state_dict()
    for key in ("max_length", "buffer_size"):
        with pytest.raises(ValueError, match=f"{key}={state[key] + 1}"):
            stream.load_state_dict({**state, key: state[key] + 1})
    with pytest.raises(ValueError, match="lacks"):
        stream.load_state_dict({"epoch": 1})
    for wrong in ({"position": -1}, {"packs_before": 1}, {"rows_before": -1}, {"epoch": -1}):
        with pytest.raises(ValueError, match="cannot be"):
            stream.load_state_dict({**state, **wrong})


# --- real data --------------------------------------------------------------------------------------------


@pytest.mark.skipif("FSDP_SFT_DATA" not in os.environ, reason="FSDP_SFT_DATA names no folder of chat data")
@pytest.mark.parametrize("name", ["alpaca_en_demo.json", "v1_sft_demo.jsonl"])
def test_real_chats_pack_to_the_lower_bound_and_come_back_whole(name: str) -> None:
    from tests import chat_templates as ct

    text = (Path(os.environ["FSDP_SFT_DATA"]) / name).read_text()
    chats = json.loads(text) if name.endswith(".json") else list(map(json.loads, text.splitlines()))
    tokenizer = ct.byte_tokenizer("chatml")
    rows = [fs.encode_chat(chat, tokenizer, max_length=8192) for chat in chats[:300]]
    lengths, targets = fs.row_sizes(rows)
    assert targets == [one.num_targets for one in rows]
    packs = fs.pack_lengths(lengths, 8192)
    assert len(packs) <= math.ceil(sum(lengths) / 8192) + 1
    sampler = fs.PackedSampler(lengths, max_length=8192, num_targets=targets, num_replicas=1, rank=0)
    loader = DataLoader(rows, batch_sampler=sampler, collate_fn=fs.PackedCollator(max_length=8192))
    seen: Counter[Any] = Counter()
    counted = 0
    for batch in loader:
        starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
        seen.update(tuple(part.tolist()) for part in batch["input_ids"][0].tensor_split(starts[1:]))
        counted += fs.count_targets([batch])
    assert seen == Counter(tuple(one.input_ids) for one in rows)
    assert counted == sum(targets)
