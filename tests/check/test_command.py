"""The commands ``check`` and ``env``: what they print and return, and the table that a person reads."""

import io
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_sft._ranks.init import DistributedContext
from fsdp_sft.check import CheckedJob, Problem, _apart, host_name, shown
from fsdp_sft.check.command import Done, lines_of, ordered, to_json
from fsdp_sft.commands import main
from fsdp_sft.jobs.watchdog import STALL_EXIT_CODE
from tests.harness.forks import Program
from tests.harness.launches import environment
from tests.harness.models import tiny_config
from tests.harness.ranks import run_distributed

SECRET = "hf_abcdefghijklmnop"


@pytest.fixture
def alone() -> Iterator[None]:
    """Without a process group afterwards: the command makes one in the process of the tests."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _job_of(hosts: str) -> CheckedJob:
    """Rank 0's view of a job whose ranks are on these hosts, of one letter each."""
    context = DistributedContext(0, 0, len(hosts), 2, torch.device("cpu"), "gloo", "torchrun")
    return CheckedJob(context, list(hosts))


def test_the_table_names_what_is_wrong_first_and_the_nodes_to_leave_out() -> None:
    slow = Problem("fail", (2, 3), "it is slow", exclude=True)
    clock = Problem("warn", (1,), "its clock is off")
    done = [
        Done("environment", "seen", [clock], 1.0),
        Done("products", "fast", [slow], 1.0),
        Done("network", "not seen: no device", [], 1.0),
    ]
    given = (_job_of("aabbcc"), done, ordered([clock, slow]))
    lines = list(lines_of(*given))
    assert lines[0] == "fsdp-sft check: world size 6 on a, b, c, cpu, gloo"
    assert lines[2:4] == ["FAIL  ranks 2, 3 on b: it is slow", "warn  rank 1 on a: its clock is off"]
    assert [line.split()[:2] for line in lines[5:8]] == [
        ["warn", "environment"],
        ["FAIL", "products"],
        ["-", "network"],
    ]
    assert lines[-1] == "To leave the node out: --exclude=b"
    assert to_json(*given)["exclude"] == ["b"]
    both = [Problem("fail", (0, 1), "slow", exclude=True)]
    assert "exclude" not in "".join(lines_of(_job_of("aa"), [], both)), "nothing would be left"


def test_the_same_problem_of_many_ranks_is_one_line() -> None:
    merged = ordered([Problem("warn", (rank,), "little memory") for rank in range(24)])
    assert merged == [Problem("warn", tuple(range(24)), "little memory")]


def test_a_variable_of_which_each_rank_has_its_own_is_one_warning() -> None:
    own = [{"NCCL_ALGO": "Ring", "HF_OWN": str(rank)} for rank in range(9)]
    one_apart = [{"NCCL_ALGO": name} for name in ("Tree", "Ring", "Ring")]
    for given, expected in ((own, ("warn", tuple(range(1, 9)))), (one_apart, ("fail", (0,)))):
        assert [(problem.level, problem.ranks) for problem in _apart(given)] == [expected]


@pytest.mark.parametrize(("node", "says"), [("n7", "n7"), ("n8", "n7.cluster"), ("", "n7.cluster")])
def test_hosts_have_the_names_that_slurm_takes(node: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "n7.cluster")
    monkeypatch.setenv("SLURMD_NODENAME", node)
    assert host_name() == says


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


@pytest.mark.usefixtures("alone")
def test_bad_options_are_told_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = ["--json", str(tmp_path / "check.json")]
    with pytest.raises(SystemExit, match="2"):
        main(["check", "--only", "nothing", *file])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
    (tmp_path / "file").touch()
    for wrong in (tmp_path, tmp_path / "file" / "check.json"):
        assert main(["check", "--only", "environment", "--json", str(wrong)]) == 2
        assert str(tmp_path) in capsys.readouterr().err
    tiny_config("t5").save_pretrained(tmp_path)
    for words, code in ((["--cp", "3"], 2), (["--model", str(tmp_path)], 2), (["folder"], 0)):
        assert main(["check", "--only", "environment", *words, *file]) == code
    assert list(json.loads((tmp_path / "check.json").read_text())["checks"]) == ["environment", "folder"]


