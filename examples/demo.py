"""What `make demo` runs: train a tiny model, kill a rank on purpose, go on, and show all of it on one page.

    python examples/demo.py --output demo-output

`minimal_sft.py` is the training; this script starts it under torchrun, as a scheduler would.
"""

import argparse
import base64
import html
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from string import Template

import torch
from transformers import AutoTokenizer

import fsdp_sft as fs

HERE = Path(__file__).parent
KILL_AFTER = 70  # steps, of which 50 are saved
PLAN = ["plan", "--model", "examples/data/qwen2.5-7b", "--gpus", "8", "--gpu", "h100"]
PLAN += ["--seq", "4096", "--global-batch", "64"]


def logged(output: Path) -> list[dict]:
    """What the training has logged so far, a dict for each step."""
    log = output / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}") and '"loss"' in line]


def ranks_of(launcher: int) -> list[int]:
    """The processes that torchrun has started, in the order of their ranks."""
    return sorted(map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()))


def start(args: argparse.Namespace, *more: str, errors: Path) -> subprocess.Popen:
    """The training under torchrun; what torchrun says of a rank that was killed goes to a file."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={args.ranks}", str(HERE / "minimal_sft.py"), "--output", str(args.output)]
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.Popen([*command, *more, *args.further], env=environment, stderr=errors.open("w"))


def train_and_kill(args: argparse.Namespace) -> list[tuple[int, float, float]]:
    """(step, loss before the kill, loss after going on) of the steps that were made twice."""
    errors = args.output / "torchrun.txt"
    args.output.mkdir(parents=True)
    job = start(args, errors=errors)
    while job.poll() is None and len(logged(args.output)) < KILL_AFTER:
        time.sleep(0.05)
    if job.poll() is not None:
        raise SystemExit(f"the training ended early:\n{errors.read_text()[-3000:]}")
    victim = ranks_of(job.pid)[-1]
    os.kill(victim, signal.SIGKILL)
    print(
        f"\n\n*** rank {args.ranks - 1} (process {victim}) is killed on purpose after {KILL_AFTER} steps ***"
    )
    job.wait()
    before = {entry["step"]: entry["loss"] for entry in logged(args.output)}
    newest = fs.find_checkpoints(args.output / "checkpoints")[-1]
    print(
        f"*** step {newest.step} is on disk, sound: {newest.sound}. The same command goes on from there ***\n"
    )
    again = start(args, "--resume", "auto", errors=errors)
    if again.wait():
        raise SystemExit(errors.read_text()[-3000:])
    after = {entry["step"]: entry["loss"] for entry in logged(args.output)[len(before) :]}
    return [(step, before[step], after[step]) for step in sorted(before.keys() & after.keys())]


def labels_of_tool_chat(args: argparse.Namespace) -> str:
    """A page of the tokens of a chat with a tool call, those that are trained in colour."""
    tokenizer = AutoTokenizer.from_pretrained(args.output / "export")
    row = json.loads((HERE / "data" / "tool-chat.jsonl").read_text())
    encoded = fs.encode_chat(row, tokenizer)
    return fs.render_labels_html(tokenizer, [encoded.input_ids], [encoded.labels])


def frame(page: str, height: int) -> str:
    """A page of its own within this one."""
    return f'<iframe srcdoc="{html.escape(page)}" style="height:{height}px" title="labels"></iframe>'


def picture(path: Path, shows: str) -> str:
    """A PNG within the page; empty without matplotlib."""
    if not path.exists():
        return ""
    return f'<img alt="{shows}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'


def report(args: argparse.Namespace, twice: list[tuple[int, float, float]], plan: str) -> str:
    """The page: what is trained, the run, the kill, the plan, what lies where."""
    entries = logged(args.output)
    same = sum(one == other for _, one, other in twice)
    rows = "".join(f"<tr><td>{n}</td><td>{a!r}</td><td>{b!r}</td></tr>" for n, a, b in twice[:4])
    speed = sorted(entry.get("tokens_per_second") or 0 for entry in entries)[len(entries) // 2]
    files = "".join(
        f"<tr><td><code>{path.relative_to(args.output)}</code></td><td>{what}</td></tr>"
        for name, what in WHERE.items()
        if (path := args.output / name).exists()
    )
    page = Template((HERE / "report.html").read_text(encoding="utf-8"))
    return page.substitute(
        toy=frame((args.output / "labels.html").read_text(), 300),
        tool=frame(labels_of_tool_chat(args), 330),
        answers=html.escape((args.output / "answers.txt").read_text(encoding="utf-8")),
        loss=picture(args.output / "loss.png", "loss, gradient norm, throughput and memory over the steps"),
        first=f"{entries[0]['loss']:.3f}",
        last=f"{entries[-1]['loss']:.4f}",
        ranks=args.ranks,
        speed=f"{speed:,.0f}",
        kill=KILL_AFTER,
        begun=twice[0][0] - 1,
        same=same,
        twice=len(twice),
        rows=rows,
        command="fsdp-sft " + " ".join(PLAN),
        plan=html.escape(plan),
        files=files,
    )


WHERE = {
    "checkpoints": "the steps: model, optimizer and position in the data, with a checksum of each file",
    "export": "a plain Hugging Face folder, for <code>from_pretrained</code> and servers",
    "log.jsonl": "what each step logged; <code>loss.png</code> is its picture",
    "answers.txt": "what was asked before and after the training",
    "tiny-model": "the model before training",
    "torchrun.txt": "what torchrun said of the killed rank",
}


def main() -> None:
    """Train, kill, go on, plan, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument("--ranks", type=int, default=min(torch.cuda.device_count() or 2, 2))
    args, args.further = parser.parse_known_args()
    began = time.monotonic()
    twice = train_and_kill(args)
    command = [sys.executable, "-m", "fsdp_sft", *PLAN]
    plan = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    shown = plan.partition("\n\nPlan 1")[0]
    (args.output / "report.html").write_text(report(args, twice, plan), encoding="utf-8")
    print(f"\nWhat a real model needs, before any GPU is booked:\n\n{shown}\n")
    same = sum(one == other for _, one, other in twice)
    print(f"{same} of {len(twice)} steps that were made twice have the same loss to the last bit.")
    print(f"Done in {time.monotonic() - began:.0f} s. All of it on one page: {args.output / 'report.html'}")


if __name__ == "__main__":
    main()
