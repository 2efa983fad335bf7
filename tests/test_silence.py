"""Mistakes that would train something else than was meant, without an error: told at once, and once."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import fsdp_sft as fs
from fsdp_sft.metrics.plot import _read
from tests.harness.chats import TOKENIZERS, chat
from tests.harness.device import mesh_here
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.ranks import run_distributed


def _told(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in told]


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _train_alone() -> None:
    model = tiny_model("llama")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(fs.UnsupportedModelError, match=r"each of 2 processes would train .*shard_model"):
        fs.train_step(model, ragged_batches(1), _sgd(model))
    assert all(map(torch.equal, before, model.parameters()))
    model = fs.shard_model(model, mesh=mesh_here())  # the advice
    assert not fs.train_step(model, ragged_batches(1), _sgd(model)).skipped


def test_a_model_that_was_never_sharded() -> None:
    run_distributed(_train_alone, 2)


def test_processes_that_have_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = tiny_model("llama")
    with pytest.raises(fs.UnsupportedModelError, match=r"4 processes .*: call init_distributed\(\) first"):
        fs.train_step(model, ragged_batches(1), _sgd(model))
    monkeypatch.delenv("WORLD_SIZE")  # the advice for processes that are apart
    assert not fs.train_step(model, ragged_batches(1), _sgd(model)).skipped


def test_a_window_without_targets() -> None:
    model = tiny_model("llama")
    optimizer, (batch,) = _sgd(model), ragged_batches(1)
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    told = [text for _ in range(3) for text in _told(lambda: fs.train_step(model, [empty], optimizer))]
    assert len(told) == 1
    assert "no targets on any rank, so its step is skipped" in told[0]


def test_answers_that_are_cut_off() -> None:
    rows = [chat("a", "hello", "a longer question", "and its answer"), chat("a", "hi")]
    collate = fs.SFTCollator(TOKENIZERS["chatml"], max_length=40)
    (told,) = _told(lambda: [collate(rows), collate(rows)])
    assert "max_length leaves nothing of an answer" in told
    meant = fs.SFTCollator(TOKENIZERS["chatml"], max_length=40, truncation="right")
    assert _told(lambda: meant(rows)) == []
    _, counts = fs.filter_rows(rows, TOKENIZERS["chatml"], max_length=40)
    assert counts["answer_cut_off"] == 1


@pytest.mark.parametrize("call", ["SFTCollator", "filter_rows", "encode_dataset"])
def test_an_option_that_does_not_exist(call: str, tmp_path: Path) -> None:
    tokenizer, rows = TOKENIZERS["chatml"], [chat("a", "b")]
    calls: dict[str, Callable[..., Any]] = {
        "SFTCollator": lambda **o: fs.SFTCollator(tokenizer, max_length=9, **o),
        "filter_rows": lambda **o: fs.filter_rows(rows, tokenizer, **o),
        "encode_dataset": lambda **o: fs.encode_dataset(
            rows, tokenizer, max_length=9, cache_dir=tmp_path, **o
        ),
    }
    with pytest.raises(TypeError, match=rf"{call} takes no train_om=: do you mean train_on\?"):
        calls[call](train_om="all")
    with pytest.raises(TypeError, match=rf"{call} takes no colour=: its options are chat_template, "):
        calls[call](colour="red")


def _shown(row: dict[str, Any], template: str | None = None, **options: Any) -> str:
    tokenizer = TOKENIZERS["chatml"]
    encoded = fs.encode_chat(row, tokenizer, chat_template=template, **options)
    return fs.render_labels(tokenizer, encoded.input_ids, encoded.labels, color=False)


_OWN = (
    "{% for m in messages %}[{{ m.role }}]{{ X }}[END]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_thinking_in_parts_where_the_template_reads_none() -> None:
    thinking = {"type": "thinking", "thinking": "why"}
    answer = {"role": "assistant", "content": [thinking, {"type": "text", "text": "so"}]}
    row = {"messages": [{"role": "user", "content": "q"}, answer]}
    for printed in ("m.content", "m.content | trim", "m.content + ''"):
        with pytest.raises(fs.ChatTemplateError, match="does not print the reasoning of message 1, 'why'"):
            _shown(row, _OWN.replace("X", printed))
    both = _OWN.replace("X", "(m.reasoning_content or '') + m.content")
    assert _shown(row, both) == "[user]q[END][assistant]⟦whyso[END]⟧"


def test_tools_that_the_template_does_not_print() -> None:
    tool = {"type": "function", "function": {"name": "find", "parameters": {}}}
    row = {**chat("q", "a"), "tools": [tool]}
    told = _told(lambda: _shown(row, _OWN.replace("X", "m.content")))
    assert sum("or the tools, so the model is trained without" in text for text in told) == 1
    told = _told(lambda: _shown(row, "{{ tools }}" + _OWN.replace("X", "m.content")))
    assert not any("tools" in text for text in told)


def test_a_system_prompt_beside_the_messages() -> None:
    row = {**chat("q", "a"), "system": "Be brief."}
    assert _shown(row, _OWN.replace("X", "m.content")).startswith("[system]Be brief.[END][user]q")


@pytest.mark.parametrize(
    ("key", "meant"), [("tool_call", "tool_calls"), ("toolCalls", "tool_calls"), ("weig" + "th", "weight")]
)
def test_a_key_that_is_misspelt(key: str, meant: str) -> None:
    row = chat("q", "a")
    row["messages"][1][key] = []
    with pytest.raises(fs.RowError, match=rf"'{key}', which is not read: is it {meant}\?") as found:
        _shown(row)
    assert found.value.reason == "malformed"
    row["messages"][1] = {**row["messages"][1], "id": "7", "reason": "r", "name": "n"}
    del row["messages"][1][key]
    _shown(row)


def test_the_row_of_a_batch_is_named() -> None:
    collate = fs.SFTCollator(TOKENIZERS["chatml"], max_length=64)
    wrong = {"messages": [{"role": "robot", "content": "a"}]}
    with pytest.raises(fs.RowError, match=r"^row 1 of 2: messages\[0\] has the role 'robot'"):
        collate([chat("q", "a"), wrong])


@pytest.mark.parametrize("where", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_not_finite(where: str) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_parameter(where).fill_(torch.nan)
    with pytest.raises(fs.NonFiniteGradientError, match=rf"is nan at a loss of nan.* {where} hold"):
        fs.train_step(model, ragged_batches(1), _sgd(model))


def _lose_on_one_rank(lost: list[int]) -> str:
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here())
    scale = torch.nan if torch.distributed.get_rank() in lost else 1.0

    def loss_fn(module: Any, batch: Any) -> torch.Tensor:
        return scale * fs.loss_sum(module, batch)[0]

    with pytest.raises(fs.NonFiniteGradientError) as found:
        fs.train_step(model, ragged_batches(1), _sgd(model), loss_fn=loss_fn, check=False)
    return str(found.value)


@pytest.mark.parametrize("lost", [[1], [0, 1]])
def test_the_rank_whose_loss_is_not_finite_is_named(lost: list[int]) -> None:
    first, second = run_distributed(_lose_on_one_rank, 2, lost)
    assert first == second
    assert f"(that of rank {', '.join(map(str, lost))} is not finite)" in first


def test_a_new_schedule_that_begins_at_0() -> None:
    model = tiny_model("llama")
    optimizer = _sgd(model)
    fs.train_step(model, ragged_batches(1), optimizer)
    schedule = LambdaLR(optimizer, lambda step: float(step > 0))
    assert _told(lambda: fs.train_step(model, ragged_batches(1), optimizer, scheduler=schedule)) == []


def test_a_log_that_a_second_run_begins_anew(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for steps, loss in ((range(1, 13), 5.0), (range(1, 5), 4.0)):
        with fs.MetricLogger(jsonl=log, stdout=False) as logger:
            for step in steps:
                logger.log({"loss": loss}, step)
    assert {step: row["loss"] for step, row in _read(log).items()} == dict.fromkeys(range(1, 5), 4.0)
    with fs.MetricLogger(jsonl=log, stdout=False) as logger:  # a resume, and two logs of one step
        logger.log({"loss": 3.0}, 4)
        logger.log({"eval_loss": 2.0}, 4)
    assert [row["loss"] for row in _read(log).values()] == [4.0, 4.0, 4.0, 3.0]
    assert _read(log)[4]["eval_loss"] == 2.0
