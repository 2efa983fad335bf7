"""Every causal LM that transformers can build, saved plainly, loaded into shards: bitwise, loss too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft.weights import build_meta_model, load_weights
from tests.harness.architectures import class_names, inputs_for, quiet, save_all
from tests.harness.device import mesh_here
from tests.harness.hf_folders import difference, plain
from tests.harness.ranks import run_distributed

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
    "XGLMForCausalLM",
    "ZambaForCausalLM",
]


# Classes of which some installed transformers builds or reads back no model, and why.
NOT_LOADABLE = {
    "Gemma4AssistantForCausalLM": "its config wants all layers to share a cache, its layers want one not to",
    "DbrxForCausalLM": "transformers 5.17 refuses the config that it wrote",
}


def _forward(model: Any) -> torch.Tensor:
    """The loss; the logits of a class that computes none."""
    torch.manual_seed(0)
    output = model(**inputs_for(model))
    result: torch.Tensor = output.logits if getattr(output, "loss", None) is None else output.loss
    return result.detach().cpu()


def _check_one(folder: Path, mesh: Any) -> list[str]:
    """How one class differs from plain transformers, its forward included."""
    oracle = plain(folder)
    model = build_meta_model(folder)
    fs.shard_model(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    load_weights(model, folder)
    problems = difference(model, oracle)
    fs.shard_model(build_meta_model(folder), mesh=mesh)  # whose default policy groups some modules otherwise
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


def _assert_all_load(folder: Path, names: list[str], world_size: int) -> None:
    """Load each class that plain transformers builds, saves and loads, and compare it on every rank."""
    failed = save_all(folder, names)
    assert failed.keys() <= NOT_LOADABLE.keys(), failed
    names = [name for name in names if name not in failed]
    by_rank = run_distributed(_check_all, world_size, folder, names, timeout=1500)
    wrong = {name: [r[name] for r in by_rank] for name in names if any(r[name] for r in by_rank)}
    print(
        f"\n{world_size} ranks: {len(names) - len(wrong)} of {len(names)} bitwise, with the forward; {failed}"
    )
    assert wrong == {}


@quiet()
def test_a_selection(tmp_path: Path) -> None:
    _assert_all_load(tmp_path, ALWAYS, 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@quiet()
def test_every_causal_lm(world_size: int, tmp_path: Path) -> None:
    _assert_all_load(tmp_path, class_names(), world_size)
