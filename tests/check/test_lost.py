"""A rank that dies or hangs in a check is named, with the table of what was seen before."""

import json
import re
import socket
from pathlib import Path

import pytest

from tests.harness.forks import Program
from tests.harness.launches import environment

SCRIPT = """
import os, signal, sys, time
from fsdp_sft.check import sequence
from fsdp_sft.check.checks import machine
from fsdp_sft.check.mechanism import Check, Outcome
from fsdp_sft.commands import main

sequence._AT_LEAST, sequence._PATIENCE = 4.0, 0.0

def run(cluster):
    if os.environ["RANK"] == sys.argv[2]:
        if sys.argv[1] == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if sys.argv[1] == "hangs":
            time.sleep(600)
    return machine.CHECK.run(cluster)

known = sequence.all_checks()
planted = [Check(c.name, c.asks, c.order, c.seconds, run if c.name == "machine" else c.run) for c in known]
import fsdp_sft.check.command as command
command._BETWEEN = 6.0
command.all_checks = lambda: planted
sys.exit(main(["check", "--only", "versions,machine,reductions", "--json", sys.argv[3]]))
"""


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _play(folder: Path, what: str, victim: int, ranks: int) -> tuple[list[tuple[int | None, str]], Path]:
    script, found = folder / "planted.py", folder / "check.json"
    script.write_text(SCRIPT)
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(_port())
    programs = [
        Program(
            script,
            what,
            str(victim),
            str(found),
            environment=environment(RANK=str(rank), LOCAL_RANK=str(rank), **common),
        )
        for rank in range(ranks)
    ]
    others = [program.wait(60) if rank != victim else (None, "") for rank, program in enumerate(programs)]
    others[victim] = programs[victim].wait(60 if what == "hangs" else 1)
    return others, found


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("dies", r"rank 1 on \S+ died|rank 1 .*is dead"),
        ("hangs", "rank 1 .*hangs outside of a collective"),
        pytest.param("stops", "rank 1 .*is stopped", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_named_in_the_table(tmp_path: Path, what: str, says: str) -> None:
    outcomes, file = _play(tmp_path, what, 1, 2)
    code, printed = outcomes[0]
    assert code == 1, printed
    flat = " ".join(printed.split())
    table = flat[flat.index("fsdp-sft check: 2 ranks") :]
    found = json.loads(file.read_text())
    assert re.search(says, table), printed
    assert re.search(r"FAIL rank 1 (on|\(host)", table), printed
    assert "ok versions" in table
    assert found["healthy"] is False
    assert found["troubles"][0]["ranks"] == [1]
