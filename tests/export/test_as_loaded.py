"""Exports that stay quantised: copied where nothing has changed, and in 16 bits where it has."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft._tensors.boxes import local_of
from tests.harness.device import mesh_here
from tests.harness.hf_folders import plain, state_of, tensors_of
from tests.harness.models import ragged_batches
from tests.harness.quantised_folders import deepseek_folder, fp8_experts_folder, mxfp4_folder, quantised
from tests.harness.quantised_weights import FORMATS
from tests.harness.ranks import run_distributed

peft = pytest.importorskip("peft", reason="adapters need the 'peft' extra")

FLOAT32 = MixedPrecisionPolicy()
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
CHANGED = "model.layers.0.self_attn.o_proj"
SKIPS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")
MIXED = dict.fromkeys(name for name in FORMATS if name.startswith("gptq"))  # whose config lists no modules


def _frozen(folder: Path, frozen_dtype: Any = None) -> Any:
    """A model of which a norm alone is trained."""
    model: Any = fs.build_meta_model(folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "model.norm.weight")
    fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32, frozen_dtype=frozen_dtype)
    fs.load_weights(model, folder)
    with torch.no_grad():
        local_of(model.get_parameter("model.norm.weight")).add_(1)
    return model


def _change(model: Any) -> None:
    """Change one value of a frozen weight, on the rank that has it."""
    with torch.no_grad():
        local = local_of(model.get_parameter(f"{CHANGED}.weight"))
        if local.numel():
            local[0, 0] += 1


def _each_format(root: Path, out: Path) -> list[str]:
    told = []
    for name in FORMATS:
        model = _frozen(root / name / "stored")
        fs.export_hf(model, out / name / "all", format="as loaded", dtype=torch.float32)
        _change(model)
        try:
            fs.export_hf(model, out / name / "some", format="as loaded", dtype=torch.float32)
        except fs.UnsupportedModelError as error:
            told.append(f"{name}: {error}")
            continue
        again: Any = fs.load_pretrained(out / name / "some", mesh=mesh_here())
        values, expected = state_of(again), state_of(model)
        assert all(torch.equal(values[key], expected[key]) for key in expected), name
    return told


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_format(ranks: int, tmp_path: Path) -> None:
    for name, make in FORMATS.items():
        quantised(tmp_path / name, make, **SIZES)
    refused = run_distributed(_each_format, ranks, tmp_path, tmp_path / "out")[0]
    assert {line.partition(":")[0] for line in refused} == MIXED.keys()
    assert all("cannot say that model.layers.0.self_attn.o_proj" in line for line in refused)
    for name in FORMATS:
        before = tensors_of(tmp_path / name / "stored")
        settings = json.loads((tmp_path / name / "stored" / "config.json").read_text())["quantization_config"]
        for which in ("all",) if name in MIXED else ("all", "some"):
            after = tensors_of(tmp_path / "out" / name / which)
            lost = {key for key in before if key.startswith(CHANGED)} if which == "some" else set()
            assert after.keys() == (before.keys() - lost) | ({f"{CHANGED}.weight"} if lost else set()), name
            for key in before.keys() - lost:
                if "_proj" in key:
                    assert _same_bytes(after[key], before[key]), (name, key)
            config = json.loads((tmp_path / "out" / name / which / "config.json").read_text())
            said = config["quantization_config"]
            skipped = [field for field in said if said[field] != settings.get(field)]
            assert all(field in SKIPS and said[field][-1] == CHANGED for field in skipped)
            assert len(skipped) == (which == "some")


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = [tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def _lora() -> Any:
    return peft.LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM")


def _train_and_export(folder: Path, frozen_dtype: Any) -> dict[str, torch.Tensor]:
    model: Any = fs.load_pretrained(
        folder / "base", mesh=mesh_here(), peft_config=_lora(), mp_policy=FLOAT32, frozen_dtype=frozen_dtype
    )
    fs.check_export(folder / "out", model=model, format="as loaded")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                local_of(parameter).add_(0.05)
    fs.evaluate(model, ragged_batches(2))
    fs.export_hf(model, folder / "out", format="as loaded")
    fs.export_hf(model, folder / "plain", dtype=torch.float32)
    return {}


@pytest.mark.parametrize("frozen_dtype", ["stored", torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v3"])
def test_adapters_of_attention(family: str, frozen_dtype: Any, tmp_path: Path) -> None:
    (mxfp4_folder if family == "gpt-oss" else deepseek_folder)(tmp_path / "base")
    run_distributed(_train_and_export, 2, tmp_path, frozen_dtype)
    before, after = tensors_of(tmp_path / "base"), tensors_of(tmp_path / "out")
    kept = [key for key in before if "experts" in key and key.endswith(("_blocks", "_scales", "_scale_inv"))]
    assert kept
    assert all(_same_bytes(before[key], after[key]) for key in kept)
    lost = {key for key in before if "o_proj.weight_scale_inv" in key}
    assert after.keys() == before.keys() - lost
    # transformers reads MXFP4; of FP8 it takes rows // scale_rows for the block, which is not so here.
    assert " as its base is" in (tmp_path / "out" / "README.md").read_text()
    if family == "gpt-oss":
        dequantised = transformers.Mxfp4Config(dequantize=True)
        read: Any = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", quantization_config=dequantised, dtype=torch.bfloat16
        )
    else:
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        skipped = config["quantization_config"]["modules_to_not_convert"]
        assert skipped[-2:] == [f"model.layers.{layer}.self_attn.o_proj" for layer in (0, 1)]
        assert {"lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"} < set(skipped)
        read = fs.build_meta_model(tmp_path / "out", dtype=torch.bfloat16)
        read.to_empty(device="cpu")
        fs.load_weights(read, tmp_path / "out")
    expected = plain(tmp_path / "plain").state_dict()
    for name, value in read.state_dict().items():
        assert torch.equal(value, expected[name].to(value.dtype)), name


def _change_one(folder: Path, name: str) -> None:
    model: Any = fs.build_meta_model(folder / "base").requires_grad_(False)
    model.get_parameter("model.norm.weight").requires_grad_(True)
    fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32)
    fs.load_weights(model, folder / "base")
    with torch.no_grad():
        local = local_of(model.get_parameter(name))
        if local.numel():
            local.flatten()[0] += 1
    fs.export_hf(model, folder / "out", format="as loaded")
    again: Any = fs.load_pretrained(folder / "out", mesh=mesh_here(), mp_policy=FLOAT32)
    assert difference_of_states(state_of(again), state_of(model)) == []


def difference_of_states(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [key for key in expected if not torch.equal(found[key].bfloat16(), expected[key].bfloat16())]


@pytest.mark.parametrize(
    ("write", "name", "kept"),
    [
        (fp8_experts_folder, "model.layers.0.self_attn.q_proj.weight", "w1"),
        (fp8_experts_folder, "model.layers.0.mlp.experts.down_proj", "k_proj"),
        (deepseek_folder, "model.layers.1.mlp.experts.gate_up_proj", "layers.0.mlp.down_proj"),
        (mxfp4_folder, "model.layers.0.mlp.experts.down_proj", None),
    ],
    ids=["mixtral-attention", "mixtral-experts", "deepseek-experts", "gpt-oss-experts"],
)
def test_transformers_quantises_what_is_packed(
    write: Any, name: str, kept: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where transformers keeps FP8 (on a GPU), the config alone says which modules are packed."""
    torch.manual_seed(0)
    write(tmp_path / "base")
    if kept is None:  # the other half of the experts cannot stay packed alone
        with pytest.raises(fs.UnsupportedModelError, match="every weight that is packed"):
            raise fs.UnsupportedModelError(run_distributed(_told, 1, tmp_path, name)[0])
        return
    run_distributed(_change_one, 2, tmp_path, name)
    after = tensors_of(tmp_path / "out")
    assert any(kept in key and tensor.dtype == torch.float8_e4m3fn for key, tensor in after.items())
    from transformers.quantizers import quantizer_finegrained_fp8 as fp8

    def validate(self: Any, *_: Any, **__: Any) -> None:
        self.pre_quantized = True

    monkeypatch.setattr(fp8.FineGrainedFP8HfQuantizer, "validate_environment", validate)
    _, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]


