"""Words of other libraries are answered, texts of others act on no terminal, warnings point at the caller."""

import inspect
import operator
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.words import WORDS
from fsdp_sft.commands import main
from fsdp_sft.errors import abridged, printable
from tests.harness import chat_templates as ct
from tests.harness.models import ragged_batches, tiny_model

SAID = [
    (fs.load_pretrained, "torch_dtype", "mp_policy"),
    (fs.load_pretrained, "device_map", "init_distributed"),
    (fs.load_pretrained, "num_labels", "build_meta_model"),
    (fs.train_step, "gradient_accumulation_steps", r"grad_accum_steps, of windows"),
    (fs.windows, "gradient_accumulation_steps", r"grad_accum_steps, of windows"),
    (fs.windows, "grad_accum_step", "do you mean grad_accum_steps"),
    (fs.PackedCollator, "max_seq_length", "max_length"),
    (fs.PackedCollator, "packing", "PackedSampler"),
    (fs.shard_model, "reshard_after_foward", "do you mean reshard_after_forward"),
    (fs.save_checkpoint, "save_total_limit", "keep_last"),
]


@pytest.mark.parametrize(("function", "word", "said"), SAID, ids=[f"{f.__name__}-{w}" for f, w, _ in SAID])
def test_a_keyword_of_another_library_is_answered(function: Any, word: str, said: str) -> None:
    assert word not in inspect.signature(function).parameters
    with pytest.raises(TypeError, match=rf"{function.__name__} takes no {word}=: .*({said})"):
        function(**{word: None})


def test_what_is_like_nothing_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing_of_it'"):
        fs.train_step(nothing_of_it=None)  # type: ignore[call-arg]


def test_an_error_from_within_stays() -> None:
    with pytest.raises(TypeError, match="micro_batches, optimizer in this order"):
        fs.train_step([], {}, object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "said"), [("Trainer", "the loop is yours"), ("SFTColator", "do you mean SFTCollator")]
)
def test_a_name_of_another_library_is_answered(name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': {said}"):
        getattr(fs, name)
    assert not hasattr(fs, "__wrapped__")


def test_no_word_is_an_argument_here_and_no_answer_names_what_is_not_here() -> None:
    taken = {
        word
        for name in fs.__all__
        if callable(one := getattr(fs, name)) and not inspect.isclass(one)
        for word in inspect.signature(one).parameters
    }
    assert not WORDS.keys() & taken
    named = {word.partition("(")[0] for text in WORDS.values() for word in text.split() if "(" in word}
    assert {word for word in named if word.isidentifier()} <= set(fs.__all__)


_ALL_FRAMES = """
import traceback
import torch
import fsdp_sft as fs
try:
    fs.load_checkpoint("/nowhere/at/all", model=torch.nn.Linear(1, 1))
except fs.CheckpointNotFoundError as error:
    print(len(traceback.extract_tb(error.__traceback__)))
"""


def test_errors_for_users_end_at_the_callers_line() -> None:
    with pytest.raises(fs.CheckpointNotFoundError) as found:
        fs.load_checkpoint("/nowhere/at/all", model=torch.nn.Linear(1, 1))
    assert [frame.filename for frame in traceback.extract_tb(found.value.__traceback__)] == [__file__]
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", _ALL_FRAMES],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) > 2


# --- texts of others, without what would act on a terminal or hide in a page -------------------------------

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
    assert len(text) < 500
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
