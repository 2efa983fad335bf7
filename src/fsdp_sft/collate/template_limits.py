"""Chat templates of strangers end, and take no more memory than a conversation needs.

A template is a program in a sandbox that keeps it from files and from Python, and not from looping for ever
or making a text of gigabytes. Loops are watched where templates are rendered. A single operation cannot be
interrupted, so a template with one that may make a large text is tried first, in a process of its own.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from fsdp_sft._compat import tokenizers
from fsdp_sft._process.watched import OverLimitError, watched

SECONDS, GROWN_BYTES = 10.0, 1 << 30
_TRIAL_SECONDS, _TRIAL_BYTES = 10, 1 << 30
# Filters and methods whose result may be much larger than what they are given.
_GROW = {
    *("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "format", "wordwrap", "batch", "slice"),
    *("replace", "join", "lipsum", "format_map", "sum"),
}
_WIDTHS_IN_TEXT = {"format", "format_map", "sum"}  # not in arguments that could be looked at
_SMALL = 1000
_over: set[str] = set()  # templates that have gone over a limit

_TRIAL = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({_TRIAL_BYTES}, {_TRIAL_BYTES}))
resource.setrlimit(resource.RLIMIT_CPU, ({_TRIAL_SECONDS}, {_TRIAL_SECONDS}))
import jinja2, jinja2.ext, jinja2.sandbox
class Generation(jinja2.ext.Extension):
    tags = {{"generation"}}
    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)
    def _same(self, caller):
        return caller()
def refuse(message):
    raise jinja2.TemplateError(message)
given = json.load(sys.stdin)
try:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.globals.update(raise_exception=refuse, strftime_now=lambda how: "2025")
    template = env.from_string(given["template"])
    for prompt in (False, True):
        variables = {{**given["variables"], "add_generation_prompt": prompt, "tools": None}}
        template.render(messages=given["messages"], **variables)
except MemoryError:
    sys.exit(3)
except Exception:
    pass
"""


@contextmanager
def within_limits(template: str) -> Iterator[None]:
    """Raise ValueError if rendering the template in the block takes too long, or too much memory.

    It is not tried again: a probe renders a template a dozen times, and a data set a million times.
    """
    told = (
        f"it takes more than {SECONDS:g} s, or {GROWN_BYTES >> 30} GiB of memory: is it a program that does "
        "not end?"
    )
    if template in _over:
        raise ValueError(told)
    try:
        with watched(SECONDS, GROWN_BYTES):
            yield
    except OverLimitError:
        _over.add(template)
        raise ValueError(told) from None


@lru_cache(maxsize=64)
def problem_of_trial(template: str, variables: str) -> str | None:
    """What a template does that no conversation needs; None for one that has no such operation, or ends.

    Args:
        template: The template.
        variables: Its variables, as JSON.
    """
    try:
        if not may_grow(tokenizers.parsed_template(template)):
            return None
    except Exception:  # its syntax is wrong, which is told elsewhere
        return None
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
    given = json.dumps({"template": template, "messages": messages, "variables": json.loads(variables)})
    command = [sys.executable, "-P", "-c", _TRIAL]  # -P: not from the current folder
    try:
        ended = subprocess.run(
            command, input=given.encode(), capture_output=True, timeout=2 * _TRIAL_SECONDS, check=False
        )
        is_sound = ended.returncode in (0, 1)
    except subprocess.TimeoutExpired:
        is_sound = False
    if is_sound:
        return None
    return f"it takes more than {_TRIAL_SECONDS} s or {_TRIAL_BYTES >> 30} GiB for four short messages"


def may_grow(parsed: Any) -> bool:
    """Whether a single operation of a template may make a text that is much larger than what it is given."""
    from jinja2 import nodes

    called = {id(node.node) for node in parsed.find_all(nodes.Call)}
    kinds = (nodes.Mul, nodes.Pow, nodes.Mod, nodes.Filter, nodes.Call, nodes.Getattr, nodes.Getitem)
    for node in parsed.find_all(kinds):
        if isinstance(node, (nodes.Getattr, nodes.Getitem)):
            name = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", "")
            if name in _GROW and (id(node) not in called or isinstance(node, nodes.Getitem)):
                return True  # a method that is called elsewhere, or by another form of its name
        elif isinstance(node, nodes.Mod):
            if not _is_number(node.left):
                return True
        elif isinstance(node, (nodes.Mul, nodes.Pow)):
            return True
        else:
            name = node.name if isinstance(node, nodes.Filter) else _called(node.node)
            arguments = [*node.args, *(keyword.value for keyword in node.kwargs)]
            if node.dyn_args is not None or node.dyn_kwargs is not None or name == "map":
                return True
            if name in _WIDTHS_IN_TEXT:
                return True
            if name == "lipsum" or (name in _GROW and not all(map(_is_small, arguments))):
                return True
    return False


def _called(node: Any) -> str:
    """The name of what is called: a function's or a method's."""
    return str(getattr(node, "attr", None) or getattr(node, "name", ""))


def _is_number(node: Any) -> bool:
    """Whether a node is plainly a number: a constant, or a count of a loop."""
    from jinja2 import nodes

    if isinstance(node, nodes.Const):
        return isinstance(node.value, (int, float))
    counts = {"index", "index0", "revindex", "revindex0", "length"}
    return getattr(node, "attr", "") in counts or getattr(node, "name", "") in ("length", "count", "int")


def _is_small(node: Any) -> bool:
    """Whether an argument is a small constant."""
    from jinja2 import nodes

    if not isinstance(node, nodes.Const):
        return False
    value = node.value
    return len(value) < _SMALL if isinstance(value, str) else not isinstance(value, int) or value < _SMALL
