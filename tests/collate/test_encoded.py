"""A data set encoded once: the rows that `encode_chat` makes, wherever they are and whoever makes them."""

import errno
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import fsdp_sft as fs
from fsdp_sft.collate import encoded as module
from fsdp_sft.sampling.collator import row_sizes
from tests.harness import chat_templates as ct
from tests.harness.chats import chat
from tests.harness.packs import assert_same
from tests.harness.ranks import on_ranks, run_distributed

TOKENIZER = ct.byte_tokenizer("chatml")


def rows(number: int = 700) -> list[dict[str, Any]]:
    made = [
        chat("q" * (i % 7 + 1), f"answer {i}", *(("more", "again") if i % 3 else ())) for i in range(number)
    ]
    for i in range(0, number, 50):
        made[i]["messages"][1]["weight"] = 0
    for i in range(1, number, 70):
        made[i]["messages"] = made[i]["messages"][:1]
    return made


def plainly(given: Sequence[Any], **options: Any) -> list[fs.EncodedChat]:
    found = [fs.encode_chat(row, TOKENIZER, **{"max_length": 60, **options}) for row in given]
    return [one for one in found if one.num_targets]


def stored(given: Any, cache: Path, tokenizer: Any = TOKENIZER, **options: Any) -> fs.EncodedDataset:
    return fs.encode_dataset(given, tokenizer, **{"max_length": 60, "cache_dir": cache, **options})


@pytest.fixture
def shards_of_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARD_ROWS", 8)


def given_as(kind: str) -> Any:
    made = rows()
    if kind == "data set":
        return pytest.importorskip("datasets").Dataset.from_list(made)
    return [fs.encode_chat(row, TOKENIZER) for row in made] if kind == "encoded" else made


@pytest.mark.parametrize("kind", ["list", "data set", "encoded"])
def test_rows_are_those_of_encode_chat(kind: str, tmp_path: Path) -> None:
    encoded, expected = stored(given_as(kind), tmp_path / "cache"), plainly(rows())
    assert list(encoded) == encoded[:] == expected
    assert encoded[-1] == expected[-1]
    sizes = [len(one.input_ids) for one in expected], [one.num_targets for one in expected]
    assert (encoded.lengths.tolist(), encoded.num_targets.tolist()) == sizes
    assert row_sizes(encoded) == row_sizes(expected)
    if kind != "encoded":
        counts = fs.filter_rows(rows(), TOKENIZER, max_length=60)[1]
        assert vars(encoded.counts) == vars(counts)
        assert encoded.counts == counts
    assert pickle.loads(pickle.dumps(encoded))[5] == expected[5]
    with pytest.raises(IndexError):
        encoded[len(expected)]
    assert [path for path in encoded.path.iterdir() if path.suffix != ".safetensors"] == []


@pytest.mark.parametrize("form", ["arrow", "pandas", "numpy", "torch"])
def test_a_data_set_may_have_any_format(form: str, tmp_path: Path) -> None:
    made = pytest.importorskip("datasets").Dataset.from_list([{**row, "other": 1} for row in rows(5)])
    formatted = made.with_format(form, columns=["messages"])
    assert list(stored(formatted, tmp_path, max_length=99)) == plainly(rows(5), max_length=99)


def test_what_is_there_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stored(rows(20), tmp_path)
    monkeypatch.setattr(module, "_encode_shard", lambda *_: pytest.fail("it was there"))
    assert stored(rows(20), tmp_path).path == first.path


CHANGED: dict[str, Any] = {
    "data": lambda cache: stored(rows(21), cache),
    "option": lambda cache: stored(rows(20), cache, max_length=61),
    "template": lambda cache: stored(rows(20), cache, chat_template=ct.CHATML + " "),
    "tokenizer's template": lambda cache: stored(
        rows(20), cache, ct.byte_tokenizer("chatml", template=ct.CHATML + " ")
    ),
    "token": lambda cache: stored(
        rows(20), cache, ct.byte_tokenizer("chatml", additional_special_tokens=["answer"])
    ),
    "variables": lambda cache: stored(rows(20), cache, chat_template_kwargs={"x": 1}),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_differs_is_encoded_anew(what: str, tmp_path: Path) -> None:
    assert CHANGED[what](tmp_path).path != stored(rows(20), tmp_path).path


def test_padding_is_that_of_whoever_called_the_tokenizer_last(tmp_path: Path) -> None:
    other = ct.byte_tokenizer("chatml")
    other.backend_tokenizer.enable_padding()
    assert stored(rows(20), tmp_path, other).path == stored(rows(20), tmp_path).path


def test_what_is_opened_warns_as_when_it_was_encoded(tmp_path: Path) -> None:
    tokenizer = ct.byte_tokenizer("chatml")
    turn = "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + END }}{% endfor %}"
    prompt = "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    asked = [chat(f"question {i}", f"answer {i}") for i in range(20)]
    for end, note in (("'<stop>'", "end_of_turn_is_text"), ("''", "no_end_of_turn")):
        tokenizer.chat_template = turn.replace("END", end) + prompt
        heard = []
        for _ in range(2):
            with pytest.warns(UserWarning, match="generation") as caught:
                encoded = stored(asked, tmp_path, tokenizer, max_length=400)
            heard.append(" ".join(str(warning.message) for warning in caught))
        assert encoded.counts == {"kept": 20, note: 20, "prompt_differs": 20}
        assert heard[0] == heard[1]
        assert re.findall(r"counted as (\w+)", heard[0]) == [note, "prompt_differs"]


def test_the_order_of_keys_is_printed_and_so_counts(tmp_path: Path) -> None:
    for arguments in ({"a": 1, "b": 2}, {"b": 2, "a": 1}):
        row = chat("q", "")
        row["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": arguments}}]
        assert stored([row], tmp_path, max_length=400)[0] == fs.encode_chat(row, TOKENIZER)


