"""What experts are given, counted beside a plain model."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf

import fsdp_sft as fs
from fsdp_sft.experts import ExpertLoad
from fsdp_sft.experts.counter import counter_of
from tests.harness.architectures import class_names, quiet, tiny_architecture
from tests.harness.long_rows import PACKED, PADDED, batch_of, rows_of
from tests.harness.models import FLOAT32, VOCAB, full, tiny_model
from tests.harness.ranks import device_here, mesh_here, on_ranks

LENGTHS = [[[9, 3], [12, 1]], [[4, 7], [2, 10]], [[5], [8, 8]], [[11, 2], [6]]]


def _with_biases(**overrides: Any) -> Any:
    torch.manual_seed(0)
    config = tf.DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        **overrides,
    )
    model = tf.DeepseekV3ForCausalLM(config).train()
    torch.manual_seed(1)
    for block in model.model.layers[1:]:
        torch.nn.init.normal_(block.mlp.gate.weight)
        block.mlp.gate.e_score_correction_bias[:2] = 0.5  # these two have nearly all
    return model


def _rows(share: int, micro_batch: int) -> Any:
    return rows_of(LENGTHS[share][micro_batch], seed=10 * share + micro_batch)


def _batch(share: int, micro_batch: int, kind: str) -> dict[str, torch.Tensor]:
    if kind == PADDED:
        return batch_of(_rows(share, micro_batch), PADDED)
    collate = fs.PackedCollator(max_length=24, pad_to_multiple_of=24)
    return collate([{"input_ids": i.tolist(), "labels": j.tolist()} for i, j in _rows(share, micro_batch)])


def _plain_counts(model: Any, shares: int) -> list[list[int]]:
    """Choices of each expert by layer, of all rows of a window one by one."""
    model = copy.deepcopy(model).eval()
    experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    counts = [[0] * module.num_experts for module in experts]

    def note(layer: list[int], args: Any) -> None:
        for expert in args[1].flatten().tolist():
            layer[expert] += 1

    for module, layer in zip(experts, counts, strict=True):
        module.register_forward_pre_hook(lambda _, args, layer=layer: note(layer, args))
    with torch.no_grad():
        for share in range(shares):
            for micro_batch in range(2):
                for ids, _ in _rows(share, micro_batch):
                    model(input_ids=ids[None])
    return counts


@pytest.mark.parametrize(
    ("ranks", "shape", "kind", "options"),
    [
        (1, {}, PADDED, "sac watched first"),
        (2, {}, PACKED, "operations"),
        (2, {"cp": 2}, PACKED, "sac offloaded"),
        (4, {"dp_replicate": 2}, PADDED, ""),
        (1, {}, PADDED, "sac compile"),
        pytest.param(2, {}, PADDED, "sac compile", marks=pytest.mark.slow),
        pytest.param(2, {}, PADDED, "operations compile watched first", marks=pytest.mark.slow),
    ],
)
@on_ranks(timeout=400)
def test_every_choice_is_counted_once(ranks: int, shape: Any, kind: str, options: str) -> None:
    cp = shape.get("cp", 1)
    share, shares = dist.get_rank() // cp, dist.get_world_size() // cp
    model = _with_biases()
    expected = _plain_counts(model, shares)
    model = model.to(device_here())
    if "operations" in options:
        fs.apply_sac(model, save="self_attn", offload="offloaded" in options)
    elif "sac" in options:
        fs.apply_sac(model, 1, offload="offloaded" in options)
    if "watched first" in options:
        fs.watch_experts(model)
    if "compile" in options:
        fs.compile_blocks(model, backend="aot_eager")
    mesh = mesh_here(**shape)
    fs.shard_model(model, mesh=mesh, mp_policy=FLOAT32)
    if cp > 1:
        fs.use_context_parallel(model, mesh=mesh)
    watched = fs.watch_experts(model)
    assert watched == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    window = [_batch(share, m, kind) for m in range(2)]
    for _ in range(2):  # each window by itself
        fs.evaluate(model, window)
        result = fs.train_step(model, window, optimizer)
        assert result.expert_load == ExpertLoad(tuple(watched), tuple(map(tuple, expected)))


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(fs.UnsupportedModelError, match="takes what a router has chosen"):
        fs.watch_experts(tiny_model("llama"))
    with quiet(), pytest.raises(fs.UnsupportedModelError, match="takes what a router has chosen"):
        fs.watch_experts(tiny_architecture("Llama4ForCausalLM"))
    mixtral = tiny_model("mixtral").to(device_here())
    batch = {name: value.to(device_here()) for name, value in _batch(0, 0, PADDED).items()}
    optimizer = torch.optim.SGD(mixtral.parameters(), lr=0.0)
    assert fs.train_step(mixtral, [batch], optimizer).expert_load is None
    fs.watch_experts(mixtral)
    load = fs.train_step(mixtral, [batch], optimizer).expert_load
    assert sum(load.counts[0]) == 2 * 12
    twin = copy.deepcopy(mixtral)
    assert counter_of(twin) is None
    assert fs.train_step(twin, [batch], torch.optim.SGD(twin.parameters(), lr=0.0)).expert_load is None
    assert fs.train_step(mixtral, [batch], optimizer).expert_load == load


@on_ranks(1)
def test_biases_stay_in_float32_as_in_a_plain_model(tmp_path: Path) -> None:
    tf.AutoModelForCausalLM.from_config(_with_biases().config).save_pretrained(tmp_path)
    plain = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = {name: buffer.dtype for name, buffer in plain.named_buffers()}
    assert torch.float32 in {d for name, d in expected.items() if name.endswith("correction_bias")}
    for model in (
        fs.load_pretrained(tmp_path, mesh=mesh_here()),
        fs.shard_model(_with_biases(), mesh=mesh_here()),
    ):
        assert {name: buffer.dtype for name, buffer in model.named_buffers()} == expected


def test_what_a_copy_computes_beside_the_model_is_not_counted() -> None:
    model = tiny_model("mixtral").to(device_here())
    fs.watch_experts(model)
    teacher = copy.deepcopy(model).eval()
    batch = {name: value.to(device_here()) for name, value in _batch(0, 0, PADDED).items()}

    def distilled(student: Any, given: Any) -> torch.Tensor:
        inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            wanted = teacher(**inputs).logits
        apart = (student(**inputs).logits - wanted).square().mean(-1).sum()
        return apart + fs.loss_sum(student, given)[0] * 0

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    load = fs.train_step(model, [batch], optimizer, loss_fn=distilled, check=False).expert_load
    assert sum(load.counts[0]) == 2 * 2 * 12  # the student's two forwards


def test_a_mask_of_other_tokens_is_refused() -> None:
    model = tiny_model("mixtral").to(device_here())
    fs.watch_experts(model)
    batch = {name: value.to(device_here()) for name, value in _batch(0, 0, PADDED).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(fs.ModelLossError, match="saw 16 tokens, and the batch's attention_mask has 18"):
        fs.train_step(
            model,
            [batch],
            optimizer,
            loss_fn=lambda m, b: m(input_ids=b["input_ids"][:, :-1]).logits.square().sum(),
            check=False,
        )


@pytest.mark.slow
def test_mixtures_of_transformers_can_be_watched() -> None:
    watched, others = 0, set()
    with quiet():
        for name in class_names():
            try:
                model = tiny_architecture(name)
            except ValueError:
                continue
            if not any("expert" in fqn for fqn, _ in model.named_modules()):
                continue
            try:
                watched += bool(fs.watch_experts(model))
            except fs.UnsupportedModelError:
                others.add(name)
    assert watched >= 50
    assert others <= {"Llama4ForCausalLM", "JetMoeForCausalLM", "DogeForCausalLM"}, others


def test_numbers_of_a_load() -> None:
    load = ExpertLoad(("a", "b", "c"), ((6, 2, 0, 0), (2, 2, 2, 2), (8, 0)))
    assert (load.largest_over_mean, load.dead) == ((3.0, 1.0, 2.0), (2, 0, 1))
    assert load.summary() == {"expert_load_largest_over_mean": 3.0, "dead_experts": 3.0}


# --- how experts are computed: by transformers' own setting, unless that fails or is not exact enough ------


def _mixture(**sizes: int) -> Any:
    return tiny_model("mixtral", num_hidden_layers=2, **sizes)


def _runs(model: Any, way: str) -> bool:
    """Whether transformers trains the model's experts in that way."""
    model.set_experts_implementation(way)
    rows = torch.arange(3, 43).view(2, 20)
    try:
        model(input_ids=rows, labels=rows).loss.backward()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [{}, {"intermediate_size": 50}, {"intermediate_size": 52}])
