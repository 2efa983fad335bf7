"""Words of other libraries, and those that are nearly right, are answered with what to write here."""

import inspect
import subprocess
import sys
import traceback
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft._process.words import WORDS

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