@pytest.mark.usefixtures("shards_of_8")
@pytest.mark.parametrize(
    "bad",
    [
        {"input_ids": [1, 2**33], "labels": [1, 2**33]},
        {**chat("q", "a"), "chat_template_kwargs": {"x": {(1, 2): 1}}},
        {"messages": [{"role": ["x"], "content": "a"}]},
    ],
)
def test_one_bad_row_ends_nothing(bad: dict[str, Any], tmp_path: Path) -> None:
    encoded, expected = stored([*rows(300), bad], tmp_path), plainly(rows(300))
    assert encoded[: len(expected)] == expected
    if "chat_template_kwargs" not in bad:  # which no template here reads
        assert list(encoded.counts.indices["malformed"]) == [300]


def test_what_a_damaged_file_claims_is_not_made(tmp_path: Path) -> None:
    first = stored(rows(20), tmp_path)
    (path,) = first.path.iterdir()
    tensors, sound = load_file(path), path.read_bytes()
    sizes, counts = tensors["lengths"], json.dumps([first.counts["kept"], {}, {}])
    wrong = [torch.cat([sizes[:-1], sizes.new_tensor([number])]) for number in (2**30, -5, 0)]
    for lengths, said, says in (
        *((each, counts, "do not belong together; delete it") for each in wrong),
        (sizes, "[]", "is damaged"),
    ):
        save_file({**tensors, "lengths": lengths}, path, {"counts": said})
        with pytest.raises(fs.CheckpointCorruptError, match=says):
            fs.EncodedDataset(first.path)
    path.write_bytes(sound)
    assert list(fs.EncodedDataset(first.path)) == list(first)


@pytest.mark.usefixtures("shards_of_8")
def test_a_damaged_shard_is_named_and_a_missing_one_is_made(tmp_path: Path) -> None:
    first, expected = stored(rows(20), tmp_path), plainly(rows(20))
    assert list(first) == expected
    paths = sorted(first.path.iterdir())
    times = [path.stat().st_mtime_ns for path in paths]
    os.truncate(paths[1], paths[1].stat().st_size - 4)
    with pytest.raises(fs.CheckpointCorruptError, match=r"00001-of-00003.* is damaged: .*; delete it"):
        stored(rows(20), tmp_path)
    paths[1].unlink()
    assert list(stored(rows(20), tmp_path)) == expected
    kept = [old == path.stat().st_mtime_ns for path, old in zip(paths, times, strict=True)]
    assert kept == [True, False, True]
    paths[2].unlink()
    with pytest.raises(fs.CheckpointCorruptError, match=r"a file of .* is missing"):
        fs.EncodedDataset(first.path)


@pytest.mark.usefixtures("shards_of_8")
def test_a_systematic_refusal_ends_the_encoding(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"32 of 32 rows were refused, more than max_refused=0.01 of all 3000.*\n.*known roles",
    ):
        stored([chat(("bot", "x"))] * 3000, tmp_path)
    lossy = ct.byte_tokenizer(
        "chatml", template=ct.CHATML.replace("message.content", "(message.content if not message.tool_calls)")
    )
    row = chat("q", "I look")
    row["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": "y"}}}]
    with pytest.raises(fs.ChatTemplateError, match="does not print the content of message 1"):
        stored([row] * 20, tmp_path, lossy, max_length=99, on_dropped="error")
    assert stored([row] * 20, tmp_path, lossy, max_length=99).counts["dropped"] == 20


