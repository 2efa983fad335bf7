"""use_varlen_attention: the same results, nothing computed between rows, and its limits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

import fsdp_sft as fs
from fsdp_sft.attention.varlen import attention
from tests.harness.architectures import class_names, tiny_architecture
from tests.harness.models import TINY, VOCAB, largest_error, ragged_batches, tiny_model
from tests.harness.packs import drawn_rows, gradients_of_separate_rows

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3", "gpt2", "mixtral"]


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks that attentions got, in order."""
    seen: list[Any] = []
    plain = attention.attend_by_row

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[4] if len(args) > 4 else kwargs["attention_mask"])
        return plain(*args, **kwargs)

    monkeypatch.setattr(attention, "attend_by_row", noting)
    return seen


def gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = fs.causal_lm_loss(model, batch, num_targets=100)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def packed(count: int = 6, *, seed: int = 3, longest: int = 24, **options: Any) -> dict[str, torch.Tensor]:
    return fs.PackedCollator(max_length=4096, **options)(drawn_rows(count, seed=seed, longest=longest))


# --- the same results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 64}], ids=["unpadded", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_pack_are_the_sum_over_its_rows(
    family: str, options: dict[str, Any], masks: list[Any]
) -> None:
    model = tiny_model(family, attn_implementation="sdpa", use_cache=True)
    rows = drawn_rows(6)
    loss, expected = gradients_of_separate_rows(model, rows)
    fs.use_varlen_attention(model)
    batch = fs.PackedCollator(max_length=128, **options)(rows)
    packed_loss = fs.causal_lm_loss(model, batch, num_targets=1)
    packed_loss.backward()
    actual = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert float(packed_loss.detach()) == pytest.approx(loss, rel=1e-6)
    assert largest_error(actual, expected) < 1e-6
    assert [isinstance(mask, attention.RowMask) for mask in masks[-3:]] == [True] * 3
    assert fs.verify_packing(model, max_length=100).error < 2e-6


def _inputs(model: Any, positions: torch.Tensor) -> dict[str, Any]:
    """What transformers' functions make a mask of."""
    return {
        "config": model.config,
        "inputs_embeds": torch.zeros(*positions.shape, 8),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions,
    }


