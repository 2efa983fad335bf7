"""What an export takes over: files and code of its source, chat templates, fields that other readers want."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoTokenizer, GenerationConfig

import fsdp_sft as fs
from tests.harness.chat_templates import CHATML, QWEN3, byte_tokenizer
from tests.harness.hf_folders import loaded, save_tiny
from tests.harness.models import tiny_model
from tests.harness.places import script
from tests.harness.quantised_folders import configure
from tests.harness.ranks import mesh_here, on_ranks
from tests.harness.remote_code import keep_code_in, plain_with_code, save_with_code


def _config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


@on_ranks(1)
def test_code_of_the_checkpoint_comes_along(tmp_path: Path) -> None:
    folder, out = save_with_code(tmp_path / "model"), tmp_path / "out"
    keep_code_in(tmp_path / "modules")
    model = plain_with_code(folder)
    fs.check_export(out, model=model)
    fs.export_hf(model, out, dtype=None)
    assert _config_of(out)["auto_map"] == _config_of(folder)["auto_map"]
    read = plain_with_code(out)
    ids = torch.arange(3, 21).view(2, 9)
    assert torch.equal(read(input_ids=ids).logits, model(input_ids=ids).logits)


def test_an_auto_map_names_nothing_that_is_not_there(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    references = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "someone/model--modeling_own.OwnForCausalLM",
        "AutoTokenizer": ["tokenization_own.OwnTokenizer", None],
    }
    configure(tmp_path / "model", auto_map=references)
    out = fs.export_hf(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "out")
    assert _config_of(out)["auto_map"] == {
        "AutoModelForCausalLM": "someone/model--modeling_own.OwnForCausalLM"
    }


def test_files_of_the_processor_come_along(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model")
    for name in ("preprocessor_config.json", "processor_config.json", "notes.json"):
        (source / name).write_text(json.dumps({"from": name}))
    out = fs.export_hf(loaded(source), tmp_path / "out")
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (out / name).read_text() == (source / name).read_text()
    assert not (out / "notes.json").exists()


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model")
    (tmp_path / "secret.json").write_text("{}")
    (source / "processor_config.json").symlink_to(tmp_path / "secret.json")
    model = transformers.LlamaForCausalLM.from_pretrained(source)
    with pytest.warns(UserWarning, match=r"processor_config\.json.*it is not copied into the export"):
        out = fs.export_hf(model, tmp_path / "out")
    assert not (out / "processor_config.json").exists()
    assert (out / "config.json").exists()


def test_a_model_of_another_kind_or_from_nowhere_takes_nothing(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model")
    (source / "processor_config.json").write_text("{}")
    configure(source, model_type="qwen2")
    for number, name in enumerate([str(source), "", "no/such/name", "someone/never-cached"]):
        model = tiny_model("llama")
        model.config.name_or_path = name
        assert not (fs.export_hf(model, tmp_path / f"out{number}") / "processor_config.json").exists()


# --- what programs that know transformers 4 alone find in an export ----------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Rotary embeddings as transformers 5 has them; the fields in which transformers 4 looks for them.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama", {"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5}),
    "scaled": ("llama", {"rope_theta": 5e5, **LLAMA3}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "by kind of layer": (
        "gemma3_text",
        {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
        {"rope_theta": 1e6, "rope_local_base_freq": 5e3},
    ),
    "of a part": (
        "glm4",
        {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.25},
        {"rope_theta": 3e4, "partial_rotary_factor": 0.25},
    ),
}


def _tiny(family: str, **fields: Any) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **sizes, **fields)
    )


@pytest.mark.parametrize("case", CASES)
def test_rotary_embeddings_are_said_in_the_former_fields_too(case: str, tmp_path: Path) -> None:
    family, rope, fields = CASES[case]
    model = _tiny(family, rope_parameters=rope)
    fs.export_hf(model, tmp_path / "out")
    written = _config_of(tmp_path / "out")
    assert {name: written.get(name) for name in fields} == fields
    again = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert again.rope_parameters == model.config.rope_parameters
    assert again.to_dict().keys() == model.config.to_dict().keys() | {"dtype", "architectures"}


def test_the_number_of_experts_is_said_by_both_names(tmp_path: Path) -> None:
    written = _config_of(
        fs.export_hf(_tiny("qwen3_moe", num_experts=4, num_experts_per_tok=2), tmp_path / "out")
    )
    assert written["num_experts"] == written["num_local_experts"]


def test_the_tokenizer_has_a_class_that_others_know(tmp_path: Path) -> None:
    tokenizer = script("tiny_model").make_tokenizer(["Some words, and a tool chat."], vocab_size=300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|x|>"]})
    fs.export_hf(_tiny("llama"), tmp_path / "out", tokenizer=tokenizer)
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in written
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert again("A <|x|> chat").input_ids == tokenizer("A <|x|> chat").input_ids
    assert again.chat_template == tokenizer.chat_template


# --- a base model that was taught to chat stops and is asked as it was trained, once it is read back -------


@pytest.fixture
def tokenizer() -> Any:
    return byte_tokenizer("chatml")


OLD = 2  # the model's own end, of documents
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def _model(**generation: Any) -> Any:
    model = tiny_model("llama", vocab_size=400)
    model.generation_config = GenerationConfig(**{"eos_token_id": OLD, **generation})
    return model


def _trained_end(tokenizer: Any, template: str) -> int:
    """The last trained id of an answer, as the collator trains it."""
    return [
        label
        for label in fs.encode_chat({"messages": CHAT}, tokenizer, chat_template=template).labels
        if label != -100
    ][-1]


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
def test_a_template_of_the_collator_is_exported(
    own: Any, given: str, template: str, tokenizer: Any, tmp_path: Path
) -> None:
    model = _model()
    tokenizer.chat_template = own
    before, generation = copy.deepcopy(own), model.generation_config.to_dict()
    fs.export_hf(model, tmp_path / "out", tokenizer=tokenizer, chat_template=given)
    assert (tokenizer.chat_template, model.generation_config.to_dict()) == (before, generation)
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
def test_the_trained_end_joins_those_that_are_there(
    known: Any, expected: Any, tokenizer: Any, tmp_path: Path
) -> None:
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


def test_a_model_without_a_generation_config_gets_one(tokenizer: Any, tmp_path: Path) -> None:
    model = _model()
    model.generation_config = None
    fs.export_hf(model, tmp_path / "out", tokenizer=tokenizer)
    stops = GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert stops == [_trained_end(tokenizer, CHATML), model.config.eos_token_id]


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}", "{% broken"])
def test_what_is_no_chat_is_exported_as_it_is(template: str | None, tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = template
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fs.export_hf(_model(), tmp_path / "out", tokenizer=tokenizer)
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == OLD
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == template
    assert ("end of an answer" in "".join(str(w.message) for w in caught)) == (template is not None)


def test_a_template_that_was_forgotten_is_warned_about(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = None
    fs.encode_chat({"messages": CHAT}, tokenizer, chat_template=CHATML)
    with pytest.warns(UserWarning, match="pass chat_template="):
        fs.export_hf(_model(), tmp_path / "out", tokenizer=tokenizer)


class _WithoutTemplates:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tekken.json").write_text("{}")


@pytest.mark.parametrize("other", [None, _WithoutTemplates()])
def test_a_template_that_no_tokenizer_saves(other: Any, tmp_path: Path) -> None:
    out = fs.export_hf(_model(), tmp_path / "out", tokenizer=other, chat_template=CHATML)
    assert (out / "chat_template.jinja").read_text() == CHATML
    assert (out / "tekken.json").exists() == (other is not None)


@on_ranks(2)
def test_adapters_on_two_ranks(tmp_path: Path) -> None:
    peft, tokenizer = pytest.importorskip("peft"), byte_tokenizer("chatml")
    tokenizer.chat_template = None
    model = fs.shard_model(
        fs.add_adapters(_model(), peft.LoraConfig(r=2, target_modules=["q_proj"])), mesh=mesh_here()
    )
    for name, export in (("merged", fs.export_hf), ("adapter", fs.export_adapter)):
        export(model, tmp_path / name, tokenizer=tokenizer, chat_template=CHATML)
        torch.distributed.barrier()
        assert AutoTokenizer.from_pretrained(tmp_path / name).get_chat_template() == CHATML
        stops = GenerationConfig.from_pretrained(tmp_path / name).eos_token_id
        assert stops == [_trained_end(tokenizer, CHATML), OLD]
