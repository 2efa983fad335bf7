"""A data set encoded once: the rows that `encode_chat` makes, wherever they are and whoever makes them."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fsdp_sft as fs
from fsdp_sft.collate import encoded as module
from fsdp_sft.sampling.collator import row_sizes
from tests.harness import chat_templates as ct
from tests.harness.chats import chat
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
    found = [fs.encode_chat(row, TOKENIZER, **options) for row in given]
    return [one for one in found if one.num_targets]


def given_as(kind: str) -> Any:
    made = rows()
    if kind == "data set":
        return pytest.importorskip("datasets").Dataset.from_list(made)
    return [fs.encode_chat(row, TOKENIZER) for row in made] if kind == "encoded" else made


@pytest.mark.parametrize("kind", ["list", "data set", "encoded"])
def test_rows_are_those_of_encode_chat(kind: str, tmp_path: Path) -> None:
    encoded = fs.encode_dataset(given_as(kind), TOKENIZER, max_length=60, cache_dir=tmp_path / "cache")
    expected = plainly(rows(), max_length=60)
    assert list(encoded) == encoded[:] == expected
    assert encoded[-1] == expected[-1]
    assert encoded.lengths.tolist() == [len(one.input_ids) for one in expected]
    assert encoded.num_targets.tolist() == [one.num_targets for one in expected]
    assert row_sizes(encoded) == row_sizes(expected)
    if kind != "encoded":
        _, counts = fs.filter_rows(rows(), TOKENIZER, max_length=60)
        assert encoded.counts == counts
        assert encoded.counts.indices == counts.indices
        assert encoded.counts.examples == counts.examples
    assert pickle.loads(pickle.dumps(encoded))[5] == expected[5]
    with pytest.raises(IndexError):
        encoded[len(expected)]
    assert [path for path in encoded.path.iterdir() if path.suffix != ".safetensors"] == []


@pytest.mark.parametrize("form", ["arrow", "pandas", "numpy", "torch"])
def test_a_data_set_may_have_any_format(form: str, tmp_path: Path) -> None:
    made = pytest.importorskip("datasets").Dataset.from_list([{**row, "other": 1} for row in rows(5)])
    formatted = made.with_format(form, columns=["messages"])
    assert list(fs.encode_dataset(formatted, TOKENIZER, max_length=99, cache_dir=tmp_path)) == plainly(
        rows(5)
    )


def test_what_is_there_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fs.encode_dataset(rows(20), TOKENIZER, max_length=60, cache_dir=tmp_path)
    monkeypatch.setattr(module, "_encode_shard", lambda *_: pytest.fail("it was there"))
    assert fs.encode_dataset(rows(20), TOKENIZER, max_length=60, cache_dir=tmp_path).path == first.path


@pytest.mark.parametrize(
    "change", ["data", "option", "template", "tokenizer's template", "token", "variables", "last padding"]
)
def test_what_differs_is_encoded_anew(change: str, tmp_path: Path) -> None:
    def path(tokenizer: Any = TOKENIZER, given: Any = None, **options: Any) -> Path:
        return fs.encode_dataset(
            given or rows(20), tokenizer, **{"max_length": 60, "cache_dir": tmp_path, **options}
        ).path

    first = path()
    other = ct.byte_tokenizer("chatml")
    if change == "token":
        other.add_tokens(["answer"])
    if change == "tokenizer's template":
        other.chat_template = ct.CHATML + " "
    second = {
        "data": lambda: path(given=rows(21)),
        "option": lambda: path(max_length=61),
        "template": lambda: path(chat_template=ct.CHATML + " "),
        "tokenizer's template": lambda: path(other),
        "token": lambda: path(other),
        "variables": lambda: path(chat_template_kwargs={"x": 1}),
        "last padding": lambda: other.backend_tokenizer.enable_padding() or path(other),
    }[change]()
    assert (first != second) == (change != "last padding"), "padding is that of whoever called it last"


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
                encoded = fs.encode_dataset(asked, tokenizer, max_length=400, cache_dir=tmp_path)
            heard.append(" ".join(str(warning.message) for warning in caught))
        assert encoded.counts == {"kept": 20, note: 20, "prompt_differs": 20}
        assert heard[0] == heard[1]
        assert f"counted as {note}" in heard[0]
        assert "counted as prompt_differs" in heard[0]


def test_the_order_of_keys_is_printed_and_so_counts(tmp_path: Path) -> None:
    def row(arguments: dict[str, int]) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": arguments}}
        return {
            "messages": [*chat("q")["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
        }

    for arguments in ({"a": 1, "b": 2}, {"b": 2, "a": 1}):
        encoded = fs.encode_dataset([row(arguments)], TOKENIZER, max_length=400, cache_dir=tmp_path)
        assert encoded[0] == fs.encode_chat(row(arguments), TOKENIZER)


@pytest.mark.parametrize(
    "bad",
    [
        {"input_ids": [1, 2**33], "labels": [1, 2**33]},
        {**chat("q", "a"), "chat_template_kwargs": {"x": {(1, 2): 1}}},
        {"messages": [{"role": ["x"], "content": "a"}]},
    ],
)
def test_one_bad_row_ends_nothing(bad: dict[str, Any], tmp_path: Path) -> None:
    encoded = fs.encode_dataset([*rows(300), bad], TOKENIZER, max_length=60, cache_dir=tmp_path)
    expected = plainly(rows(300), max_length=60)
    assert encoded[: len(expected)] == expected
    if "chat_template_kwargs" not in bad:  # which no template here reads
        assert list(encoded.counts.indices["malformed"]) == [300]


def test_what_a_damaged_file_claims_is_not_made(tmp_path: Path) -> None:
    first = fs.encode_dataset(rows(20), TOKENIZER, max_length=60, cache_dir=tmp_path)
    (path,) = first.path.iterdir()
    tensors, sound = load_file(path), path.read_bytes()
    metadata = {"counts": json.dumps([first.counts["kept"], {}, {}])}
    for number in (2**30, -5, 0):
        lengths = torch.cat([tensors["lengths"][:-1], torch.tensor([number], dtype=torch.int32)])
        save_file({**tensors, "lengths": lengths}, path, metadata)
        with pytest.raises(fs.CheckpointCorruptError, match="do not belong together; delete it"):
            fs.EncodedDataset(first.path)
    save_file(tensors, path, {"counts": "[]"})
    with pytest.raises(fs.CheckpointCorruptError, match="is damaged"):
        fs.EncodedDataset(first.path)
    path.write_bytes(sound)
    assert list(fs.EncodedDataset(first.path)) == list(first)


def test_a_damaged_shard_is_named_and_a_missing_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SHARD_ROWS", 8)
    first = fs.encode_dataset(rows(20), TOKENIZER, max_length=60, cache_dir=tmp_path)
    assert list(first) == plainly(rows(20), max_length=60)
    paths = sorted(first.path.iterdir())
    expected, times = list(first), [path.stat().st_mtime_ns for path in paths]
    os.truncate(paths[1], paths[1].stat().st_size - 4)
    with pytest.raises(fs.CheckpointCorruptError, match=r"00001-of-00003.* is damaged: .*; delete it"):
        fs.encode_dataset(rows(20), TOKENIZER, max_length=60, cache_dir=tmp_path)
    paths[1].unlink()
    again = fs.encode_dataset(rows(20), TOKENIZER, max_length=60, cache_dir=tmp_path)
    assert list(again) == expected
    kept = [old == path.stat().st_mtime_ns for path, old in zip(paths, times, strict=True)]
    assert kept == [True, False, True]
    paths[2].unlink()
    with pytest.raises(fs.CheckpointCorruptError, match=r"a file of .* is missing"):
        fs.EncodedDataset(first.path)


def test_a_systematic_refusal_ends_the_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARD_ROWS", 8)
    wrong = [{"messages": [{"role": "bot", "content": "x"}]}] * 3000
    with pytest.raises(
        ValueError,
        match=r"32 of 32 rows were refused, more than max_refused=0.01 of all 3000.*\n.*known roles",
    ):
        fs.encode_dataset(wrong, TOKENIZER, max_length=60, cache_dir=tmp_path)
    call = {"function": {"name": "f", "arguments": {"x": "y"}}}
    lossy = ct.byte_tokenizer(
        "chatml", template=ct.CHATML.replace("message.content", "(message.content if not message.tool_calls)")
    )
    row = chat("q", "I look")
    row["messages"][1]["tool_calls"] = [call]
    with pytest.raises(fs.ChatTemplateError, match="does not print the content of message 1"):
        fs.encode_dataset([row] * 20, lossy, max_length=99, cache_dir=tmp_path, on_dropped="error")
    assert fs.encode_dataset([row] * 20, lossy, max_length=99, cache_dir=tmp_path).counts["dropped"] == 20


def test_a_few_refusals_are_counted_and_more_than_allowed_raise(tmp_path: Path) -> None:
    given = rows(400)
    for i in (3, 77, 150, 151, 152, 399):
        given[i] = {"messages": "no list"}
    with pytest.raises(
        ValueError, match=r"(?s)6 of 400 rows were refused, more than max_refused=0.01.* is kept"
    ):
        fs.encode_dataset(given, TOKENIZER, max_length=60, cache_dir=tmp_path)
    encoded = fs.encode_dataset(given, TOKENIZER, max_length=60, cache_dir=tmp_path, max_refused=0.02)
    assert list(encoded.counts.indices["malformed"]) == [3, 77, 150, 151, 152, 399]
    assert encoded.counts.examples["malformed"][-1].startswith("row 399: ")


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ([], ValueError, "no rows"),
        (["there.jsonl", "here.jsonl"], ValueError, "a row must be a dict, got str"),
        ([chat("a")], ValueError, "no row has a target"),
        ([{"input_ids": [1, 2], "labels": [1, 2**33]}], ValueError, "int"),
    ],
)
def test_what_cannot_be_read_is_said(given: Any, kind: type[Exception], says: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=says):
        fs.encode_dataset(given, TOKENIZER, max_length=60, cache_dir=tmp_path)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    left = Path(fs.encode_dataset(rows(5), TOKENIZER, max_length=60, cache_dir=tmp_path).path)
    (left / "00000-of-00001.safetensors").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", full)
        with pytest.raises(OSError, match="no space"):
            fs.encode_dataset(rows(5), TOKENIZER, max_length=60, cache_dir=tmp_path)
    assert list(left.iterdir()) == []


def test_batches_and_packs_of_it(tmp_path: Path) -> None:
    encoded = fs.encode_dataset(rows(), TOKENIZER, max_length=60, cache_dir=tmp_path)
    expected = plainly(rows(), max_length=60)
    padding = ct.byte_tokenizer("chatml")
    padding.pad_token = padding.eos_token
    collators = (fs.SFTCollator(padding, max_length=60), fs.PackedCollator(max_length=200))
    for collate in collators:
        ours, theirs = (collate([given[i] for i in (0, 4, 7)]) for given in (encoded, expected))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    samplers = [
        fs.PackedSampler(lengths, num_targets=targets, max_length=200, seed=3)
        for lengths, targets in (row_sizes(encoded), (encoded.lengths, encoded.num_targets))
    ]
    assert list(samplers[0]) == list(samplers[1])
    loader = torch.utils.data.DataLoader(
        encoded, batch_size=4, num_workers=1, collate_fn=collators[0], multiprocessing_context="spawn"
    )
    assert torch.equal(next(iter(loader))["input_ids"], collators[0](expected[:4])["input_ids"])


def _together(cache: Path, number: int) -> tuple[str, int, list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SHARD_ROWS", 8)
        begun: list[int] = []
        encode = module._encode_shard

        def noted(path: Path, first: int, *rest: Any) -> Any:
            begun.append(first)
            return encode(path, first, *rest)

        patch.setattr(module, "_encode_shard", noted)
        encoded = fs.encode_dataset(rows(number), TOKENIZER, max_length=60, cache_dir=cache)
    assert list(encoded) == plainly(rows(number), max_length=60)
    return str(encoded.path), len(encoded), begun


def test_ranks_share_one_encoding(tmp_path: Path) -> None:
    (first, number, ours), (second, _, theirs) = run_distributed(_together, 2, tmp_path, 120)
    assert first == second
    assert number == len(plainly(rows(120)))
    assert (ours[0], theirs[0]) == (0, 56)
    assert len(ours) + len(theirs) <= 15 + 3, "what another rank has done is left out"


def _apart(cache: Path) -> tuple[str, int]:
    own = cache / str(fs.init_distributed().rank)  # as on nodes that do not share a file system
    encoded = fs.encode_dataset(rows(120), TOKENIZER, max_length=60, cache_dir=own)
    return str(encoded.path), len(encoded)


def test_ranks_that_do_not_see_the_folder_make_their_own(tmp_path: Path) -> None:
    results = run_distributed(_apart, 2, tmp_path)
    assert [Path(path).parent.name for path, _ in results] == ["0", "1"]
    assert results[0][1] == results[1][1]


@on_ranks(2)
def test_ranks_with_other_rows_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ranks differ in number of rows="):
        fs.encode_dataset(rows(10 + fs.init_distributed().rank), TOKENIZER, max_length=60, cache_dir=tmp_path)
    with pytest.raises(ValueError, match="no rows"):
        fs.encode_dataset(
            [] if fs.init_distributed().rank else rows(10), TOKENIZER, max_length=60, cache_dir=tmp_path
        )
    with pytest.raises(ValueError, match="ranks differ in the rows, the tokenizer or the options"):
        shuffled = rows(10)[:: 1 - 2 * fs.init_distributed().rank]
        fs.encode_dataset(shuffled, TOKENIZER, max_length=60, cache_dir=tmp_path)


NUMBER = 6000
SCRIPT = f"""
import sys, fsdp_sft as fs
from tests.collate.test_encoded import TOKENIZER, rows
fs.encode_dataset(rows({NUMBER}), TOKENIZER, max_length=60, cache_dir=sys.argv[1])
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
    again = fs.encode_dataset(rows(NUMBER), TOKENIZER, max_length=60, cache_dir=tmp_path)
    assert again.path == folder
    assert {path: path.stat().st_ino for path in done} == done
    assert again.counts == fs.filter_rows(rows(NUMBER), TOKENIZER, max_length=60)[1]
    assert list(again) == plainly(rows(NUMBER), max_length=60)
