"""Write requirements.lock: everything that `make test` needs, with versions and hashes, for this platform.

    make lock

It is for CPython 3.11 on Linux x86_64, with the CPU build of torch (https://download.pytorch.org/whl/cpu).
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = """\
# Written by `make lock`: what `make lint` and `make test` install on CPython 3.11, Linux x86_64.
# torch is the CPU build of https://download.pytorch.org/whl/cpu.
# Elsewhere constraints.txt is used, without hashes.
"""


def main() -> None:
    """Let pip resolve, and write what it would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        wanted = [*("--editable", ".[dev]"), "hatchling>=1.25,<2", "editables"]
        command = ["install", "--dry-run", "--ignore-installed", "--quiet", "--constraint", "constraints.txt"]
        subprocess.run(
            [sys.executable, "-m", "pip", *command, "--report", str(report), *wanted], cwd=ROOT, check=True
        )
        found = json.loads(report.read_text())["install"]
    lines = []
    for one in found:
        name, version = one["metadata"]["name"].lower().replace("_", "-"), one["metadata"]["version"]
        if name != "fsdp-sft":
            digest = one["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{name}=={version} --hash=sha256:{digest}\n")
    (ROOT / "requirements.lock").write_text(HEAD + "".join(sorted(lines)))


if __name__ == "__main__":
    main()
