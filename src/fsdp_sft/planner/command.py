"""``fsdp-sft plan``: what fits on the GPUs at hand, how fast it is, and where its memory goes."""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from string import Template
from typing import Any

import torch

from fsdp_sft._model.configs import config_of
from fsdp_sft._process.gpus import GB, GIB, Gpu
from fsdp_sft.errors import NoPlanError
from fsdp_sft.planner.estimate import budget_of
from fsdp_sft.planner.plan import RunPlan, usual_rate
from fsdp_sft.planner.run import Run
from fsdp_sft.planner.search import plan_run


def run(args: argparse.Namespace) -> int:
    """Print plans.

    Returns:
        The exit code: 0 if something fits, 1 if nothing does, 2 for bad input.

    Raises:
        ValueError: For bad input, with the options of the command line in place of the fields of ``Run``.
    """
    try:
        _report(args)
    except NoPlanError as error:
        if not args.json:
            raise
        print(json.dumps({"plans": [], "error": str(error)}, indent=1))
        return 1
    except ValueError as error:
        raise ValueError(
            re.sub(rf"\b({'|'.join(args.flags)})\b", lambda found: args.flags[found[0]], str(error))
        ) from error
    return 0


def _report(args: argparse.Namespace) -> None:
    """Print the plans, the memory and the code of the fastest one; write it as a program."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if args.plans < 1:
        raise ValueError(f"--plans must be at least 1, got {args.plans}")
    if Path(args.model).is_file():  # its config, beside which the weights are
        args.model = str(Path(args.model).parent)
    options = {name: value for name, value in vars(args).items() if value is not None}
    given: dict[str, Any] = {
        field.name: dtypes.get(options[field.name], options[field.name])
        for field in fields(Run)
        if field.name in options
    }
    config = config_of(args.model)
    plans = plan_run(config, global_batch_size=args.global_batch_size, **given)
    best, shown = plans[0], plans[: args.plans]
    gpu, total, active = best.run.device, best.estimate.parameters, best.estimate.active_parameters
    budget = budget_of(gpu, args.num_gpus)
    headline = (
        f"{config.model_type}, {total / 1e9:.2f}B parameters"
        + (f" ({active / 1e9:.2f}B active)" if active != total else "")
        + f", on {args.num_gpus} x {args.gpu} ({budget.memory_bytes / GIB:.1f} GiB each), "
        f"{args.global_batch_size} sequences of {args.seq_length} tokens a step"
    )
    if args.write:
        print(f"Program: {write_program(args.write, best, args.model, gpu)}", file=sys.stderr)
    if args.json:
        job = {
            "model": args.model,
            "gpu": gpu.name,
            "num_gpus": args.num_gpus,
            "seq_length": args.seq_length,
            "global_batch_size": args.global_batch_size,
            "memory_bytes": budget.memory_bytes,
            "usable_bytes": budget.usable_bytes,
            "taken_bytes": dict(budget.taken),
            "parameters": total,
            "active_parameters": active,
            "plans": [plan.to_dict() for plan in shown],
            "code": best.code(args.model),
        }
        print(json.dumps(job, indent=1))
        return
    print(f"{headline}\n\n{plan_table(shown)}\n{len(shown)} of {len(plans)} plans (--plans N)")
    print(f"\nPlan 1: {'; '.join(best.reasons)}.")
    print(
        f"A billion tokens take {1e9 / best.tokens_per_second / 3600:,.0f} GPU-hours, if {gpu.name} has "
        f"{gpu.node_bytes_per_second / GB:g} GB/s each way in a node of {gpu.gpus_per_node}, "
        f"{gpu.bytes_per_second / GB:g} between nodes."
    )
    for note in best.estimate.notes:
        print(f"Note: {note}.")
    print(f"\nMemory of plan 1 on each GPU at the peak, in the {best.estimate.peak_phase} phase:\n")
    print(f"{best.estimate}  of {budget}")
    print(f"\nPlan 1 as code:\n\n{best.code(args.model)}")


def plan_table(plans: Sequence[RunPlan]) -> str:
    """The plans as a table, one line each."""
    rows = [_row(index, plan) for index, plan in enumerate(plans, start=1)]
    alike = {name for name in ("resharded", "optimizer") if len({row[name] for row in rows}) == 1}
    names = [name for name in rows[0] if name not in alike]
    lines = [names, *([row[name] for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(map("  ".join, padded))


def _row(index: int, plan: RunPlan) -> dict[str, str]:
    """A plan's cells, by column."""
    run = plan.run
    return {
        "": f"{index}.",
        "micro batch": str(run.micro_batch_size),
        "x accum.": str(run.grad_accum_steps),
        "checkpointed": {"0": "none", "1": "all"}.get(str(run.sac_ratio), str(run.sac_ratio)),
        "resharded": "yes" if run.reshard_after_forward else "no",
        "optimizer": run.optimizer,
        "GiB per GPU": f"{plan.peak_bytes / GIB:.1f}",
        "left": f"{plan.left_bytes / GIB:.1f}{' (tight)' if plan.is_tight else ''}",
        "peak in": plan.estimate.peak_phase,
        "step": f"{plan.time.total:.3g} s",
        "tokens/s per GPU": f"{plan.tokens_per_second:,.0f}",
        "bound by": plan.time.bound,
    }