def test_a_few_refusals_are_counted_and_more_than_allowed_raise(tmp_path: Path) -> None:
    given = rows(400)
    for i in (3, 77, 150, 151, 152, 399):
        given[i] = {"messages": "no list"}
    with pytest.raises(
        ValueError, match=r"(?s)6 of 400 rows were refused, more than max_refused=0.01.* is kept"
    ):
        stored(given, tmp_path)
    encoded = stored(given, tmp_path, max_refused=0.02)
    assert list(encoded.counts.indices["malformed"]) == [3, 77, 150, 151, 152, 399]
    assert encoded.counts.examples["malformed"][-1].startswith("row 399: ")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "no rows"),
        (["there.jsonl", "here.jsonl"], "a row must be a dict, got str"),
        ([chat("a")], "no row has a target"),
        ([{"input_ids": [1, 2], "labels": [1, 2**33]}], "int"),
    ],
)
def test_what_cannot_be_read_is_said(given: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        stored(given, tmp_path)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    left = Path(stored(rows(5), tmp_path).path)
    (left / "00000-of-00001.safetensors").unlink()
    full = mock.patch.object(module.os, "replace", side_effect=OSError(errno.ENOSPC, "no space left"))
    with full, pytest.raises(OSError, match="no space"):
        stored(rows(5), tmp_path)
    assert list(left.iterdir()) == []


def test_batches_and_packs_of_it(tmp_path: Path) -> None:
    encoded, expected = stored(rows(), tmp_path), plainly(rows())
    padding = ct.byte_tokenizer("chatml", pad_token="<|endoftext|>")
    collators = (fs.SFTCollator(padding, max_length=60), fs.PackedCollator(max_length=200))
    for collate in collators:
        assert_same(*(collate([given[i] for i in (0, 4, 7)]) for given in (encoded, expected)))
    ours, theirs = (
        list(fs.PackedSampler(lengths, num_targets=targets, max_length=200, seed=3))
        for lengths, targets in (row_sizes(encoded), (encoded.lengths, encoded.num_targets))
    )
    assert ours == theirs
    loader = torch.utils.data.DataLoader(
        encoded, batch_size=4, num_workers=1, collate_fn=collators[0], multiprocessing_context="spawn"
    )
    assert torch.equal(next(iter(loader))["input_ids"], collators[0](expected[:4])["input_ids"])


def _together(cache: Path, number: int) -> tuple[str, list[int]]:
    """Where the rows are, and the first row of each shard that this rank has made."""
    counted = mock.patch.object(module, "_encode_shard", wraps=module._encode_shard)
    with mock.patch.object(module, "_SHARD_ROWS", 8), counted as encode:
        encoded = stored(rows(number), cache)
    assert list(encoded) == plainly(rows(number))
    return str(encoded.path), [call.args[1] for call in encode.call_args_list]


def test_ranks_share_one_encoding(tmp_path: Path) -> None:
    (first, ours), (second, theirs) = run_distributed(_together, 2, tmp_path, 120)
    assert first == second
    assert (ours[0], theirs[0]) == (0, 56)
    assert len(ours) + len(theirs) <= 15 + 3, "what another rank has done is left out"


@on_ranks(2)
def test_ranks_that_do_not_see_the_folder_make_their_own(tmp_path: Path) -> None:
    own = tmp_path / str(dist.get_rank())  # as on nodes that do not share a file system
    encoded = stored(rows(120), own)
    assert encoded.path.parent == own
    assert list(encoded) == plainly(rows(120))


@on_ranks(2)
def test_ranks_with_other_rows_are_told(tmp_path: Path) -> None:
    rank = dist.get_rank()
    for given, says in (
        (rows(10 + rank), "ranks differ in number of rows="),
        ([] if rank else rows(10), "no rows"),
        (rows(10)[:: 1 - 2 * rank], "ranks differ in the rows, the tokenizer or the options"),
    ):
        with pytest.raises(ValueError, match=says):
            stored(given, tmp_path)


NUMBER = 6000
SCRIPT = f"""
import sys
from tests.collate.test_encoded import rows, stored
stored(rows({NUMBER}), sys.argv[1])
"""


def test_a_job_that_was_killed_loses_the_shard_in_work(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)])
    while not list(tmp_path.glob("*/*.safetensors")):
        assert process.poll() is None, "it was too fast to be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    done = {path: path.stat().st_ino for path in folder.glob("*.safetensors")}
    assert len(done) < 3
    again = stored(rows(NUMBER), tmp_path)
    assert again.path == folder
    assert {path: path.stat().st_ino for path in done} == done
    assert again.counts == fs.filter_rows(rows(NUMBER), TOKENIZER, max_length=60)[1]
    assert list(again) == plainly(rows(NUMBER))
