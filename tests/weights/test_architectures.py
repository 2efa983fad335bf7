"""Every causal LM that transformers can build, saved plainly, loaded into shards: bitwise, loss too."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.models.auto import modeling_auto

import fsdp_sft as fs
from tests import plain as plainly
from tests.harness.architectures import class_names, inputs_for, quiet, save_all, tiny_architecture
from tests.harness.hf_folders import difference, plain, tensors_of
from tests.harness.models import FLOAT32, full
from tests.harness.ranks import device_here, mesh_here, run_distributed
from tests.harness.vision import beside_text

# One of each way to be awkward: merged experts, chunked and joined projections, ties across blocks, computed
# buffers, a class of its own for each layer, and what loads wrongly when it is sliced before it is converted.
ALWAYS = [
    "BloomForCausalLM",
    "DbrxForCausalLM",
    "DeepseekV3ForCausalLM",
    "FalconForCausalLM",
    "Gemma3nForCausalLM",
    "GptOssForCausalLM",
    "HrmTextForCausalLM",
    "JambaForCausalLM",
    "MixtralForCausalLM",
    "OlmoHybridForCausalLM",
    "Phi3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MusicgenForCausalLM",
    "XGLMForCausalLM",
    "ZambaForCausalLM",
]


def _forward(model: Any) -> torch.Tensor:
    """The loss; the logits of a class that computes none."""
    torch.manual_seed(0)
    output = model(**inputs_for(model))
    return (
        torch.as_tensor(output.logits if getattr(output, "loss", None) is None else output.loss)
        .detach()
        .cpu()
    )


def _check_one(folder: Path, mesh: Any) -> list[str]:
    """How one class differs from plain transformers, its forward included."""
    oracle, model = plain(folder), fs.build_meta_model(folder)
    fs.shard_model(model, mesh=mesh, mp_policy=FLOAT32)
    fs.load_weights(model, folder)
    problems = difference(model, oracle)
    fs.shard_model(fs.build_meta_model(folder), mesh=mesh)  # the default policy groups modules otherwise
    try:
        expected = _forward(oracle)
    except Exception as error:
        return [*problems, f"plain forward: {str(error)[:150]}"]
    if not problems and not torch.equal(_forward(model), expected):
        problems.append("the loss differs")
    return problems


@quiet()
def _check_all(folder: Path, names: list[str]) -> dict[str, list[str]]:
    mesh = mesh_here()
    results: dict[str, list[str]] = {}
    for name in names:
        try:
            results[name] = _check_one(folder / name, mesh)
        except Exception as error:
            results[name] = [f"{type(error).__name__}: {str(error)[:300]}"]
    return results


@pytest.mark.parametrize(
    ("names", "world_sizes"),
    [
        (ALWAYS, [2]),
        pytest.param(class_names(), [2, 3, 4], marks=[pytest.mark.slow, pytest.mark.timeout(5400)]),
    ],
    ids=["a selection", "every causal LM"],
)
@quiet()
def test_what_plain_transformers_loads_is_loaded(
    names: list[str], world_sizes: list[int], tmp_path: Path
) -> None:
    failed = save_all(tmp_path, names)
    # Its config wants all layers to share a cache, its layers want one not to.
    assert failed.keys() <= {"Gemma4AssistantForCausalLM"}, failed
    names = [name for name in names if name not in failed]
    for world_size in world_sizes:
        by_rank = run_distributed(_check_all, world_size, tmp_path, names, timeout=1500)
        wrong = {name: [r[name] for r in by_rank] for name in names if any(r[name] for r in by_rank)}
        assert wrong == {}, f"{len(names) - len(wrong)} of {len(names)} are bitwise on {world_size} ranks"


# --- vision-language classes: what loads, trains on text and comes back, as plainly ------------------------

RATE = 0.05
NAMES = sorted(
    {
        name
        for name in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
        if isinstance(name, str) and not name.endswith("ForCausalLM")
    }
)
ENCODER_DECODERS = {
    "Florence2ForConditionalGeneration",
    "PPFormulaNetForConditionalGeneration",
    "Pix2StructForConditionalGeneration",
    "T5Gemma2ForConditionalGeneration",
    "UdopForConditionalGeneration",
    "VisionEncoderDecoderModel",
}


def _batch(name: str, config: Any) -> dict[str, torch.Tensor]:
    """Four rows of ids, none of which stands for an image or the like, and what a class wants beside them."""
    taken = {int(n) for n in re.findall(r'"\w*token\w*": (\d+)', config.to_json_string(use_diff=False))}
    ids = torch.tensor([number for number in range(3, 101) if number not in taken][:32]).view(4, 8)
    return beside_text(
        name, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    )


def _trained_plainly(name: str, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step, and the parameters after it."""
    model = plain(folder)
    fs.freeze_towers(model)
    rows = _batch(name, model.config)
    labels = rows.pop("labels")
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False  # the few layers may have no attention, which caches count by
    loss = torch.nn.functional.cross_entropy(
        model(**rows).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    found, _ = plainly.step(model, [loss], [torch.optim.SGD(model.parameters(), lr=RATE)])
    return found, {name: p.detach() for name, p in model.named_parameters()}


@quiet()
def _check_of_images(name: str, folder: Path, loss: float, expected: dict[str, torch.Tensor]) -> None:
    rank, ranks, out = dist.get_rank(), dist.get_world_size(), folder.with_name("out")
    model, oracle = fs.build_meta_model(folder), plain(folder)
    assert fs.freeze_towers(model) == fs.freeze_towers(oracle)
    fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32)
    fs.load_weights(model, folder)
    assert difference(model, oracle) == []
    try:
        fs.prepare_loss(model)
    except fs.ModelLossError:  # a forward that wants more than tokens
        fs.prepare_loss(model, compare=False)
    rows = {
        key: value.chunk(ranks)[rank].to(device_here()) for key, value in _batch(name, model.config).items()
    }
    result = fs.train_step(model, [rows], torch.optim.SGD(model.parameters(), lr=RATE), max_grad_norm=None)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    fs.export_hf(model, out, dtype=torch.float32)
    values = {key: full(parameter).detach() for key, parameter in model.named_parameters()}
    again = dict(plain(out).named_parameters())
    for key, value in values.items():
        assert torch.equal(again[key], value), key
        assert (value - expected[key]).abs().max() <= 1e-5 * expected[key].abs().max().clamp_min(1e-3), key
    assert tensors_of(out).keys() == tensors_of(folder).keys()


@pytest.mark.parametrize(
    "name",
    [
        *("LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name not in ENCODER_DECODERS),
    ],
)
@quiet()
def test_a_class_trains_on_text_and_comes_back(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    try:
        tiny_architecture(name).to(torch.bfloat16).save_pretrained(folder)
        loss, expected = _trained_plainly(name, folder)
    except Exception as error:
        pytest.skip(f"plainly: {type(error).__name__}: {str(error)[:90]}")
    run_distributed(_check_of_images, 2, name, folder, loss, expected)


@pytest.mark.parametrize("name", sorted(ENCODER_DECODERS))
@quiet()
def test_an_encoder_decoder_is_refused_by_name(name: str) -> None:
    cls = getattr(transformers, name)
    parts = {key: {"model_type": "bert"} for key in ("encoder", "decoder") if name.startswith("Vision")}
    with (
        torch.device("meta"),
        pytest.raises(fs.ModelLossError, match=f"{name} is an enc.*loss_fn"),
    ):
        fs.prepare_loss(cls(cls.config_class(**parts)))