# A plan as a whole program: data, labels, checkpoints, resumes, evaluation, log and export.

_PROGRAM = Template('''\
"""Fine-tune $model on chats, by the first plan of `fsdp-sft plan`:
$plan

    $launch $file --data chats.jsonl

Begins a run in --output or goes on with it: after a kill or a crash give the same command again. SIGTERM and
SIGUSR1 save a checkpoint and exit with $requeue. Each line of the data is {"messages": [...]}.
"""

import argparse
import json
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, get_cosine_schedule_with_warmup
$imports
import fsdp_sft as fs


def read_rows(path):
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise SystemExit(f"{path}, line {number} is not JSON: {error}") from error


def train(args, guard):
    context = fs.init_distributed()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained($model_repr)
    rows, counts = fs.filter_rows(
        list(read_rows(args.data)), tokenizer, max_length=$length
    )
    if len(rows) < 2:
        raise SystemExit(f"{counts}: it takes 2 rows, one to train on and one to test with")
    test_rows, rows = rows[::20], [row for i, row in enumerate(rows) if i % 20]
    collate = fs.SFTCollator(tokenizer, max_length=$length)
    if context.is_main:
        print(f"{counts}; what is trained of the first row stands between the marks:")
        first = fs.encode_chat(rows[0], tokenizer, max_length=$length)
        print(fs.render_labels(tokenizer, first.input_ids, first.labels))

$setup
    sampler = fs.ResumableSampler(rows, mesh=mesh)
    loader = DataLoader(rows, $micro_batch, sampler=sampler, collate_fn=collate)
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.steps // 20, args.steps)
    step, checkpoints = 0, args.output / "checkpoints"
    with suppress(fs.CheckpointNotFoundError):  # at the first start
        loaded = fs.load_checkpoint(checkpoints, model=model, optimizer=optimizer)
        step = loaded.step
        scheduler.load_state_dict(loaded.train_state["scheduler"])
        sampler.load_state_dict(loaded.train_state["sampler"])

    flops = fs.model_flops_per_token(model.config, $length)
    meter = fs.ThroughputMeter(world_size=context.world_size, flops_per_token=flops)
    logger = fs.MetricLogger(jsonl=args.output / "log.jsonl")
    with logger, fs.Watchdog(timeout=1800) as watchdog:
        while step < args.steps:
            for window in fs.windows(loader, grad_accum_steps=$accum, meter=meter):
                step += 1
                watchdog.step(step)
                result = fs.train_step($step)
                meter.update(num_tokens=result.num_tokens)
                metrics = {"loss": result.loss, "grad_norm": result.grad_norm}
                metrics["lr"] = scheduler.get_last_lr()[0]
                logger.log({**metrics, **meter.stats(), **fs.memory_stats()}, step)
                stop = guard.should_stop()
                if stop or step % args.save_every == 0 or step == args.steps:
                    state = {"scheduler": scheduler.state_dict()}
                    state["sampler"] = sampler.state_dict()
                    with meter.paused(), watchdog.phase("save", timeout=3600):
                        fs.save_checkpoint(
                            checkpoints,
                            step,
                            model=model,
                            optimizer=optimizer,
                            train_state=state,
                            keep_last=2,
                        )
                if stop:
                    raise SystemExit(fs.REQUEUE_EXIT_CODE)
                if step == args.steps:
                    break
        with watchdog.phase("evaluate and export", timeout=3600):
            mine = test_rows[context.rank :: context.world_size]
            test_loader = DataLoader(mine, $micro_batch, collate_fn=collate)
            evaluation = fs.evaluate(model, test_loader)
            logger.log({"eval_loss": evaluation.loss}, step)
            fs.export_hf(model, args.output / "export", tokenizer=tokenizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="chats, one JSON a line")
    parser.add_argument("--output", type=Path, default=Path("run"))
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=$rate, help="learning rate")
    parser.add_argument("--save-every", type=int, default=100, help="optimizer steps")
    parser.add_argument("--resume", choices=["auto"], help="it always goes on by itself")
    arguments = parser.parse_args()
    if (arguments.output / "export").exists():  # success, or a scheduler would start it again
        print(f"{arguments.output}/export is there already: nothing to do")
        raise SystemExit(0)
    with fs.PreemptionGuard() as guard:
        train(arguments, guard)
''')


