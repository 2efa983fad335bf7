"""A process that renders chat templates: ``python -P -m fsdp_sft.collate.template_worker``.

Jobs come through its standard input, and answers go through its standard output, as JSON, since a template is
a stranger's: a length of 8 bytes, and as many bytes. What others print goes to its standard error.
"""

import json
import os
import pickle
import resource
import sys
from pathlib import Path
from typing import IO, Any

from fsdp_sft._compat.tokenizers import render_chat


def main() -> None:
    """Answer jobs until there are no more."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        render_chat("", [], variables={})  # what is imported does not count
        _answer(answers, None)
        grown = int.from_bytes(sys.stdin.buffer.read(8), "little")
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + grown,) * 2)
        while length := int.from_bytes(sys.stdin.buffer.read(8), "little"):
            data = sys.stdin.buffer.read(length)
            try:
                text, spans = render_chat(**pickle.loads(data))  # from the process that started this one
                if len(text) > grown // 8:  # the other process makes several copies
                    raise MemoryError
                _answer(answers, {"text": text, "spans": spans})
            except MemoryError:
                _answer(answers, {"over": True})
            except Exception as error:
                _answer(answers, {"error": f"{type(error).__name__}: {error}"[:2000]})


def _answer(answers: IO[bytes], value: Any) -> None:
    data = json.dumps(value).encode()
    answers.write(len(data).to_bytes(8, "little") + data)
    answers.flush()


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
