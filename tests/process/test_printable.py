"""Texts of others are shown without what would act on a terminal or hide in a page."""

import operator
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft._process.callers import warn_caller
from fsdp_sft.commands import main
from fsdp_sft.errors import abridged, printable
from tests.harness import chat_templates as ct
from tests.harness.models import ragged_batches, tiny_model

ACT = {
    "escape": "\x1b[2J",
    "C1": "\x9b31m",
    "carriage return": "\r",
    "backspace": "\b",
    "bell": "\a",
    "NUL": "\0",
    "delete": "\x7f",
    "right to left": "\u202e",
    "isolate": "\u2066",
    "zero width": "\u200b",
    "tag": "\U000e0041",
    "half of a pair": "\ud800",
    "line separator": "\u2028",
}
BAD = "".join(ACT.values())


def _acts(text: str) -> list[str]:
    return [name for name, act in ACT.items() if act[0] in text]


@pytest.mark.parametrize("name", ACT)
def test_what_acts_is_written_as_an_escape(name: str) -> None:
    text = f"a{ACT[name]}b"
    errors = (fs.CheckpointError(text), fs.CheckpointNotFoundError(2, text, text))
    assert [_acts(shown) for shown in (printable(text), abridged([text]), *map(str, errors))] == [[]] * 4
    assert printable(text).startswith("a\\")


def test_what_does_not_act_stays() -> None:
    text = "line\n\tzwj \u200d, zwnj \u200c, é, 漢字, עברית, 🧑‍🚀"
    assert (printable(text), str(fs.CheckpointError(text))) == (text, text)


def test_a_name_is_no_longer_than_a_person_reads() -> None:
    text = abridged(["x" * 100_000, "a\nb"])
    assert len(text) < 300
    assert "(100000 characters)" in text
    assert "\n" not in text
    message = str(fs.CheckpointFormatError("y" * 1_000_000))
    assert len(message) < 10_000
    assert message.endswith("(1000000 characters)")


def test_warnings_and_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_caller(BAD)
    assert _acts(str(told[0].message)) == []
    assert main(["inspect-data", str(tmp_path / "\x1b[31mname"), "--tokenizer", "none"]) != 0
    assert _acts("".join(capsys.readouterr()).replace("\r", "")) == []


def test_rows_and_the_page_of_labels() -> None:
    own: Any = ct.byte_tokenizer("chatml")
    row = {"messages": [{"role": "user", "content": f"⟦q⟧{BAD[:-2]}"}, {"role": "assistant", "content": "a"}]}
    chat = fs.encode_chat(row, own)
    plain = fs.render_labels(own, chat.input_ids, chat.labels, color=False)
    assert _acts(plain) == []
    assert plain.count("⟦") == 1, "a mark of the text looks like one of ours"
    assert _acts(fs.render_labels(own, chat.input_ids, chat.labels).replace("\x1b[", "")) == []
    assert _acts(fs.render_labels_html(own, [chat.input_ids], [chat.labels], title=BAD)) == []
    contents = ([(BAD, "x")], [("user", "\udc80")], [("user", "q"), ("assistant", "a")])
    rows = [{"messages": [{"role": role, "content": text} for role, text in one]} for one in contents]
    _, counts = fs.filter_rows(rows, own, on_error="count")
    assert (counts["malformed"], _acts(str(counts.examples))) == (2, [])


# --- warnings point at the caller's line --------------------------------------------------------------------

HERE = Path(__file__).name


def _step_in_eval_mode() -> None:
    model = tiny_model("gpt2").eval()
    fs.train_step(model, ragged_batches(1), torch.optim.SGD(model.parameters(), lr=0.1))


def _epoch_passed_over() -> None:
    sampler = fs.ResumableSampler(4)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 2})
    sampler.set_epoch(0)


@pytest.mark.parametrize(
    "call",
    [_step_in_eval_mode, _epoch_passed_over],
    ids=operator.attrgetter("__name__"),
)
def test_a_warning_points_at_the_line_that_called(call: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert [Path(one.filename).name for one in caught if one.category is UserWarning] == [HERE]


def test_a_warning_outside_of_the_library_is_of_its_line() -> None:
    with pytest.warns(UserWarning, match="text") as caught:
        warn_caller("text")
    assert Path(caught[0].filename).name == HERE
