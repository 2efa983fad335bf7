"""A process that renders chat templates: ``python -P -m fsdp_sft._process.template_worker``.

Jobs come and answers go through its standard input, which is a socket. Answers are JSON, since a template
is a stranger's. What others print goes to its standard error.
"""

import json
import os
import pickle
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jinja2

from fsdp_sft._compat.tokenizers import render_chat


def main() -> None:
    """Answer jobs until there are no more. The system ends the process when the time of one is up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to the whole group: the other process decides
    jobs = Connection(os.dup(sys.stdin.fileno()))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    render_chat("", [], variables={})  # what is imported does not count
    grown = int.from_bytes(jobs.recv_bytes(), "little")
    _limit_memory(grown)
    jobs.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            job = jobs.recv_bytes()
            jobs.send_bytes(json.dumps(_answer(job, grown)).encode())
            signal.setitimer(signal.ITIMER_PROF, 0)


def _answer(job: bytes, grown: int) -> dict[str, Any]:
    try:
        seconds, arguments = pickle.loads(job)  # from the process that started this one
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of the CPU; its signal ends the process, even in C
        text, spans = render_chat(**arguments)
        return (
            {"over": True} if len(text) > grown // 8 else {"text": text, "spans": spans}
        )  # copied several times
    except MemoryError:
        return {"over": True}
    except jinja2.TemplateSyntaxError as error:
        where = f"line {error.lineno}: {error.message}"
        return {"error": f"{type(error).__name__}: {where}", "syntax": where}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000], "syntax": None}


def _limit_memory(grown: int) -> None:
    """Let the process have so much more memory than it has now."""
    with suppress(FileNotFoundError):  # a system without /proc, where the limit would not be heeded either
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + grown,) * 2)


if __name__ == "__main__":
    main()