@pytest.mark.parametrize("window", [None, 1, 5, 16, 400])
@pytest.mark.parametrize("slab", [7, 512])
def test_rows_are_those_of_the_mask_that_transformers_makes(
    window: int | None, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_SLAB", slab)
    model = tiny_model("gemma3", **({"sliding_window": window} if window else {}))
    make = create_sliding_window_causal_mask if window else create_causal_mask
    for seed in range(4):
        sequences = [packed(5, seed=10 * seed + i)["position_ids"][0] for i in range(3)]
        width = min(map(len, sequences))
        positions = torch.stack([sequence[:width] for sequence in sequences])
        inputs = _inputs(model, positions)
        model.config._attn_implementation = "sdpa"
        expected = make(**inputs)
        fs.use_varlen_attention(model)
        rows = make(**inputs)
        assert isinstance(rows, attention.RowMask)
        assert torch.equal(rows.dense(3, width), expected)
        assert torch.equal(rows[:, 0], expected[:, 0]), "DeepSeek V3.2 and others take a part of the mask"
        assert rows.shape == expected.shape
        assert torch.equal(torch.where(rows, 1, 0), expected.long())
        starts = (positions == 0).flatten().nonzero()[:, 0].tolist()
        if window != 1:  # where no token sees another, every token is a row
            assert list(rows.bounds) == [*starts, 3 * width]
        assert rows.longest == max(b - a for a, b in zip(rows.bounds, rows.bounds[1:], strict=False))
        assert rows.sliding_window <= min(rows.longest, window or rows.longest)


def test_a_mask_that_is_not_by_rows_stays_a_mask() -> None:
    model = tiny_model("llama")
    inputs = _inputs(model, packed()["position_ids"])
    for name, overlay in {
        "both ways in the first tokens": {"or_mask_function": lambda b, h, q, k: (q < 9) & (k < 9)},
        "every other key": {"and_mask_function": lambda b, h, q, k: (q - k) % 2 == 0},
        "no first key": {"and_mask_function": lambda b, h, q, k: k > 0},
    }.items():
        model.set_attn_implementation("sdpa")
        expected = create_causal_mask(**inputs, **overlay)
        fs.use_varlen_attention(model)
        actual = create_causal_mask(**inputs, **overlay)
        assert isinstance(actual, torch.Tensor), name
        assert torch.equal(actual, expected), name


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_and_generation_are_those_of_sdpa(family: str, masks: list[Any]) -> None:
    model = tiny_model(family, attn_implementation="sdpa").eval()
    batch = ragged_batches(1)[0]
    prompt = {"input_ids": batch["input_ids"][:1, :4], "attention_mask": torch.ones(1, 4, dtype=torch.int64)}

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            tokens = model.generate(**prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        return [
            tokens,
            gradients(model, batch)[1]["lm_head.weight" if family == "mixtral" else _embedding(model)],
        ]

    expected = run()
    fs.use_varlen_attention(model)
    torch.testing.assert_close(run(), expected, rtol=0, atol=0)
    assert {isinstance(mask, attention.RowMask) for mask in masks} == {False}


def _embedding(model: Any) -> str:
    weight = model.get_input_embeddings().weight
    return next(name for name, parameter in model.named_parameters() if parameter is weight)


# --- less work --------------------------------------------------------------------------------------------


def test_nothing_is_computed_between_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, int]] = []
    plain = F.scaled_dot_product_attention

    def noting(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append((query.shape[-2], key.shape[-2]))
        return plain(query, key, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    model, batch = tiny_model("llama", attn_implementation="sdpa"), packed(10, longest=200)
    width = batch["input_ids"].shape[1]
    gradients(model, batch)  # the first time with a probe of how the model computes its logits
    shapes.clear()
    gradients(model, batch)
    assert set(shapes) == {(width, width)}
    fs.use_varlen_attention(model)
    gradients(model, batch)  # another attention, another probe
    shapes.clear()
    gradients(model, batch)
    lengths = [len(row["input_ids"]) for row in drawn_rows(10, longest=200)]
    multiple = attention._MULTIPLE
    assert sorted(shapes) == sorted([(n + -n % multiple,) * 2 for n in lengths] * 3)


def test_compiled_blocks_meet_new_packs_without_new_code() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = tiny_model("gemma3", attn_implementation="sdpa")
    fs.use_varlen_attention(model)
    fs.apply_sac(model, "1/3")
    fs.compile_blocks(model, backend="aot_eager")
    plain = tiny_model("gemma3", attn_implementation="sdpa")
    for seed in range(6):
        batch = packed(3 + seed, seed=seed)
        loss, expected = gradients(plain, batch)
        actual_loss, actual = gradients(model, batch)
        assert actual_loss == pytest.approx(loss, rel=1e-6)
        assert largest_error(actual, expected) < 1e-6
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 4  # checkpointed or not, of the first shape or of any


# --- torch's varlen attention, whose kernel is for CUDA alone ---------------------------------------------


def reference_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What torch documents: ``(T, heads, D)``, rows by cumulative lengths, windows as (left, right)."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert (query.stride(-1), int(cu_seq_q[-1]), window_size[1]) == (1, len(query), 0)
    assert enable_gqa or query.shape[1] == key.shape[1]
    outs = []
    for begin, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        before = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        mask = (before >= 0) & ((before <= window_size[0]) | (window_size[0] < 0))
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gpt2"])
def test_arguments_of_the_cuda_kernel(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs)
        return reference_varlen_attn(*args, **kwargs)

    monkeypatch.setattr(attention, "varlen_attn", noting)
    monkeypatch.setattr(attention, "_has_flash", lambda device: True)
    model = tiny_model(family, attn_implementation="sdpa").to(torch.bfloat16)
    batch = packed(12, longest=40)
    loss, expected = gradients(model, batch)
    fs.use_varlen_attention(model)
    fs.verify_packing(model, max_length=64)  # which the first pack would do
    calls.clear()
    actual_loss, actual = gradients(model, batch)
    window = model.config.sliding_window - 1 if family == "gemma3" else -1
    assert family != "gemma3" or set(model.config.layer_types) == {"sliding_attention"}
    assert [call["window_size"][0] for call in calls] == [window] * 3
    assert actual_loss == pytest.approx(loss, rel=1e-2)
    assert largest_error(*[{n: g.float() for n, g in some.items()} for some in (actual, expected)]) < 4e-2
    model.float()
    gradients(model, batch)
    assert len(calls) == 3, "the kernel takes no float32"


def test_what_sdpa_refuses_is_refused_before_the_kernel_ignores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = attention.RowMask((0, 5, 12), torch.tensor([0, 5, 12], dtype=torch.int32), 7, 7, 12, True)
    inputs = torch.randn(3, 1, 4, 12, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(attention, "varlen_attn", reference_varlen_attn)
    attention.attend_by_row(torch.nn.Module(), *inputs, rows)
    monkeypatch.setitem(  # as in transformers 5.17, where it is left out without a word
        attention.AttentionInterface._global_mapping, "sdpa", lambda *_, **__: (torch.zeros(1), None)
    )
    for mask in (rows, rows.dense(1, 12), None):
        with pytest.raises(fs.PackingError, match="does not support `softcap`"):
            attention.attend_by_row(torch.nn.Module(), *inputs, mask, softcap=30.0)


def test_values_shorter_than_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = attention.RowMask((0, 5, 12), torch.tensor([0, 5, 12], dtype=torch.int32), 7, 7, 12, True)
    query, key, value = (torch.randn(1, 4, 12, size, dtype=torch.bfloat16) for size in (16, 16, 8))
    module = torch.nn.Module()
    expected = attention.attend_by_row(module, query, key, value, rows.dense(1, 12))[0]
    monkeypatch.setattr(attention, "varlen_attn", reference_varlen_attn)
    with_kernel = attention.attend_by_row(module, query, key, value, rows)[0]
    rows = attention.RowMask(rows.bounds, rows.offsets, 7, 7, 12, False)
    row_by_row = attention.attend_by_row(module, query, key, value, rows)[0]
    for actual in (with_kernel, row_by_row):
        assert actual.shape == (1, 12, 4, 8)
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


# --- refusals, and what is left behind --------------------------------------------------------------------


def test_models_whose_attention_cannot_be_replaced_are_refused() -> None:
    with pytest.raises(TypeError, match="needs a transformers model, got Linear"):
        fs.use_varlen_attention(torch.nn.Linear(2, 2))
    for model in (
        tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)),
        tf.GptOssForCausalLM(tf.GptOssConfig(**TINY, num_hidden_layers=2, head_dim=8, num_local_experts=2)),
    ):
        with pytest.raises(ValueError, match=r"runs eager attention, .* does not let it run 'sdpa'"):
            fs.use_varlen_attention(model)
        assert model.config._attn_implementation == "eager"


def test_it_can_be_undone_and_exports_do_not_have_it(tmp_path: Path) -> None:
    model = tiny_model("llama", attn_implementation="sdpa")
    before = gradients(model, packed())[0]
    fs.use_varlen_attention(model)
    model.save_pretrained(tmp_path)
    assert attention.IMPLEMENTATION not in (tmp_path / "config.json").read_text()
    model.set_attn_implementation("sdpa")
    assert gradients(model, packed())[0] == before


# --- every model ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_architecture_gives_what_it_gives_with_sdpa_or_is_refused(masks: list[Any]) -> None:
    """Logits of a pack, of all ``*ForCausalLM`` that run it with "sdpa": the same to rounding."""
    batch = packed(6, longest=12)
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    counts = {"by row": 0, "as before": 0, "refused": 0, "not run by sdpa": 0}
    for name in class_names():
        with torch.no_grad():
            try:
                model = tiny_architecture(name).float().eval()
                model.set_attn_implementation("sdpa")
                expected = model(**inputs).logits
            except Exception:
                counts["not run by sdpa"] += 1
                continue
            try:
                fs.use_varlen_attention(model)
            except ValueError:
                counts["refused"] += 1
                continue
            masks.clear()
            actual = model(**inputs).logits
        by_row = any(isinstance(mask, attention.RowMask) for mask in masks)
        counts["by row" if by_row else "as before"] += 1
        error = float((actual - expected).norm() / expected.norm())
        assert error < 1e-5, f"{name}: {error:.1e}"
    print(counts)
    assert counts["by row"] > 60