def write_program(path: str | os.PathLike[str], plan: RunPlan, model: str, gpu: Gpu) -> Path:
    """Write the plan as a program that runs as it is: ``torchrun ... train.py --data chats.jsonl``.

    Args:
        path: File to write.
        plan: The plan.
        model: Folder or Hub id of the model.
        gpu: The GPU, whose number in a node is that of the launch line.

    Returns:
        The file.

    Raises:
        ValueError: For a plan of packed rows, or of ranks that share rows: the program pads each rank's own.
        FileExistsError: If there is such a file.
    """
    run = plan.run
    if run.shares_rows or not run.attention_mask:
        raise ValueError("--write is for padded rows of one GPU each: leave out --cp and --no-padding")
    code = plan.code(model).splitlines()
    loop = next(number for number, line in enumerate(code) if line.startswith("loader = "))
    imports = [line for line in code[:loop] if line.startswith("import ")]
    setup = [
        line.replace("lr=...", "lr=args.lr").replace("momentum=...", "momentum=0.9")
        for line in code[:loop]
        if line not in imports
    ]
    setup.remove("fs.init_distributed()")
    # As many on each node, which torchrun's one number is: 12 GPUs in nodes of 8 are twice 6.
    per_node = max(n for n in range(1, gpu.gpus_per_node + 1) if run.num_gpus % n == 0)
    nodes = run.num_gpus // per_node
    launch = f"torchrun --standalone --nproc-per-node {per_node}"
    if nodes > 1:  # on each node
        launch = (
            f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint HOST"
        )
    step = code[-1].strip().removeprefix("fs.train_step(").removesuffix(")")
    text = _PROGRAM.substitute(
        model=model,
        model_repr=repr(model),
        plan="\n".join(f"  {reason}" for reason in plan.reasons),
        launch=launch,
        file=Path(path).name,
        requeue=85,
        imports="".join(f"{line}\n" for line in imports),
        setup="\n".join(f"    {line}" for line in setup),
        length=run.seq_length,
        micro_batch=run.micro_batch_size,
        accum=run.grad_accum_steps,
        step=f"{step}, scheduler=scheduler",
        rate=usual_rate(run),
    )
    with Path(path).open("x", encoding="utf-8") as file:
        file.write(text)
    return Path(path)
