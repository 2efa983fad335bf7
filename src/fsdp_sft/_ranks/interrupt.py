"""Ctrl-C in one line per rank, instead of a stack from each: nobody reads those of many ranks."""

import sys
from types import TracebackType

from fsdp_sft._process.callers import is_ours
from fsdp_sft._ranks.agree import this_rank


def say_interrupts_in_a_line() -> None:
    """Set a ``sys.excepthook`` that prints a ``KeyboardInterrupt`` in one line, others as before."""
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print(f"rank {this_rank()}: interrupted{_place(trace)}", file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def _place(trace: TracebackType | None) -> str:
    """The line of the caller's program, and the function of this library that it was in."""
    program = ours = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if trace.tb_frame.f_globals.get("__name__") == "__main__":
            program = f" at {code.co_filename}:{trace.tb_lineno}"
        if not ours and is_ours(trace.tb_frame):
            ours = f" in {code.co_name}"
        trace = trace.tb_next
    return f"{program}{ours}"
