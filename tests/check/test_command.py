"""The commands ``check`` and ``env``: what they print and return, and the table that a person reads."""

import argparse
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fsdp_sft._ranks.words import ranks_named
from fsdp_sft._tensors.disk import temporary_beside
from fsdp_sft.check import command
from fsdp_sft.check.checks import variables as checks_variables
from fsdp_sft.check.command import _asked
from fsdp_sft.check.environment import minorities, place, shown
from fsdp_sft.check.mechanism import Check, Outcome, Trouble
from fsdp_sft.check.results import Finished, ordered, text_of, to_json
from fsdp_sft.check.sequence import all_checks
from fsdp_sft.commands import main
from fsdp_sft.commands.check import add_check
from fsdp_sft.errors import UnsupportedModelError
from tests.harness.clusters import cluster_of
from tests.harness.models import tiny_config
from tests.harness.ranks import run_distributed

SECRET = "hf_abcdefghijklmnop"


@pytest.fixture
def alone() -> Iterator[None]:
    """Without a process group afterwards: the command makes one in the process of the tests."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _done(name: str, outcome: Outcome) -> Finished:
    return Finished(Check(name, "is it well?", 1, 1.0, lambda _: outcome), outcome, 1.0)


def test_the_table_names_what_is_wrong_first_and_the_nodes_to_leave_out() -> None:
    slow = Trouble("fail", (2, 3), "it is slow", leave_out=True)
    clock = Trouble("warn", (1,), "its clock is off")
    done = [
        _done("machine", Outcome("seen", (clock,))),
        _done("products", Outcome("fast", (slow,))),
        _done("host link", Outcome(unseen="no device")),
    ]
    cluster = cluster_of("a", "a", "b", "b", "c", "c")
    found = ordered([trouble for one in done for trouble in one.outcome.troubles])
    lines = text_of(cluster, done, "", found, 12.0).splitlines()
    assert lines[0] == "fsdp-sft check: 6 ranks on 3 nodes, cpu, gloo, 12 s"
    assert lines[2] == "FAIL  ranks 2-3 on b: it is slow"
    assert lines[3] == "warn  rank 1 on a: its clock is off"
    assert lines[5].startswith("warn  machine")
    assert lines[6].startswith("FAIL  products")
    assert lines[7].startswith("-     host link")
    assert lines[-1] == "To leave the node out: --exclude=b"
    assert to_json(cluster, done, "", found, 12.0)["exclude"] == ["b"]
    alone = cluster_of("a", "a")
    both = [Trouble("fail", (0, 1), "slow", leave_out=True)]
    assert "exclude" not in text_of(alone, [], "", both, 1.0), "nothing would be left"


def test_the_same_trouble_of_many_ranks_is_one_line() -> None:
    merged = ordered([Trouble("warn", (rank,), "little memory") for rank in range(24)])
    assert merged == [Trouble("warn", tuple(range(24)), "little memory")]
    assert ranks_named("rank 3 failed first (failed: 3), ranks 5-7, 9 wait for rank 3") == (3, 5, 6, 7, 9)


def test_a_variable_of_which_each_rank_has_its_own_is_one_warning() -> None:
    usual = {"NCCL_ALGO": "Ring"}
    (one,) = checks_variables._troubles([{**usual, "HF_OWN": str(rank)} for rank in range(9)])
    assert (one.level, one.ranks) == ("warn", tuple(range(1, 9)))
    (other,) = checks_variables._troubles([{"NCCL_ALGO": "Tree"}, usual, usual])
    assert (other.level, other.ranks) == ("fail", (0,))


@pytest.mark.parametrize(("node", "says"), [("n7", "n7"), ("n8", "n7.cluster"), (None, "n7.cluster")])
def test_hosts_have_the_names_that_slurm_takes(
    node: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "n7.cluster")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    if node is not None:
        monkeypatch.setenv("SLURMD_NODENAME", node)
    assert place()["host"] == says


def test_facts_are_held_against_what_most_have() -> None:
    assert minorities([{"a": "1"}, {"a": "1"}]) == {}
    assert minorities([{"a": "2"}, {"a": "1"}, {"a": "1"}]) == {"a": ("1", {"2": [0]})}
    assert minorities([{"a": "1"}, {}]) == {"a": ("1", {None: [1]})}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("HF_TOKEN", SECRET, "set, not shown"),
        ("HF_HUB_ACCESS_KEY", SECRET, "set, not shown"),
        ("HTTPS_PROXY", "http://me:word@proxy:80", "http://***@proxy:80"),
        ("https_proxy", "http://me:wo@r/d@proxy:80", "http://***@proxy:80"),
        ("HTTP_PROXY", "me:word@proxy:80", "***@proxy:80"),
        ("HF_ENDPOINT", "https://mirror/?access=word&sig=word", "https://mirror/?***"),
        ("TORCH_HOME", "s3://here/at?X-Amz-Signature=word", "s3://here/at?***"),
        ("HF_PWD", SECRET, "set, not shown"),
        ("HF_HUB_PAT", SECRET, "set, not shown"),
        ("HF_BEARER", SECRET, "set, not shown"),
        ("PYTHONPATH", "/a:/b", "/a:/b"),
        ("NCCL_IB_PKEY", "3", "3"),
        ("NCCL_TOPO_FILE", "a\nb", "a b"),
        ("TOKENIZERS_PARALLELISM", "false", "false"),
        ("NCCL_ALGO", "Ring", "Ring"),
    ],
)
def test_secrets_are_never_shown(name: str, value: str, says: str) -> None:
    assert shown(name, value) == says


def test_every_check_says_what_it_asks_and_fits_into_two_minutes() -> None:
    checks = all_checks()
    assert len({one.name for one in checks}) == len({one.order for one in checks}) == len(checks) == 9
    assert all(one.asks.endswith("?") for one in checks)
    assert sum(one.seconds for one in checks) <= 120
    order = [one.name for one in checks]
    assert order.index("versions") < order.index("products") < order.index("network") < order.index("parity")


@pytest.mark.usefixtures("alone")
def test_bad_options_are_told_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = ["--json", str(tmp_path / "check.json")]
    assert main(["check", "--only", "nothing", *file]) == 2
    assert "'nothing' is none; there are versions" in capsys.readouterr().err
    assert main(["check", "--list"]) == 0
    assert "products" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["check", "--seconds", "0"])
    (tmp_path / "file").touch()
    for wrong in (tmp_path, tmp_path / "file" / "check.json"):
        assert main(["check", "--only", "versions", "--json", str(wrong)]) == 2
        assert f"--json {wrong} cannot be written" in capsys.readouterr().err
    assert main(["check", "--only", " versions ,,versions", *file]) == 0
    assert list(json.loads((tmp_path / "check.json").read_text())["checks"]) == ["versions"]


@pytest.mark.usefixtures("alone")
def test_the_folder_of_another_check_stays_until_it_is_old(tmp_path: Path) -> None:
    other = temporary_beside(tmp_path / "run" / "check")
    other.mkdir(parents=True)
    words = ["check", "--only", "folder", "--root", str(other.parent), "--json", str(tmp_path / "check.json")]
    assert main(words) == 0
    assert other.is_dir()
    os.utime(other, (time.time() - 7200,) * 2)
    assert main(words) == 0
    assert not other.exists()


def _commands(folder: Path) -> tuple[list[int], list[str]]:
    """Codes and what a rank printed: of a check, env, a check where a rank differs, one without time."""
    rank = dist.get_rank()
    printed: list[str] = []
    codes: list[int] = []

    def run(*arguments: str) -> None:
        import contextlib
        import io

        with contextlib.redirect_stdout(io.StringIO()) as out:
            codes.append(main([*arguments]))
        printed.append(out.getvalue())

    chosen = ["--only", "versions,variables,folder", "--root", str(folder / "run")]
    with mock.patch.dict(os.environ, HF_TOKEN=SECRET):
        run("check", *chosen, "--json", str(folder / "check.json"))
        own = {"NCCL_ALGO": "Tree", "HF_TOKEN": f"{SECRET}{rank}"} if rank == 1 else {}
        with mock.patch.dict(os.environ, own):
            run("env")
            run("check", *chosen, "--json", str(folder / "other.json"))
    run("check", *chosen, "--json", str(folder / "late.json"), "--seconds", "0.001")
    return codes, printed


def test_the_commands_on_two_ranks(tmp_path: Path) -> None:
    (codes, (table, env, _, late)), other = run_distributed(_commands, 2, tmp_path)
    assert codes == [0, 0, 1, 1]
    assert other == (codes, ["", "", "", ""]), "rank 0 alone prints, and all return the same"
    assert "Healthy." in table
    assert re.search(r"NCCL_ALGO +not set  <- differs: Tree on rank 1", env)
    assert re.search(r"HF_TOKEN +set, not shown  <- differs: set, not shown on rank 1", env)
    assert "torch" in env
    assert SECRET not in table + env + (tmp_path / "check.json").read_text()
    found = json.loads((tmp_path / "other.json").read_text())
    assert found["healthy"] is False
    assert {tuple(one["ranks"]) for one in found["troubles"]} == {(1,)}
    assert not (tmp_path / "run").exists(), "what was made for the checks is gone"
    assert "FAIL  all ranks: not checked: the 0.001 seconds had passed; give more (--seconds)" in late
    assert re.search(r"FAIL +folder +0\.\d s +not seen: out of time", late)


def _without_a_folder(folder: Path) -> tuple[int, dict[str, Any]]:
    """The code, and what was found, of a check whose folder is not there on one of the ranks."""
    file = folder / "check.json"
    blind = mock.patch.object(Path, "is_dir", return_value=False)
    with blind if dist.get_rank() == 1 else mock.patch.dict(os.environ):
        words = ["--only", "folder,parity", "--root", str(folder / "run"), "--json", str(file)]
        code = main(["check", *words])
    dist.barrier()
    return code, json.loads(file.read_text())


def test_a_folder_that_is_not_there_on_a_rank(tmp_path: Path) -> None:
    for code, found in run_distributed(_without_a_folder, 2, tmp_path):
        assert code == 1
        (trouble,) = found["troubles"]
        assert trouble["ranks"] == [1]
        assert "is not there, or is another folder than that of rank 0" in trouble["text"]
        assert found["checks"]["parity"]["verdict"] == "unseen"
        assert "mount it on every node" in found["checks"]["parity"]["unseen"]


def test_options_of_the_table_of_commands() -> None:
    parser = argparse.ArgumentParser()
    add_check(parser)
    args = parser.parse_args([])
    assert (args.seconds, str(args.json)) == (120.0, "check.json")


@pytest.mark.parametrize(
    ("family", "options", "says"),
    [
        ("mixtral", {"ep": 4}, ""),
        ("llama", {"ep": 2}, "'llama': plan it with --ep=1"),
        (None, {"ep": 2}, "share out experts of 'llama': plan it with --ep=1"),
        ("mixtral", {"ep": 8}, "--ep=8 does not divide the 4 experts of a layer"),
        ("mixtral", {"ep": 2, "cp": 2}, "--ep 2 goes without --cp"),
        ("mixtral", {"ep": 3}, "--ep must divide the 8 ranks, got 3"),
        ("t5", {}, "cannot be built as a causal language model"),
    ],
)
def test_what_a_model_cannot_do_is_told_before_the_checks(
    family: str | None, options: dict[str, int], says: str, tmp_path: Path
) -> None:
    if family is not None:
        tiny_config(family).save_pretrained(tmp_path)
    parser = argparse.ArgumentParser()
    add_check(parser)
    given = [] if family is None else ["--model", str(tmp_path)]
    args = parser.parse_args([*given, *(f"--{name}={value}" for name, value in options.items())])
    told = pytest.raises((ValueError, UnsupportedModelError), match=re.escape(says))
    with told if says else nullcontext():
        _asked(args, 8)


@pytest.fixture
def interrupts() -> Iterator[Callable[[Any], None]]:
    """Sets what SIGINT does; it is ignored where these tests run in the background of a shell."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


def _interrupted(seconds: float) -> list[str]:
    """What is said, and the exit code, when SIGINT comes to the checks."""
    said: list[str] = []
    left = threading.Event()

    def leave(code: int) -> None:
        said.append(str(code))
        left.set()

    with mock.patch.object(command.os, "_exit", leave), command.ended_with_words(said.append):
        os.kill(os.getpid(), signal.SIGINT)
        left.wait(seconds)
    return said


def test_ctrl_c_prints_what_is_known(interrupts: Callable[[Any], None]) -> None:
    interrupts(signal.default_int_handler)
    assert _interrupted(10) == ["interrupted (SIGINT)", "130"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_is_ignored_stays_so(interrupts: Callable[[Any], None]) -> None:
    interrupts(signal.SIG_IGN)
    assert _interrupted(0.5) == []
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
