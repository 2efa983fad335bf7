"""Chat templates of strangers end, and take no more memory than a conversation needs.

A template is a program in a sandbox that keeps it from files and from Python, and not from looping for ever
or making a text of gigabytes. Loops are watched where templates are rendered. A single operation cannot be
interrupted, so a template with others than are known to be bounded is rendered in a process of its own.
"""

import atexit
import json
import os
import pickle
import select
import subprocess
import threading
import time
from functools import lru_cache
from typing import Any

from fsdp_sft._compat import tokenizers
from fsdp_sft._process.modules import start_module
from fsdp_sft._process.watched import OverLimitError, watched

SECONDS, GROWN_BYTES = 10.0, 1 << 30
_START_SECONDS = 120  # for importing transformers
# Filters and methods whose result is hardly larger than what they are given; those of the second set with
# small arguments only.
_BOUNDED = {
    *("trim", "length", "count", "upper", "lower", "title", "capitalize", "string", "int", "float", "list"),
    *("first", "last", "default", "d", "safe", "escape", "e", "abs", "min", "max", "sort", "unique"),
    *(
        "reverse",
        "items",
        "select",
        "reject",
        "selectattr",
        "rejectattr",
        "dictsort",
        "keys",
        "values",
        "get",
    ),
    *(
        "strip",
        "lstrip",
        "rstrip",
        "split",
        "rsplit",
        "splitlines",
        "startswith",
        "endswith",
        "find",
        "rfind",
    ),
    *("index", "partition", "rpartition", "removeprefix", "removesuffix", "isdigit", "isspace", "isupper"),
    *("islower", "isalpha", "isalnum", "cycle", "changed"),
}
_BY_ARGUMENTS = {"tojson", "join", "replace", "indent", "truncate"}
_FUNCTIONS = {"raise_exception", "strftime_now", "range", "namespace", "dict", "caller"}
_OF_PLAIN = {
    "length",
    "count",
    "trim",
    "string",
    "int",
    "upper",
    "lower",
    "tojson",
}  # give a text or a number
_SMALL = 1000
_over: set[str] = set()  # templates that have gone over a limit


class TemplateRunError(ValueError):
    """What a template has raised in another process, with the name of the error."""


