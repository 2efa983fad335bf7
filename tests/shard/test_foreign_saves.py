"""Methods of transformers and peft that would write, send or change one rank's shards."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.models import tiny_model
from tests.harness.ranks import run_distributed

FOREIGN: dict[str, Any] = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "with its shards": lambda model, folder: model.save_pretrained(folder, state_dict=model.state_dict()),
}


def _refused(folder: Path, *, lora: bool) -> None:
    model: Any = tiny_model("llama")
    if lora:
        model = fs.add_adapters(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    fs.shard_model(model, mesh=mesh_here())
    for one in (model, model.get_base_model() if lora else model):
        for name, call in FOREIGN.items():
            with pytest.raises(fs.UnsupportedModelError, match="export_hf"):
                call(one, folder / "out")
            assert not (folder / "out").exists(), name
        with pytest.raises(fs.UnsupportedModelError, match="new_vocab_size"):
            one.resize_token_embeddings(200)
        assert one.resize_token_embeddings() is one.get_input_embeddings()
    (fs.export_adapter if lora else fs.export_hf)(model, folder / "exported")


@pytest.mark.parametrize("lora", [False, True])
def test_they_are_refused_before_anything_is_written(lora: bool, tmp_path: Path) -> None:
    run_distributed(_refused, 2, tmp_path, lora=lora)
    assert (tmp_path / "exported" / ("adapter_config.json" if lora else "config.json")).exists()
