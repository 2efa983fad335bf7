"""A rank that dies or hangs in a check is named, with the table of what was seen before."""

import json
import re
import socket
from pathlib import Path

from fsdp_sft.jobs.watchdog import STALL_EXIT_CODE
from tests.harness.forks import Program
from tests.harness.launches import environment

SCRIPT = """
import os, signal, sys, time
from fsdp_sft.check import command
from fsdp_sft.commands import main

command._SILENCE = 4.0
products = command.CHECKS["products"]

def planted(job):
    if os.environ["RANK"] == sys.argv[2]:
        if sys.argv[1] == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "hangs":
            time.sleep(600)
    return products(job)

command.CHECKS["products"] = planted
sys.exit(main(["check", "--only", "environment", "products", "--json", sys.argv[3]]))
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


def test_a_rank_that_dies_is_in_the_table(tmp_path: Path) -> None:
    outcomes, file = _play(tmp_path, "dies", 1, 2)
    code, printed = outcomes[0]
    assert code == 1, printed
    flat = " ".join(printed.split())
    table = flat[flat.index("fsdp-sft check: world size 2") :]
    assert re.search("FAIL all ranks: raised LostRankError: another rank has died", table), printed
    assert "ok environment" in table
    found = json.loads(file.read_text())
    assert found["healthy"] is False
    assert found["stopped"] == "products"


def test_the_watchdog_names_a_rank_that_hangs_in_a_check(tmp_path: Path) -> None:
    code, printed = _play(tmp_path, "hangs", 1, 2)[0][0]
    assert code == STALL_EXIT_CODE, printed
    assert "ok    environment" in printed
    assert re.search("rank 1 .*outside of a collective in step 1, phase products", printed), printed
