"""A base model that was taught to chat stops and is asked as it was trained, once it is read back."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

import fsdp_sft as fs
from tests.harness.chat_templates import CHATML, QWEN3, byte_tokenizer
from tests.harness.device import mesh_here
from tests.harness.models import tiny_model
from tests.harness.ranks import run_distributed

OLD = 2  # the model's own end, of documents
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def _model(**generation: Any) -> Any:
    model = tiny_model("llama", vocab_size=400)
    model.generation_config = GenerationConfig(**{"eos_token_id": OLD, **generation})
    return model


def _trained_end(tokenizer: Any, template: str) -> int:
    """The last trained id of an answer, as the collator trains it."""
    chat = fs.encode_chat({"messages": CHAT}, tokenizer, chat_template=template)
    return [label for label in chat.labels if label != -100][-1]


@pytest.mark.parametrize(
    ("own", "given", "template"),
    [
        (None, CHATML, CHATML),
        (CHATML, QWEN3, QWEN3),
        ({"default": CHATML, "other": QWEN3}, QWEN3, QWEN3),
        ({"default": "{{ messages[0].content }}", "other": QWEN3, "chat": CHATML}, "chat", CHATML),
    ],
    ids=["none", "one", "several", "by its name"],
)
def test_a_template_of_the_collator_is_exported(own: Any, given: str, template: str, tmp_path: Path) -> None:
    model, tokenizer = _model(), byte_tokenizer("chatml")
    tokenizer.chat_template = own
    before, generation = copy.deepcopy(own), model.generation_config.to_dict()
    fs.export_hf(model, tmp_path / "out", tokenizer=tokenizer, chat_template=given)
    assert tokenizer.chat_template == before
    assert model.generation_config.to_dict() == generation
    read = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert read.get_chat_template() == template
    if isinstance(own, dict):
        assert read.get_chat_template("other") == QWEN3
    end = _trained_end(tokenizer, template)
    assert tokenizer.convert_ids_to_tokens(end) == "<|im_end|>" != tokenizer.eos_token
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [end, OLD]


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (None, ["end"]),
        (OLD, ["end", OLD]),
        ([OLD, 7], ["end", OLD, 7]),
        ("end", "end"),
        ([5, "end"], [5, "end"]),
    ],
)
def test_the_trained_end_joins_those_that_are_there(known: Any, expected: Any, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer("chatml")
    end = _trained_end(tokenizer, CHATML)

    def ids(value: Any) -> Any:
        return [ids(v) for v in value] if isinstance(value, list) else end if value == "end" else value

    fs.export_hf(_model(eos_token_id=ids(known)), tmp_path / "out", tokenizer=tokenizer)
    found = GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert (found if isinstance(found, list) or not isinstance(ids(expected), list) else [found]) == ids(
        expected
    )


def test_a_generation_config_that_contradicts_itself_is_kept(tmp_path: Path) -> None:
    fs.export_hf(_model(do_sample=False, temperature=0.9), tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.9


def test_a_model_without_a_generation_config_gets_one(tmp_path: Path) -> None:
    model, tokenizer = _model(), byte_tokenizer("chatml")
    model.generation_config = None
    fs.export_hf(model, tmp_path / "out", tokenizer=tokenizer)
    stops = GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert stops == [_trained_end(tokenizer, CHATML), model.config.eos_token_id]


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}", "{% broken"])
def test_what_is_no_chat_is_exported_as_it_is(template: str | None, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = template
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fs.export_hf(_model(), tmp_path / "out", tokenizer=tokenizer)
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == OLD
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == template
    assert ("end of an answer" in "".join(str(w.message) for w in caught)) == (template is not None)


def test_a_template_that_was_forgotten_is_warned_about(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = None
    fs.encode_chat({"messages": CHAT}, tokenizer, chat_template=CHATML)
    with pytest.warns(UserWarning, match="pass chat_template="):
        fs.export_hf(_model(), tmp_path / "out", tokenizer=tokenizer)


class _WithoutTemplates:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tekken.json").write_text("{}")


@pytest.mark.parametrize("tokenizer", [None, _WithoutTemplates()])
def test_a_template_that_no_tokenizer_saves(tokenizer: Any, tmp_path: Path) -> None:
    fs.export_hf(_model(), tmp_path / "out", tokenizer=tokenizer, chat_template=CHATML)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == CHATML
    assert (tmp_path / "out" / "tekken.json").exists() == (tokenizer is not None)


def _export_adapters(folder: str) -> None:
    import peft

    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = None
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = fs.shard_model(fs.add_adapters(_model(), config), mesh=mesh_here())
    for name, export in (("merged", fs.export_hf), ("adapter", fs.export_adapter)):
        export(model, f"{folder}/{name}", tokenizer=tokenizer, chat_template=CHATML)
        torch.distributed.barrier()
        assert AutoTokenizer.from_pretrained(f"{folder}/{name}").get_chat_template() == CHATML
        stops = GenerationConfig.from_pretrained(f"{folder}/{name}").eos_token_id
        assert stops == [_trained_end(tokenizer, CHATML), OLD]


def test_adapters_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run_distributed(_export_adapters, 2, str(tmp_path))
