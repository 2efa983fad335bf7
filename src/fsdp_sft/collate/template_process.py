"""Chat templates of strangers are rendered in a process with limits.

A template is a program in a sandbox that keeps it from files and from Python, and not from looping for ever
or making a text of gigabytes. Nothing in a process can end a single operation of Python that does so; the
system can end a process. One for each process that renders takes 60 MB, and starts in about a second.
"""

import atexit
import json
import os
import pickle
import signal
import socket
import subprocess
import threading
from multiprocessing.connection import Connection
from typing import Any

from fsdp_sft._process.modules import start_module

SECONDS, GROWN_BYTES = 10.0, 1 << 30  # of the CPU, and beyond what the process has when it starts
_over: set[str] = set()  # templates that have gone over a limit


class TemplateRunError(ValueError):
    """A template cannot be rendered with what it was given.

    Attributes:
        syntax: What is wrong with the syntax of the template, with the line; None if it is something else.
    """

    def __init__(self, message: str, syntax: str | None = None) -> None:
        super().__init__(message)
        self.syntax = syntax


def render(
    template: str,
    messages: list[dict[str, Any]],
    *,
    variables: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Render one conversation as ``render_chat`` does, within limits.

    A template that has gone over a limit is not tried again: a probe renders it a dozen times, and a data set
    a million times.

    Raises:
        TemplateRunError: If it takes too long, or too much memory, or fails.
    """
    told = (
        f"it takes more than {SECONDS:g} s, or {GROWN_BYTES >> 30} GiB of memory: is it a program that does "
        "not end?"
    )
    if template in _over:
        raise TemplateRunError(told)
    job: dict[str, Any] = {"template": template, "messages": messages, "variables": variables}
    job |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
    try:
        sent = pickle.dumps((SECONDS, job))
    except Exception as error:
        raise TemplateRunError(
            f"what it is given cannot be sent to the process that renders it, but plain data can: {error}"
        ) from None
    found = _renderer.answer(sent)
    if found is None:
        _over.add(template)
        raise TemplateRunError(told)
    if "error" in found:
        raise TemplateRunError(found["error"], found["syntax"])
    return found["text"], [(start, stop) for start, stop in found["spans"]]


class _Renderer:
    """The process, which is started when it is needed, and again if it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def answer(self, job: bytes) -> Any:
        """The answer to a job; None if it goes over a limit, or ends the process each time."""
        with self._lock:
            for _ in range(2):  # another may have ended the process
                try:
                    found = json.loads(self._ask(job))
                except (EOFError, ConnectionError):
                    if self.end() == -signal.SIGPROF:  # its time was up
                        return None
                except BaseException:  # KeyboardInterrupt too: the answer would be taken for the next one's
                    self.end()
                    raise
                else:
                    return None if "over" in found else found
        return None

    def _ask(self, job: bytes) -> bytes:
        connection = self._connection or self._start()
        connection.send_bytes(job)
        return connection.recv_bytes()

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_module("fsdp_sft._process.template_worker", stdin=theirs)
        self._connection = connection = Connection(ours.detach())
        connection.send_bytes(GROWN_BYTES.to_bytes(8, "little"))
        try:
            connection.recv_bytes()
        except (EOFError, ConnectionError):
            raise RuntimeError(
                f"the process that renders chat templates ends at its start, with exit code {self.end()}; "
                "what it has printed stands above"
            ) from None
        return connection

    def end(self) -> int | None:
        """End the process, if there is one; its exit code."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        process.kill()
        return process.wait()

    def leave(self) -> None:
        """In a forked process: the other one is its parent's, and is not waited for."""
        if self._process is not None:
            self._process.returncode = 0


_renderer = _Renderer()
atexit.register(lambda: _renderer.end())


def _begin_anew() -> None:
    global _renderer
    _renderer.leave()
    _renderer = _Renderer()


os.register_at_fork(after_in_child=_begin_anew)