def _commands(folder: Path) -> list[tuple[int, str]]:
    """The code and what a rank printed: of a check, env, a check where a rank differs."""
    rank = dist.get_rank()

    def run(*arguments: str) -> tuple[int, str]:
        with redirect_stdout(io.StringIO()) as out:
            return main([*arguments]), out.getvalue()

    chosen = ["check", "--only", "environment", "folder", "--root", str(folder / "run")]
    own = {"NCCL_ALGO": "Tree", "HF_TOKEN": f"{SECRET}{rank}"} if rank == 1 else {}
    with mock.patch.dict(os.environ, HF_TOKEN=SECRET):
        healthy = run(*chosen, "--json", str(folder / "check.json"))
        with mock.patch.dict(os.environ, own):
            return [healthy, run("env"), run(*chosen, "--json", str(folder / "other.json"))]


def test_the_commands_on_two_ranks(tmp_path: Path) -> None:
    first, other = run_distributed(_commands, 2, tmp_path)
    assert [code for code, _ in first] == [0, 0, 1]
    assert other == [(code, "") for code, _ in first], "rank 0 alone prints, and all return the same"
    (_, table), (_, env), _ = first
    assert "Healthy" in table
    for says in (r"NCCL_ALGO +not set  <- differs: Tree on rank 1", r"HF_TOKEN +set, not shown\n", "torch"):
        assert re.search(says, env)
    assert SECRET not in table + env + (tmp_path / "check.json").read_text()
    found = json.loads((tmp_path / "other.json").read_text())
    assert (found["healthy"], {tuple(one["ranks"]) for one in found["problems"]}) == (False, {(1,)})
    assert not list((tmp_path / "run").iterdir()), "what was made for the checks is gone"


def _without_a_folder(folder: Path) -> tuple[int, dict[str, Any]]:
    """The code, and what was found, of a check whose folder is not there on one of the ranks."""
    file, mkdir = folder / "check.json", Path.mkdir

    def not_there(path: Path, *args: Any, **kwargs: Any) -> None:
        mkdir(path.parent / "gone" / "old" if ".check-" in str(path) else path, *args, **kwargs)

    blind = mock.patch.object(Path, "mkdir", not_there)
    words = ["check", "--only", "folder", "parity", "--root", str(folder / "run"), "--json", str(file)]
    with blind if dist.get_rank() == 1 else nullcontext():
        code = main(words)
    dist.barrier()
    return code, json.loads(file.read_text())


def test_a_folder_that_is_not_there_on_a_rank(tmp_path: Path) -> None:
    for code, found in run_distributed(_without_a_folder, 2, tmp_path):
        (problem,) = found["problems"]
        assert (code, problem["ranks"], found["checks"]["parity"]["verdict"]) == (1, [1], "-")
        assert "No such file or directory" in problem["text"]


# --- a rank that dies or hangs in a check is named, with the table of what was seen before -----------------

SCRIPT = """
import os, signal, sys, time
from fsdp_sft.check import command
from fsdp_sft.commands import main

command._SILENCE = 4.0
products = command.CHECKS["products"]

def planted(job):
    if os.environ["RANK"] == "1":
        if sys.argv[1] == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "hangs":
            time.sleep(600)
    return products(job)

command.CHECKS["products"] = planted
sys.exit(main(["check", "--only", "environment", "products", "--json", sys.argv[2]]))
"""


def _play(folder: Path, what: str) -> tuple[int | None, str]:
    """Exit code and words of the first of two ranks, of which the other dies or hangs in the products."""
    script = folder / "planted.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = (environment(RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(2))
    first, victim = (Program(script, what, str(folder / "check.json"), environment=place) for place in places)
    outcome = first.wait(60)
    victim.wait(60 if what == "hangs" else 1)
    return outcome


def test_a_rank_that_dies_is_in_the_table(tmp_path: Path) -> None:
    code, printed = _play(tmp_path, "dies")
    assert code == 1, printed
    table = " ".join(printed.split()).partition("fsdp-sft check: world size 2")[2]
    assert "FAIL all ranks: raised LostRankError: another rank has died" in table, printed
    assert "ok environment" in table
    found = json.loads((tmp_path / "check.json").read_text())
    assert (found["healthy"], found["stopped"]) == (False, "products")


def test_the_watchdog_names_a_rank_that_hangs_in_a_check(tmp_path: Path) -> None:
    code, printed = _play(tmp_path, "hangs")
    assert code == STALL_EXIT_CODE, printed
    assert "ok    environment" in printed
    assert re.search(
        r"rank 1 .*outside of a collective in step 1, phase products.*\n *rank 0 .*waiting in agreed", printed
    ), printed
