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
    first, victim = (
        Program(
            script,
            what,
            str(folder / "check.json"),
            environment=environment(RANK=str(rank), LOCAL_RANK=str(rank), **common),
        )
        for rank in range(2)
    )
    outcome = first.wait(60)
    victim.wait(60 if what == "hangs" else 1)
    return outcome


def test_a_rank_that_dies_is_in_the_table(tmp_path: Path) -> None:
    code, printed = _play(tmp_path, "dies")
    assert code == 1, printed
    flat = " ".join(printed.split())
    table = flat[flat.index("fsdp-sft check: world size 2") :]
    assert "FAIL all ranks: raised LostRankError: another rank has died" in table, printed
    assert "ok environment" in table
    found = json.loads((tmp_path / "check.json").read_text())
    assert (found["healthy"], found["stopped"]) == (False, "products")


def test_the_watchdog_names_a_rank_that_hangs_in_a_check(tmp_path: Path) -> None:
    code, printed = _play(tmp_path, "hangs")
    assert code == STALL_EXIT_CODE, printed
    assert "ok    environment" in printed
    assert re.search("rank 1 .*outside of a collective in step 1, phase products", printed), printed
