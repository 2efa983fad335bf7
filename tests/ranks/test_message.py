"""What ranks tell each other is data: it comes back as it was, and makes nobody run anything."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft import errors
from fsdp_sft._ranks.message import pack, portable, revived, unpack


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, 2.5, True, "ä"], 3: (float("inf"), b"\x00\xff"), (1, 2): 1 << 200},
        [Path("/a/b"), torch.bfloat16, torch.Size((2, 3))],
        ((0.25, 1, None), [Path("x")]),
    ],
)
def test_a_message_comes_back_as_it_was(value: Any) -> None:
    assert unpack(pack(value)) == value


def test_dataclasses_of_this_library_are_sent_and_no_others() -> None:
    class_of_ours = fs.CheckpointInfo(3, Path("/a"), sound=True)
    assert unpack(pack([class_of_ours])) == [class_of_ours]
    for other in (object(), torch.ones(2), fs.CheckpointInfo, lambda: 0):
        with pytest.raises(TypeError, match=r"a message|is a tensor"):
            pack({"a": other})


@pytest.mark.parametrize(
    "kind", ["os:system", "fsdp_sft._tensors.disk:os", "fsdp_sft.errors:CheckpointError", "x"]
)
def test_a_message_names_nothing_but_values(kind: str) -> None:
    harmless = json.loads(pack(Path("a")))
    forged = json.dumps({**harmless, "__fsdp_sft__": kind, "of": {}}).encode()
    with pytest.raises(ValueError, match="not a valid stored value"):
        unpack(forged)


class _OfTheCaller(KeyError):
    pass


def _error(name: str) -> Exception:
    kind: type[Exception] = getattr(errors, name)
    error = kind(f"something about {name}", 3)
    vars(error)["where"] = Path("/a")
    error.add_note("a note")
    return error


ERRORS = [name for name in fs.__all__ if name.endswith("Error")]


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_this_library_arrive_as_they_were(name: str) -> None:
    error = _error(name)
    again = revived(unpack(pack(portable(error))), 1)
    assert type(again) is type(error)
    assert (again.args, vars(again)) == (error.args, vars(error))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        KeyError("k"),
        FileNotFoundError(2, "No such file or directory", "/a"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        ZeroDivisionError(),
        torch.OutOfMemoryError("no room"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_python_arrive_as_they_were(error: Exception) -> None:
    again = revived(unpack(pack(portable(error))), 1)
    assert (type(again), str(again), again.args) == (type(error), str(error), error.args)


class _Mute(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")


class _Odd(Exception):
    def __reduce__(self) -> Any:
        return (ValueError,)


@pytest.mark.parametrize(
    "error", [_Mute("x"), _Odd("x"), ValueError(10**5000)], ids=lambda e: type(e).__name__
)
def test_an_error_that_cannot_be_described_is_sent_all_the_same(error: Exception) -> None:
    again = revived(unpack(pack(portable(error))), 2)
    assert isinstance(again, Exception)
    assert "rank 2 raised" in str(again)


def test_an_error_of_another_class_arrives_as_the_nearest_that_is_known() -> None:
    near = revived(unpack(pack(portable(_OfTheCaller("k")))), 2)
    assert type(near) is KeyError
    assert "rank 2 raised _OfTheCaller: 'k'" in str(near)
    group = revived(unpack(pack(portable(ExceptionGroup("several", [ValueError("x")])))), 2)
    assert type(group) is fs.RemoteRankError
    unknown = revived(unpack(pack(portable(type("Odd", (Exception,), {})(torch.ones(1))))), 2)
    assert type(unknown) is fs.RemoteRankError
    assert "rank 2 raised Odd: tensor([1.])" in str(unknown)
