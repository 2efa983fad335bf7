"""Every adapter of peft: merged by an export or written alone, as ``check_export`` says; the model stays."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fsdp_sft as fs
from tests.harness.models import FLOAT32, tiny_model
from tests.harness.ranks import device_here, mesh_here, run_distributed
from tests.harness.trained import assert_same, everything

peft = pytest.importorskip("peft", reason="adapters need the 'peft' extra")

LINEAR: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
LOW: dict[str, Any] = {**LINEAR, "r": 4}
VIRTUAL: dict[str, Any] = {"num_virtual_tokens": 3}
MERGED: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("Lora", {**LOW, "target_modules": "all-linear"}),
    "lora of the head": ("Lora", {**LOW, "target_modules": ["lm_head"]}),
    "lora of the embedding": ("Lora", {**LOW, "target_modules": ["embed_tokens"]}),
    "lora and biases": ("Lora", {**LOW, "bias": "all"}),
    "lora and tokens": ("Lora", {**LOW, "trainable_token_indices": [3, 5]}),
    "lora in checkpoint_wrapper": ("Lora", {**LOW, "modules_to_save": ["input_layernorm"]}),
    "lora in compiled blocks": ("Lora", {**LOW, "modules_to_save": ["input_layernorm"]}),
    "dora": ("Lora", {**LOW, "use_dora": True}),
    "rslora": ("Lora", {**LOW, "use_rslora": True}),
    "saved": ("Lora", {**LOW, "modules_to_save": ["lm_head", "input_layernorm"]}),
    "pissa": ("Lora", {**LOW, "init_lora_weights": "pissa"}),
    "patterns": ("Lora", {**LOW, "rank_pattern": {"q_proj": 2}, "layers_to_transform": [0]}),
    "parameters": ("Lora", {"r": 4, "target_modules": [], "target_parameters": ["q_proj.weight"]}),
    "boft": ("BOFT", LINEAR),
    "c3a": ("C3A", {**LINEAR, "block_size": 8}),
    "deft": ("Deft", LOW),
    "delora": ("Delora", LOW),
    "fourierft": ("FourierFT", {**LINEAR, "n_frequency": 8}),
    "frod": ("Frod", {**LINEAR, "progressbar": False}),
    "glora": ("Glora", LOW),
    "gralora": ("Gralora", {**LOW, "gralora_k": 2}),
    "hira": ("Hira", LOW),
    "hra": ("HRA", LOW),
    "ia3": ("IA3", {**LINEAR, "feedforward_modules": ["v_proj"]}),
    "layer norms": ("LNTuning", {"target_modules": ["input_layernorm"]}),
    "loha": ("LoHa", LOW),
    "lokr": ("LoKr", LOW),
    "miss": ("Miss", LOW),
    "oft": ("OFT", {**LINEAR, "oft_block_size": 8}),
    "peanut": ("Peanut", LOW),
    "psoft": ("Psoft", LOW),
    "pvera": ("Pvera", LOW),
    "randlora": ("RandLora", LOW),
    "road": ("Road", {**LINEAR, "group_size": 8}),
    "shira": ("Shira", LOW),
    "supertuning": ("Supertuning", {**LINEAR, "sparsity": 0.9}),
    "tinylora": ("TinyLora", LINEAR),
    "tokens": ("TrainableTokens", {"token_indices": [3, 5]}),
    "tied, with tokens": ("Lora", {**LOW, "trainable_token_indices": [3, 5]}),
    "unilora": ("UniLora", LINEAR),
    "vblora": ("VBLoRA", {**LINEAR, "num_vectors": 8, "vector_length": 8}),
    "vera": ("Vera", LOW),
    "waveft": ("WaveFT", {**LINEAR, "n_frequency": 8}),
}
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "lora with a bias": ("Lora", {**LOW, "lora_bias": True}),
    "lora after a token": ("Lora", {**LOW, "alora_invocation_tokens": [1, 2]}),
    "lora of repeated layers": ("Lora", {**LOW, "layer_replication": [[0, 2], [1, 3]]}),
    "adaption prompt": ("AdaptionPrompt", {"adapter_len": 3, "adapter_layers": 1}),
    "biases": ("Beft", LINEAR),
    "cartridge": ("Cartridge", VIRTUAL),
    "lily": ("Lily", LOW),
    "p-tuning": ("PromptEncoder", {**VIRTUAL, "encoder_hidden_size": 16}),
    "prefix": ("PrefixTuning", VIRTUAL),
    "prefix projected": ("PrefixTuning", {**VIRTUAL, "prefix_projection": True, "encoder_hidden_size": 16}),
    "prompt": ("PromptTuning", VIRTUAL),
    "tied, with lora of the head": ("Lora", {**LOW, "target_modules": ["lm_head"]}),
}
# Wrappers of blocks, as other libraries put them on: the names of all within have one component more.
WRAPPED: dict[str, Any] = {
    "lora in checkpoint_wrapper": checkpoint_wrapper,
    "lora in compiled blocks": partial(torch.compile, backend="eager"),
}
SHARDED = ("dora", "saved", "ia3", "layer norms", "vera", "tokens", "prefix", "prompt", "lora with a bias")
SHARDED += ("lora and tokens", "lora in checkpoint_wrapper", "tied, with tokens")
IDS = torch.arange(24).view(2, 12)


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=IDS.to(next(model.parameters()).device)).logits
    return logits.cpu()


def _base(name: str) -> Any:
    return tiny_model("qwen2-tied" if name.startswith("tied") else "llama")


def _adapted(name: str, kind: str, options: dict[str, Any]) -> Any:
    """A model whose adapters have values as after some steps."""
    torch.manual_seed(0)
    model = peft.get_peft_model(_base(name), getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape) * 0.05)
    return model


def _export_all(kinds: dict[str, Any], folder: str, is_sharded: bool) -> dict[str, str]:
    """What came of the exports of each model, in words; the numbers are asserted."""
    from transformers import AutoModelForCausalLM

    told = {}
    for name, (kind, options) in kinds.items():
        model = _adapted(name, kind, options)
        if name in WRAPPED:
            inner = model.get_base_model().model
            inner.layers = torch.nn.ModuleList(map(WRAPPED[name], inner.layers))
        if is_sharded:
            fs.shard_model(model.to(device_here()), mesh=mesh_here(), mp_policy=FLOAT32)
        logits, modules, state = _logits(model), list(model.modules()), everything(model)
        told[name] = "merged"
        for call in (
            partial(fs.check_export, f"{folder}/{name}", model=model),
            partial(fs.export_hf, model, f"{folder}/{name}", dtype=None),
        ):
            try:
                call()
            except ValueError as error:
                told[name] = str(error)
            else:
                assert told[name] == "merged", f"{name} is exported, and refused by check_export"
        if told[name] == "merged":
            merged = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float32)
            assert float((_logits(merged) - logits).abs().max()) < 1e-4, name
            assert (
                dict(fs.iter_hf_tensors(model, dtype=None)).keys() == dict(merged.named_parameters()).keys()
            ), name
        again = peft.PeftModel.from_pretrained(
            _base(name), fs.export_adapter(model, f"{folder}/{name} alone")
        )
        assert float((_logits(again) - logits).abs().max()) < 1e-5, name
        assert [id(module) for module in model.modules()] == [id(module) for module in modules], name
        assert_same(everything(model), state)
        assert torch.equal(_logits(model), logits), name
    return told


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_are_merged_or_written_alone_and_stay_as_they_were(ranks: int, tmp_path: Path) -> None:
    """peft's own forward does not take shards of some kinds, which are tried unsharded."""
    kinds = {name: kind for name, kind in (MERGED | ALONE).items() if ranks == 1 or name in SHARDED}
    (told, *_) = run_distributed(_export_all, ranks, kinds, str(tmp_path), ranks > 1)
    for name, words in told.items():
        assert ("merged" if name in MERGED else "export_adapter") in words, name