def test_the_setting_stays_where_it_runs(
    dtype: torch.dtype, sizes: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    model = _mixture(**sizes).to(dtype)
    runs = _runs(model, "grouped_mm")
    with caplog.at_level(logging.INFO, logger="fsdp_sft.experts"):
        assert fs.prepare_experts(model) == ("grouped_mm" if runs else "eager")
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("fsdp_sft")]
    assert line.startswith(f"experts of MixtralForCausalLM: {'grouped_mm' if runs else 'eager'}; ")
    assert _runs(model, model.config._experts_implementation)


def test_by_name() -> None:
    model = _mixture()
    for way in ("batched_mm", "eager", "grouped_mm"):
        prepared = fs.prepare_experts(model, impl=way), fs.prepare_experts(model)
        assert (*prepared, model.config._experts_implementation) == (way, way, way)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        fs.prepare_experts(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"impl must be 'auto' or one of 'eager', .*, got 'fastest'"):
        fs.prepare_experts(_mixture(), impl="fastest")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_with_biases_are_as_exact_as_eager_ones(dtype: torch.dtype) -> None:
    """Beside the experts of a model, by their own forwards: GPT-OSS's biases add up tokens in the dtype."""
    torch.manual_seed(0)
    config = tf.GptOssConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = tf.GptOssForCausalLM(config).to(dtype)
    experts = model.model.layers[0].mlp.experts
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.2)
    hidden, upstream = torch.randn(512, 32).to(dtype), torch.randn(512, 32).to(dtype)
    top = torch.rand(512, 4).topk(2)
    weights = top.values.to(dtype)

    def gradients(way: str, of: Any, wide: torch.dtype) -> list[torch.Tensor]:
        model.set_experts_implementation(way)
        of.zero_grad()
        of(hidden.to(wide), top.indices, weights.to(wide)).backward(upstream.to(wide))
        return [p.grad.double() for p in of.parameters()]

    grouped, eager = gradients("grouped_mm", experts, dtype), gradients("eager", experts, dtype)
    exact = gradients("eager", experts.double(), torch.float64)
    ratios = [float((g - x).norm() / (e - x).norm()) for g, e, x in zip(grouped, eager, exact, strict=True)]
    model.to(dtype).set_experts_implementation("grouped_mm")
    chosen = fs.prepare_experts(model)
    assert (chosen == "eager") == (max(ratios) > 2), (chosen, ratios)


@pytest.mark.accelerator
@on_ranks(2)
def test_of_a_sharded_model() -> None:
    model = _mixture()
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    fs.shard_model(model.to(device_here()), mesh=mesh_here())
    assert fs.prepare_experts(model) == "grouped_mm"
    torch.testing.assert_close({name: full(p) for name, p in model.named_parameters()}, plain, rtol=0, atol=0)
    rows = torch.arange(3, 43).view(2, 20).to(device_here())
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        before = model(input_ids=rows).logits
        assert fs.prepare_experts(model) == "grouped_mm"
        assert torch.equal(model(input_ids=rows).logits, before)