def _told(folder: Path, name: str) -> str:
    with pytest.raises(fs.UnsupportedModelError) as found:
        _change_one(folder, name)
    return str(found.value)


def _refused(folder: Path) -> list[str]:
    mesh, told = mesh_here(), []
    everything = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    quantised_base = folder / "fp8 block" / "stored"
    for path, options in (
        (folder / "fp8 block" / "published", {}),
        (quantised_base, {"peft_config": everything}),
        (quantised_base, {"peft_config": _lora(), "frozen_dtype": "nf4"}),
        (quantised_base, {}),
    ):
        model: Any = fs.load_pretrained(path, mesh=mesh, **options)
        for call in (fs.export_hf, lambda model, out, **k: fs.check_export(out, model=model, **k)):
            with pytest.raises((ValueError, fs.UnsupportedModelError)) as found:
                call(model, folder / "out", format="as loaded")
            told.append(str(found.value))
    with pytest.raises(ValueError, match="got 'fp8'"):
        fs.export_hf(model, folder / "out", format="fp8")  # type: ignore[arg-type]
    model = fs.build_meta_model(quantised_base)
    fs.shard_model(model, mesh=mesh)
    with pytest.raises(ValueError, match="was loaded from none"):
        fs.export_hf(model, folder / "out", format="as loaded")
    return told


def test_what_cannot_stay_as_it_was(tmp_path: Path) -> None:
    quantised(tmp_path / "fp8 block", FORMATS["fp8 block"], **SIZES)
    told = run_distributed(_refused, 2, tmp_path)[0]
    assert all("was loaded from a checkpoint that is not quantised" in line for line in told[:2])
    assert all("leave out format='as loaded'" in line for line in told[2:]), told
    assert not (tmp_path / "out").exists()