def render(
    template: str,
    messages: list[dict[str, Any]],
    *,
    variables: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Render one conversation as ``render_chat`` does, within limits.

    Raises:
        ValueError: If it takes too long, or too much memory. The template is not tried again: a probe renders
            it a dozen times, and a data set a million times.
        TemplateRunError: If the template raises an error in another process.
        Exception: What else it raises.
    """
    told = (
        f"it takes more than {SECONDS:g} s, or {GROWN_BYTES >> 30} GiB of memory: is it a program that does "
        "not end?"
    )
    if template in _over:
        raise ValueError(told)
    job: dict[str, Any] = {"variables": variables, "tools": tools}
    job |= {"template": template, "messages": messages, "add_generation_prompt": add_generation_prompt}
    try:
        if is_rendered_apart(template):
            return _apart.render(job)
        with watched(SECONDS, GROWN_BYTES):
            return tokenizers.render_chat(**job)
    except OverLimitError:
        _over.add(template)
        raise ValueError(told) from None


@lru_cache(maxsize=64)
def is_rendered_apart(template: str) -> bool:
    """Whether a template is rendered in a process of its own: it has an operation that could not be ended.

    Raises:
        TemplateSyntaxError: If it does not parse.
    """
    return may_grow(tokenizers.parsed_template(template))


class _Apart:
    """A process that renders templates, and is ended when one takes too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, job: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text and the spans; raises OverLimitError at a limit, or if the process ends."""
        try:
            sent = pickle.dumps(job)
        except Exception as error:
            raise ValueError(
                f"its variables cannot be sent to the process that renders it: {error}"
            ) from None
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self.end()  # by the system, or by hand, between two jobs
            process = self._process or self._start()
            try:
                found = self._ask(process, sent, SECONDS)
            except BaseException:  # KeyboardInterrupt too: an answer that is left would be the next one's
                self.end()
                raise
        if "over" in found:
            raise OverLimitError
        if "error" in found:
            raise TemplateRunError(found["error"])
        return found["text"], [(start, stop) for start, stop in found["spans"]]

    def _start(self) -> "subprocess.Popen[bytes]":
        self._process = process = start_module("fsdp_sft.collate.template_worker")
        try:
            _receive(process, _START_SECONDS)
        except OverLimitError:
            self.end()
            raise ValueError("a process for rendering it cannot be started") from None
        _send(process, GROWN_BYTES.to_bytes(8, "little"))
        return process

    def _ask(self, process: "subprocess.Popen[bytes]", sent: bytes, seconds: float) -> Any:
        _send(process, len(sent).to_bytes(8, "little") + sent)
        return _receive(process, seconds)

    def end(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _send(process: "subprocess.Popen[bytes]", data: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(data)
        process.stdin.flush()
    except BrokenPipeError:
        raise OverLimitError from None


def _receive(process: "subprocess.Popen[bytes]", seconds: float) -> Any:
    assert process.stdout is not None
    end, fd, data = time.monotonic() + seconds, process.stdout.fileno(), bytearray()
    poll, wanted = select.poll(), 8
    poll.register(fd, select.POLLIN)
    while len(data) < wanted:
        if not poll.poll(max(0, end - time.monotonic()) * 1000):
            raise OverLimitError
        block = os.read(fd, min(wanted - len(data), 1 << 20))
        if not block:
            raise OverLimitError
        data += block
        if wanted == len(data) == 8:
            wanted += int.from_bytes(data, "little")
    return json.loads(data[8:])


_apart = _Apart()
atexit.register(lambda: _apart.end())


def _begin_anew() -> None:
    """In a forked process: the other one is its parent's."""
    global _apart
    _apart = _Apart()


os.register_at_fork(after_in_child=_begin_anew)


def may_grow(parsed: Any) -> bool:
    """Whether a single operation of a template may make much more than it is given, or take for ever.

    What is not known to be bounded may.
    """
    from jinja2 import nodes

    made = _made(parsed)
    set_here = {name.name for name in parsed.find_all(nodes.Name) if name.ctx != "load"}
    functions = (_FUNCTIONS | {macro.name for macro in parsed.find_all(nodes.Macro)}) - set_here
    for node in parsed.find_all(
        (nodes.Mul, nodes.Pow, nodes.Mod, nodes.FloorDiv, nodes.Filter, nodes.Call, nodes.Name)
    ):
        if isinstance(node, nodes.Name):
            if node.name in ("varargs", "kwargs"):
                return True
        elif isinstance(node, nodes.BinExpr):
            if not (isinstance(node, nodes.Mod) and _is_number(node.left)):
                return True
        elif not _is_bounded(node, functions):
            return True
    return _doubles(parsed, made)


def _made(parsed: Any) -> set[str]:
    """Names whose values a template may make of earlier values."""
    from jinja2 import nodes

    made = {node.target.name for node in parsed.find_all((nodes.Assign, nodes.AssignBlock)) if _is_name(node)}
    for several in (node.target for node in parsed.find_all(nodes.Assign) if not _is_name(node)):
        made |= {name.name for name in several.find_all(nodes.Name)}
    return made | {
        argument.name for node in parsed.find_all((nodes.Macro, nodes.CallBlock)) for argument in node.args
    }


def _is_bounded(node: Any, functions: set[str]) -> bool:
    """Whether a filter, or a call, makes little more than it is given."""
    from jinja2 import nodes

    if node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    if isinstance(node, nodes.Filter):
        name = node.name
    elif isinstance(node.node, nodes.ExtensionAttribute):  # a generation tag
        return True
    elif isinstance(node.node, nodes.Name):
        return node.node.name in functions
    else:
        name = node.node.attr if isinstance(node.node, nodes.Getattr) else ""
    arguments = [*node.args, *(keyword.value for keyword in node.kwargs)]
    if name == "int" and arguments:  # another base than 10, for which Python has no limit of digits
        return False
    return name in _BOUNDED or (name in _BY_ARGUMENTS and all(map(_is_small, arguments)))


def _doubles(parsed: Any, made: set[str]) -> bool:
    """Whether a value that the template has made may come into another one twice: [x, x], or x + x."""
    from jinja2 import nodes

    for node in parsed.find_all((nodes.List, nodes.Tuple, nodes.Dict, nodes.Call)):
        if not isinstance(node, nodes.Call):
            held = node.items if getattr(node, "ctx", "load") == "load" else []
        elif getattr(node.node, "name", "") in ("dict", "namespace"):
            held = [keyword.value for keyword in node.kwargs] + node.args
        else:
            continue
        if any(_holds(item, made) for item in held):
            return True
    sums = (
        added for node in parsed.find_all((nodes.Assign, nodes.Call)) for added in node.find_all(nodes.Add)
    )
    return any(_holds(added.left, made) and _holds(added.right, made) for added in sums)


def _is_name(node: Any) -> bool:
    return hasattr(node.target, "name")


def _holds(node: Any, names: set[str]) -> bool:
    """Whether the value of an expression may hold, or be, that of a name."""
    from jinja2 import nodes

    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, (nodes.Compare, nodes.Not, nodes.Test, nodes.Concat)):
        return False
    if isinstance(node, nodes.Filter) and node.name in _OF_PLAIN:
        return False
    return any(_holds(child, names) for child in node.iter_child_nodes())


def _is_number(node: Any) -> bool:
    """Whether a node is plainly a number: a constant, or a count of a loop."""
    from jinja2 import nodes

    if isinstance(node, nodes.Const):
        return isinstance(node.value, (int, float))
    if isinstance(node, nodes.Getattr):
        counts = {"index", "index0", "revindex", "revindex0", "length"}
        return getattr(node.node, "name", "") == "loop" and node.attr in counts
    return isinstance(node, nodes.Filter) and node.name in ("length", "count", "int")


def _is_small(node: Any) -> bool:
    """Whether an argument is a small constant."""
    from jinja2 import nodes

    if not isinstance(node, nodes.Const):
        return False
    value = node.value
    return len(value) < _SMALL if isinstance(value, str) else not isinstance(value, int) or value < _SMALL
