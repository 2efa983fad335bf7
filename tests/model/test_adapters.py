"""Adapters, frozen parts and towers of vision-language models, beside plain training with peft."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from safetensors.torch import load_file

import fsdp_sft as fs
from fsdp_sft._model.blocks import towers_of
from fsdp_sft.shard.packing import choose_packed
from tests.harness import multimodal
from tests.harness.composed import composed
from tests.harness.hf_folders import plain, save_tiny
from tests.harness.models import FLOAT32, TINY, full, largest_error, oracle_loss, ragged_batches, tiny_model
from tests.harness.ranks import device_here, mesh_here, on_ranks, run_distributed
from tests.harness.trained import assert_same, everything, spread

peft = pytest.importorskip("peft", reason="adapters need the 'peft' extra")
pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


def _config(**overrides: Any) -> Any:
    common = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**common | overrides)


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@on_ranks(2)
def test_a_sharded_model_with_adapters_generates(tmp_path: Path) -> None:
    """What the plain one does: peft calls the base model, and so goes past the root that was sharded."""
    plain = fs.add_adapters(tiny_model("llama", use_cache=True), _config())
    for parameter in plain.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(
                parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel())
            )
    model = copy.deepcopy(plain)
    fs.apply_sac(model, "1/3")
    fs.shard_model(model.to(device_here()), mesh=mesh_here(), mp_policy=FLOAT32)
    optimizer, batches = _optimizer(model), ragged_batches(4)
    before = fs.train_step(model, batches, optimizer).loss
    prompt = torch.arange(5, 15).view(2, 5)
    options: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    saved = {name: full(value) for name, value in model.state_dict().items()}
    plain.load_state_dict({name: value.cpu() for name, value in saved.items()})
    expected = plain.eval().generate(input_ids=prompt, **options)
    model.eval()
    found = model.generate(input_ids=prompt.to(device_here()), synced_gpus=True, **options)
    assert torch.equal(found.cpu(), expected)
    model.train()
    assert fs.train_step(model, batches, optimizer).loss < before
    fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
    fs.load_checkpoint(tmp_path, model=model, optimizer=optimizer)


def test_what_cannot_be_done_says_what_to_do(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base")
    base, tied = (
        fs.add_adapters(model, _config(target_modules=["embed_tokens"]))
        for model in (fs.build_meta_model(tmp_path / "base"), tiny_model("qwen2-tied"))
    )
    for call, error, message in (
        (
            lambda: fs.add_adapters(fs.build_meta_model(tmp_path / "base"), _config(use_dora=True)),
            ValueError,
            "use_dora.*from_pretrained",
        ),
        (
            lambda: fs.add_adapters(
                fs.build_meta_model(tmp_path / "base"), _config(init_lora_weights="pissa")
            ),
            ValueError,
            "pissa.*from_pretrained",
        ),
        (
            lambda: fs.load_weights(base, tmp_path / "base"),
            fs.CheckpointMismatchError,
            r"lora_embedding_A.*from_pretrained",
        ),
        (lambda: fs.export_hf(tied, tmp_path / "tied"), ValueError, r"tied.*export_adapter"),
        (lambda: fs.export_adapter(tiny_model("llama"), tmp_path / "none"), TypeError, "export_hf"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert not list(tmp_path.glob(".tmp-*"))


@on_ranks(2)
def test_nothing_is_saved_loaded_or_trained_while_adapters_are_merged(tmp_path: Path) -> None:
    config = _config(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model: Any = fs.shard_model(fs.add_adapters(tiny_model("llama"), config), mesh=mesh_here())
    optimizer = _optimizer(model)
    batches = ragged_batches(2)[dist.get_rank() :: 2]
    fs.train_step(model, batches, optimizer)
    fs.save_checkpoint(tmp_path / "before", 1, model=model, optimizer=optimizer)
    fs.save_full_state_dict(model, tmp_path / "before.safetensors")
    fs.export_hf(model, tmp_path / "unmerged")
    model.merge_adapter()
    fs.export_hf(model, tmp_path / "merged")
    for call, what in (
        (lambda: fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer), "saving a checkpoint"),
        (lambda: fs.save_full_state_dict(model, tmp_path / "full.safetensors"), "saving the full state"),
        (
            lambda: fs.load_checkpoint(tmp_path / "before", model=model, optimizer=optimizer),
            "loading a checkpoint",
        ),
        (lambda: fs.load_full_state_dict(model, tmp_path / "before.safetensors"), "loading the full state"),
        (lambda: fs.train_step(model, batches, optimizer), "training"),
        (lambda: (fs.evaluate(model, batches), fs.train_step(model, batches, optimizer)), "training"),
    ):
        with pytest.raises(fs.UnsupportedModelError, match=f"^{what} while adapters are merged.*q_proj"):
            call()
    model.unmerge_adapter()
    fs.train_step(model, batches, optimizer)
    fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
    exports = [load_file(tmp_path / name / "model.safetensors") for name in ("unmerged", "merged")]
    assert largest_error(*exports) < 1e-6, "an export says the same, merged or not"


def _adapted(kind: str, **options: Any) -> Any:
    return fs.add_adapters(
        tiny_model("llama"), getattr(peft, f"{kind}Config")(target_modules=["q_proj"], **options)
    )


LORA = {"r": 4, "lora_alpha": 8}
OFT = {"oft_block_size": 4}


@pytest.mark.parametrize(
    ("kind", "options", "others", "words"),
    [
        (
            "Lora",
            LORA,
            {"lora_alpha": 16},
            r"lora_alpha=8 in the step and 16 in the model, of adapter 'default'",
        ),
        ("Lora", LORA, {"r": 8}, r"r=4 in the step and 8 in the model"),
        ("Lora", LORA, {"use_rslora": True}, r"use_rslora=None in the step and True in the model"),
        (
            "Lora",
            LORA,
            {"alpha_pattern": {"layers.0": 2}},
            "alpha_pattern=None in the step and {",
        ),
        ("LoHa", {"alpha": 8}, {"alpha": 16}, "alpha=8 in the step and 16 in the model"),
        ("OFT", OFT, {"coft": True}, "coft=None in the step"),
    ],
)
def test_a_step_is_not_continued_with_other_adapters(
    kind: str, options: dict[str, Any], others: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = _adapted(kind, **options)
    fs.save_checkpoint(tmp_path, 1, model=model)
    other = _adapted(kind, **options | others)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(fs.CheckpointMismatchError, match=words):
        fs.load_checkpoint(tmp_path, model=other)
    assert_same(before, other.state_dict())
    dropout = {"lora_dropout": 0.1} if kind == "Lora" else {}  # changes nothing of what the weights mean
    again = _adapted(kind, **options, **dropout)
    fs.load_checkpoint(tmp_path, model=again)
    assert_same(model.state_dict(), again.state_dict())


# --- adapters of experts that are one tensor, with a base streamed under them ------------------------------

SIZES = {**TINY, "num_hidden_layers": 2}
SPARSE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1}
CONFIGS: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(**SIZES, **SPARSE, num_experts=4, head_dim=8),
    "mixtral": lambda: tf.MixtralConfig(**SIZES, num_local_experts=4),
    "deepseek-v3": lambda: tf.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4}, **SPARSE, **LATENT, **GROUPS
    ),
    "gpt-oss": lambda: tf.GptOssConfig(**SIZES, num_local_experts=4, head_dim=8, num_experts_per_tok=2),
}
BATCHES = ragged_batches(4)


def _lora_of_experts(every: bool) -> Any:
    """Adapters of all linear layers, or of the experts and of few others."""
    options = {"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
    if every:
        return peft.LoraConfig(target_modules="all-linear", **options)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.LoraConfig(target_modules=["o_proj"], target_parameters=experts, **options)


def _oracle_of_experts(folder: Path, every: bool, seed: int = 3) -> Any:
    base = plain(folder)
    torch.manual_seed(seed)
    return peft.get_peft_model(base, _lora_of_experts(every)).train()


def _check_experts(folder: Path, every: bool) -> tuple[float, dict[str, torch.Tensor]]:
    model = composed(
        folder / "base",
        mesh=mesh_here(),
        peft_config=_lora_of_experts(every),
        adapter_seed=3,
        frozen_dtype=torch.float32,
        mp_policy=FLOAT32,
        sac_ratio="1/2",
    )
    assert_same(everything(model), everything(_oracle_of_experts(folder / "base", every)))
    spread(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    mine = BATCHES[dist.get_rank() :: dist.get_world_size()]
    result = fs.train_step(model, mine, optimizer, max_grad_norm=None)
    fs.export_hf(model, folder / "merged", dtype=torch.float32)
    fs.export_adapter(model, folder / "adapter")
    return result.loss, {name: full(parameter).detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "every", "ranks"),
    [
        *((family, True, 2) for family in CONFIGS),
        *((family, False, 2) for family in CONFIGS if family != "llama"),
        ("mixtral", False, 1),
    ],
)
def test_they_train_and_export_as_in_plain_peft(family: str, every: bool, ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[family]())
    model.save_pretrained(tmp_path / "base")
    oracle = _oracle_of_experts(tmp_path / "base", every)
    spread(oracle)
    before = {name: p.detach().clone() for name, p in oracle.named_parameters()}
    loss = oracle_loss(oracle, BATCHES)
    loss.backward()
    got, trained = run_distributed(_check_experts, ranks, tmp_path, every)[0]
    assert got == pytest.approx(loss.item(), rel=1e-5)
    moved = {name: value - trained[name] for name, value in before.items()}
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in oracle.named_parameters()}
    torch.testing.assert_close(moved, gradients, rtol=1e-3, atol=1e-6)

    oracle.load_state_dict(trained, strict=False)
    merged = copy.deepcopy(oracle).merge_and_unload()
    assert_same(everything(type(model).from_pretrained(tmp_path / "merged")), everything(merged))
    read = peft.PeftModel.from_pretrained(plain(tmp_path / "base"), tmp_path / "adapter")
    assert_same(everything(read), everything(oracle))


# --- towers of vision-language models: found, frozen in 16 bits, left out of what is counted and adapted ---


@pytest.mark.parametrize("family", multimodal.CONFIGS)
def test_they_are_what_text_gives_no_gradient(family: str) -> None:
    model = multimodal.tiny(family)
    oracle_loss(model, BATCHES).backward()
    towers = {p for name in towers_of(model) for p in model.get_submodule(name).parameters()}
    assert towers
    for name, parameter in model.named_parameters():
        is_used = parameter.grad is not None and bool(parameter.grad.any())
        if name.endswith("e_score_correction_bias") or ".vision_moe." in name:
            continue  # no gradient moves the one; ERNIE's experts of images lie within the blocks
        assert is_used != (parameter in towers), name


def test_models_of_text_have_none() -> None:
    for family in ("llama", "gpt2", "t5", "bert", "mixtral"):
        assert fs.freeze_towers(tiny_model(family)) == []


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    multimodal.tiny("llava").save_pretrained(folder)
    return folder


@on_ranks(2)
def test_frozen_in_16_bits_unless_told(llava: Path) -> None:
    model: Any = fs.load_pretrained(llava, mesh=mesh_here(), sac_ratio="1/2")
    first = next(model.model.language_model.parameters())
    assert (model.model.vision_tower.dtype, first.dtype) == (torch.bfloat16, torch.float32)
    trained: Any = fs.load_pretrained(llava, mesh=mesh_here(), freeze_towers=False)
    assert {(p.dtype, p.requires_grad) for p in trained.parameters()} == {(torch.float32, True)}


def test_fractions_and_packing_leave_them_out() -> None:
    model = multimodal.tiny("llava")
    assert len(fs.find_blocks(model)) == 4
    fs.freeze_towers(model)
    assert fs.apply_sac(model, 1) == [f"model.language_model.layers.{i}" for i in range(2)]
    assert fs.apply_sac(model, "1/2") == ["model.language_model.layers.0"]
    packed = choose_packed(model.requires_grad_(False), {"model": model.model}, "nf4", (), reshard=True)
    assert set() < packed < {id(parameter) for parameter in model.model.language_model.parameters()}


@pytest.mark.parametrize("given", [None, ["o_proj"], ".*layers.1.*"])
def test_adapters_are_not_put_into_them_or_frozen_with_them(given: Any) -> None:
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], r=2, exclude_modules=given)
    everywhere = fs.add_adapters(multimodal.tiny("mistral3"), config)
    assert any("vision_tower" in name and "lora_" in name for name, _ in everywhere.named_parameters())
    fs.freeze_towers(everywhere)
    trained = [name for name, p in everywhere.named_parameters() if p.requires_grad]
    assert trained
    assert not [name for name in trained if "vision_tower" in name]
    model = multimodal.tiny("mistral3")
    fs.freeze_towers(model)
    adapted = {name for name, _ in fs.add_adapters(model, config).named_parameters() if "lora_" in name}
    assert adapted
    assert not [name for name in adapted if "vision_tower" in name]
    found = [any(part in name for name in adapted) for part in ("o_proj", "layers.1")]
    assert found == [given != ["o_proj"], given != ".*layers.1.*"]
    assert config.exclude_modules == (set(given) if isinstance(given, list) else given), "as it was"


def _with_pixels(batch: dict[str, Any]) -> dict[str, Any]:
    """An image, of four tokens, at the beginning of each row."""
    rows = len(batch["input_ids"])
    return {
        "input_ids": torch.cat([torch.full((rows, 4), 2), batch["input_ids"]], 1),
        "labels": torch.cat([torch.full((rows, 4), -100), batch["labels"]], 1),
        "attention_mask": torch.cat([torch.ones(rows, 4, dtype=torch.long), batch["attention_mask"]], 1),
        "pixel_values": torch.randn(rows, 3, 28, 28, generator=torch.Generator().manual_seed(0)),
    }


@pytest.mark.parametrize(
    ("freeze_towers", "pixels_in"), [(True, None), (True, 1), (False, None), (False, 0), (False, 1)]
)
@on_ranks(2)
def test_towers_that_no_forward_has_gathered(llava: Path, freeze_towers: bool, pixels_in: int | None) -> None:
    window = [ragged_batches(6)[2 * i + dist.get_rank()] for i in range(3)]
    if pixels_in is not None:
        window[pixels_in] = _with_pixels(window[pixels_in])
    found = []
    for grad_sync in ("each", "last"):
        model: Any = fs.load_pretrained(llava, mesh=mesh_here(), freeze_towers=freeze_towers)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        losses = [
            fs.train_step(model, window, optimizer, grad_sync=grad_sync, max_grad_norm=None).loss
            for _ in range(2)
        ]
        found.append((losses, {name: full(p).detach() for name, p in model.named_parameters()}))
    (each, expected), (last, trained) = found
    assert last == pytest.approx(each, rel=1e-2)
    assert each[1] < each[0]
    torch.testing.assert_close(trained, expected, rtol=2e-2, atol=2e-2)
