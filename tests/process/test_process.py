"""Processes are told apart by their machine's start, not by its name."""

import subprocess
import sys

from fsdp_sft._process.identity import process_state, this_process


def test_processes_are_told_apart() -> None:
    pid, born, machine = this_process()
    assert process_state(pid, born, machine) == "running"
    assert process_state(pid, born + "1", machine) == "dead", "another one had this number"
    assert process_state(2**22 + 1, born, machine) == "dead"
    # Two hosts of one name whose process namespaces have one number, as nearly all hosts have.
    boot, _, namespace = machine.partition(" ")
    assert namespace.startswith("pid:")
    assert process_state(2**22 + 1, born, f"{boot[::-1]} {namespace}") == ""
    assert process_state(pid, born, f"{boot} pid:[1]") == ""
    assert process_state(pid, "", "") == ""


def test_the_end_of_a_process_shows() -> None:
    code = """if True:
        from fsdp_sft._process.identity import this_process
        print(*this_process(), sep=chr(31), flush=True)
        input()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    pid, born, machine = child.stdout.readline().rstrip("\n").split(chr(31))
    process = int(pid), born, machine
    assert process_state(*process) == "running"
    child.kill()
    while child.poll() is None:  # a corpse until somebody has asked
        assert process_state(*process) in ("running", "dead")
    assert process_state(*process) == "dead"
