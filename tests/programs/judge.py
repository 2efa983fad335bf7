"""One program: performed with the library and plainly, and how it ended."""

import tempfile
import traceback
from pathlib import Path
from typing import Any

import fsdp_sft as fs
from tests.compositions.judge import Outcome
from tests.harness.ranks import run_distributed
from tests.programs.ours import Told, run
from tests.programs.plain import Plain
from tests.programs.writing import Program

SECONDS = 120  # a program may take; one that hangs is a fault
TOLERANCE = 2e-5  # relative, of float32


def judge(program: Program) -> Outcome:
    """Try one program; never raises."""
    with tempfile.TemporaryDirectory(prefix="program-") as name:
        try:
            _judged(program, Path(name))
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            return Outcome("fault", f"{str(error)[:400]} ... {text[-1200:]}")
    return Outcome("equal")


def _judged(program: Program, folder: Path) -> None:
    results = run_distributed(run, program.ranks, program, folder, timeout=SECONDS)
    if program.odd is not None:
        _all_refused(program, [told for told, _, _ in results])
        return
    windows = [list(of_ranks) for of_ranks in zip(*(taken for _, taken, _ in results), strict=True)]
    plain = Plain(program, windows)
    for index, step in enumerate(program.steps):
        where = f"step {index}, {step}"
        told = [told[index] for told, _, _ in results]
        expected = plain.refusals(step)
        names = {name for name, _ in told}
        assert len(names) == 1, f"{where}: the ranks ended in {names}: {told}"
        [name] = names
        if name != "value":
            assert name in expected, f"{where} ended in {told[0]}, expected {expected}"
            plain.refuse(step)
            continue
        assert not expected, f"{where} gave {told[0]}, expected {expected}"
        value = plain.perform(step)
        for _, own in told:
            _compare(own, value, where)
    for _, _, whole in results:
        for name, parameter in plain.whole().items():
            off = float((whole[name] - parameter).abs().max() / parameter.abs().max().clamp(min=1e-3))
            assert off <= TOLERANCE, f"{name} is {off:.2g} off at the end"


def _all_refused(program: Program, told: list[list[Told]]) -> None:
    """Every rank ends in a typed error, once one has done what the others do not."""
    endings = [own[-1] for own in told]
    for name, message in endings:
        kind: Any = getattr(fs, name, None)
        assert kind is not None, f"{program.odd}: {endings}"
        assert issubclass(kind, fs.FsdpSftError), f"{program.odd}: {endings}"
        assert message


def _compare(own: Any, expected: Any, where: str) -> None:
    if isinstance(expected, float):
        assert abs(own - expected) <= TOLERANCE * max(abs(expected), 1e-3), f"{where}: {own}, not {expected}"
    elif isinstance(expected, (list, tuple)):
        assert len(own) == len(expected), where
        for one, other in zip(own, expected, strict=True):
            _compare(one, other, where)
    else:
        assert own == expected, f"{where}: {own}, not {expected}"
