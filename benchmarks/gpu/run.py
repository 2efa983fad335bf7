"""Tokens per second, MFU and peak memory of full fine-tuning on GPUs, beside a hand-written loop and Trainer.

    FSDP_SFT_DATA=folder python -m benchmarks.gpu.run --sizes 0.5b 1.5b 7b --output gpu.md

Qwen2.5 shapes with random weights train on real chats, packed to one length, on all GPUs of this machine.
All systems get the same packs in the same order and as many per optimizer step, keep float32 masters,
compute in bfloat16 and step by fused AdamW; each runs in fresh processes. fsdp_sft runs the planner's fastest
plan for the device: chunked loss, compiled blocks, rows kept apart by ``use_varlen_attention`` or by the
dense mask of transformers' "sdpa". The others have full logits and recompute every block.

Speed counts tokens that are not padding. MFU is that rate times ``model_flops_per_token`` (three times the
forward's matmuls, attention as if each query met all keys, nothing for recomputation) over the datasheet's
peak. A token of a pack attends only to its own row, so the count of the headline takes the length of that row
(mean over rows, weighted by their tokens). "MFU, whole pack" takes the length of the pack, which is the usual
number for sequences of that length and overstates what short rows need. With ``--rows full`` chats run on
into rows as long as a pack, as in most public figures, and both counts are the same.

First ``fsdp-sft check`` runs on all GPUs: a machine on which something is wrong is not measured. Its
table stands below the others.

A run that was cut short goes on with ``--reports file.jsonl``: what it holds is not measured again.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config

import fsdp_sft as fs
from benchmarks.gpu.memory import SIZES as QWEN_SIZES
from benchmarks.gpu.picture import draw
from benchmarks.tables import table
from examples.tiny_model import make_tokenizer
from fsdp_sft._process.gpus import GPUS, known_device as known_gpu

TINY = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
SIZES = {**QWEN_SIZES, "tiny": TINY}
LABELS = {
    "fsdp_sft": "fsdp_sft",
    "loop": "hand-written loop",
    "trainer": "Trainer",
    "trainer_fsdp": "Trainer with FSDP2",
}
TARGETS = {"7b": 0.60, "1.5b": 0.55}  # MFU
PUBLIC = {"size": "7b", "mfu": 0.578, "rate": 10_471}  # best found: one H200, seq 4096, bf16, fused AdamW
TARGET_LENGTH = 4096
VOCABULARY = 32000  # of the tokenizer; the model's may be larger
GIB = 1 << 30


# --- what all systems get ---------------------------------------------------------------------------------


def read_rows(vocabulary: int, length: int) -> list[fs.EncodedChat]:
    """All chats of the folder, by a tokenizer made from them, in a mixed order."""
    chats, lines = [], []
    for path in sorted(Path(os.environ["FSDP_SFT_DATA"]).iterdir()):
        if path.suffix in (".json", ".jsonl"):
            text = path.read_text()
            lines += text.splitlines()
            chats += json.loads(text) if path.suffix == ".json" else map(json.loads, text.splitlines())
    tokenizer = make_tokenizer(lines, vocab_size=vocabulary)
    random.Random(0).shuffle(chats)
    kept, _ = fs.filter_rows(chats, tokenizer, max_length=length, on_error="count")
    return [fs.encode_chat(chat, tokenizer, max_length=length) for chat in kept]


def joined(rows: list[fs.EncodedChat], length: int) -> list[fs.EncodedChat]:
    """Chats run on into rows of that length; what is left over is dropped."""
    ids = [token for row in rows for token in row.input_ids]
    labels = [label for row in rows for label in row.labels]
    starts = range(0, len(ids) - length + 1, length)
    return [fs.EncodedChat(input_ids=ids[at : at + length], labels=labels[at : at + length]) for at in starts]


def make_packs(path: Path, rows: list[fs.EncodedChat], args: argparse.Namespace) -> list[list[list[int]]]:
    """Save each rank's packs of all steps; returns the lengths of the rows of each rank's packs."""
    lengths, targets = fs.row_sizes(rows)
    collate = fs.PackedCollator(max_length=args.seq, pad_to_multiple_of=args.seq)
    count = (args.warmup + args.steps) * args.packs_per_step
    packs, sizes = [], []
    for rank in range(args.gpus):
        sampler = fs.PackedSampler(
            lengths, max_length=args.seq, num_targets=targets, num_replicas=args.gpus, rank=rank
        )
        chosen: list[list[int]] = []
        while len(chosen) < count:
            chosen += sampler
            sampler.set_epoch(sampler.epoch + 1)
        chosen = chosen[:count]
        batches = [collate([rows[index] for index in pack]) for pack in chosen]
        packs.append({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})
        sizes.append([[lengths[index] for index in pack] for pack in chosen])
    torch.save(packs, path)
    return sizes


def cases_of(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(size, system, attention) of each row of the table."""
    attentions = ("varlen", "sdpa") if args.attention == "both" else (args.attention,)
    return [
        (size, system, attention)
        for size in args.sizes
        for system in args.systems
        for attention in (attentions if system == "fsdp_sft" else ("sdpa",))
    ]


def best_plan(config: Qwen2Config, attention: str, device: dict, args: argparse.Namespace) -> dict:
    plans = fs.plan_run(
        config,
        num_gpus=args.gpus,
        gpu_memory_bytes=device["memory"],
        seq_length=args.seq,
        global_batch_size=args.packs_per_step * args.gpus,
        gpu=device["gpu"],
        compile=True,
        attention_mask=attention == "sdpa" and args.rows == "chats",
        optimizer="adamw_fused",
    )
    names = ("micro_batch_size", "grad_accum_steps", "sac_placement", "reshard_after_forward")
    best = plans[0]
    chosen = {name: getattr(best.run, name) for name in names}
    found = {"peak_bytes": best.peak_bytes, "seconds": best.time.total}
    return {"sac_ratio": str(best.run.sac_ratio), **chosen, **found}


# --- one measurement --------------------------------------------------------------------------------------


def run_case(case: dict, folder: Path, args: argparse.Namespace) -> dict:
    """What the system reports, or ``error``: a system that fails must not end the others' run."""
    path = folder / "case.json"
    path.write_text(json.dumps(case))
    worker = ["-m", "benchmarks.gpu.systems", str(path)]
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable]
    if case["system"] == "trainer" and args.gpus == 1:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        environment["CUDA_VISIBLE_DEVICES"] = first  # without torchrun Trainer would take all
    else:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}"]
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        process = subprocess.Popen([*command, *worker], env=environment, stdout=out, stderr=err)
        try:
            code = process.wait(args.timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"no result in {args.timeout} s"}
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun then ends its workers, which a SIGKILL would leave behind
                process.wait()
    reports = [line for line in (folder / "out").read_text().splitlines() if line.startswith("REPORT ")]
    if code == 0 and reports:
        return json.loads(reports[-1].removeprefix("REPORT "))
    said = (folder / "err").read_text()
    print("\n".join(said.splitlines()[-args.show_errors :]), file=sys.stderr)
    return {"error": reason_of(said)}


def reason_of(said: str) -> str:
    if "OutOfMemoryError" in said or "out of memory" in said:
        return "out of memory"
    errors = re.findall(r"^(?:\[rank\d+\]: ?)?(\w[\w.]*(?:Error|Exception|Exit)\b.*)", said, re.MULTILINE)
    own = [error for error in errors if "ChildFailedError" not in error]
    return (own or ["no message"])[-1][:100].replace("|", "/")


def measure(case: tuple[str, str, str], device: dict, folder: Path, args: argparse.Namespace) -> dict:
    """One row: what was asked for, and what came of it."""
    size, system, attention = case
    row = {"size": size, "system": system, "attention": attention, "ours": system == "fsdp_sft"}
    config = Qwen2Config(**SIZES[size])
    sent = {
        "system": system,
        "attention": attention,
        "device": args.device,
        "gpus": args.gpus,
        "config": SIZES[size],
        "packs": str(folder / f"packs-{min(VOCABULARY, SIZES[size]['vocab_size'])}.pt"),
        "packs_per_step": args.packs_per_step,
        "warmup": args.warmup,
        "backend": args.backend,
        "micro_batch": args.peer_micro_batch,
    }
    row["layout"] = f"{args.peer_micro_batch} x {args.packs_per_step // args.peer_micro_batch}, all"
    if system == "fsdp_sft":
        try:
            plan = best_plan(config, attention, device, args)
        except fs.NoPlanError as error:
            return {**row, "layout": "no plan", "error": str(error).splitlines()[0].replace("|", "/")}
        sent |= {"plan": plan, "micro_batch": plan["micro_batch_size"]}
        row["planned"], row["planned_seconds"] = plan["peak_bytes"], plan["seconds"]
        row["layout"] = layout_of(plan)
    return {**row, **run_case(sent, folder, args)}


def layout_of(plan: dict) -> str:
    ratio = {"0": "none", "1": "all"}.get(plan["sac_ratio"], f"{plan['sac_ratio']} {plan['sac_placement']}")
    kept = "" if plan["reshard_after_forward"] else ", blocks stay gathered"
    return f"{plan['micro_batch_size']} x {plan['grad_accum_steps']}, {ratio}{kept}"


def add_rates(row: dict, sizes: list[list[list[int]]], device: dict, args: argparse.Namespace) -> None:
    """Tokens per second and GPU of each step, and what they are in FLOPs."""
    per_step, start = args.packs_per_step, args.warmup * args.packs_per_step
    tokens = [
        sum(sum(pack) for rank in sizes for pack in rank[first : first + per_step])
        for first in range(start, len(sizes[0]), per_step)
    ]
    rates = [count / seconds / args.gpus for count, seconds in zip(tokens, row["seconds"], strict=True)]
    lengths = [length for rank in sizes for pack in rank[start:] for length in pack]
    config = Qwen2Config(**SIZES[row["size"]])
    by_row = sum(length * fs.model_flops_per_token(config, length) for length in lengths) / sum(lengths)
    whole = fs.model_flops_per_token(config, args.seq)
    row |= {"rate": statistics.median(rates), "rates": rates, "flops": by_row, "flops_whole": whole}
    peak, ceiling = device["peak"], device["flops_per_second"]
    row["mfu"] = row["rate"] * by_row / peak if peak else None
    row["mfu_whole"] = row["rate"] * whole / peak if peak else None
    row["of_ceiling"] = row["rate"] * by_row / ceiling
    memory = row["memory"]
    row["peak"] = memory.get("peak_allocated_bytes", memory.get("peak_resident_bytes"))


# --- table and text ---------------------------------------------------------------------------------------


def label_of(row: dict) -> str:
    return LABELS[row["system"]] + (f", {row['attention']}" if row["ours"] else "")


HEAD = ["size", "system", "packs a forward x accumulation, blocks recomputed", "seconds a step"]
HEAD += ["tokens/s per GPU (min to max)", "MFU", "MFU, whole pack", "of the matmul ceiling", "peak GiB"]
HEAD += ["reserved GiB", "planned GiB", "planned seconds", "mean loss"]


def summary(rows: list[dict]) -> list[str]:
    cells = []
    for row in rows:
        head = [row["size"], label_of(row), row["layout"]]
        planned = (
            [f"{row['planned'] / GIB:.1f}", f"{row['planned_seconds']:.3f}"] if "planned" in row else ["", ""]
        )
        if "error" in row:
            cells.append([*head, row["error"], "", "", "", "", "", "", *planned])
            continue
        reserved = row["memory"].get("peak_reserved_bytes")
        speed = f"{row['rate']:,.0f} ({min(row['rates']):,.0f} to {max(row['rates']):,.0f})"
        shares = [percent(row[key]) for key in ("mfu", "mfu_whole", "of_ceiling")]
        memory = [f"{row['peak'] / GIB:.1f}", f"{reserved / GIB:.1f}" if reserved else "", *planned]
        seconds = f"{statistics.median(row['seconds']):.3f}"
        cells.append([*head, seconds, speed, *shares, *memory, f"{row['loss']:.3f}"])
    return table(HEAD, cells)


def percent(share: float | None) -> str:
    return "unknown device" if share is None else f"{share:.1%}"


def verdicts(rows: list[dict], device: dict, args: argparse.Namespace) -> list[str]:
    """Each target beside what was measured."""
    if args.seq != TARGET_LENGTH or not device["peak"]:
        return [f"The targets are for packs of {TARGET_LENGTH} tokens on a known GPU: not judged here."]
    lines = []
    for size in (size for size in args.sizes if size in TARGETS):
        ours = [row for row in rows if row["ours"] and row["size"] == size and "error" not in row]
        if not ours:
            lines.append(f"- {size}: aim at >= {TARGETS[size]:.0%} MFU: not measured.")
            continue
        best = max(ours, key=lambda row: row["mfu"])
        held = "held" if best["mfu"] >= TARGETS[size] else "missed"
        lines.append(
            f"- {size}: aim at >= {TARGETS[size]:.0%} MFU: {held} with {best['mfu']:.1%} ({label_of(best)}; "
            f"{best['mfu_whole']:.1%} if the whole pack counts as one sequence)."
        )
        if size == PUBLIC["size"]:
            easier = "" if args.rows == "full" else ", of packs whose attention costs less"
            theirs = PUBLIC["rate"] * best["flops_whole"] / device["peak"]
            lines.append(
                f"- {size}: the best public figure found, one H200, is {PUBLIC['mfu']:.1%} MFU by its own "
                f"count and {PUBLIC['rate']:,} tokens/s, which model_flops_per_token at {args.seq} makes "
                f"{theirs:.1%} of this device's peak; measured here: {best['rate']:,.0f} tokens/s per GPU, "
                f"{best['rate'] / PUBLIC['rate']:.2f} times as many{easier}."
            )
    return lines


def text_of(rows: list[dict], device: dict, data: dict, args: argparse.Namespace) -> str:
    chats = "real chats run on" if args.rows == "full" else "real chats"
    peak = f"{device['peak'] / 1e12:.0f} TFLOP/s" if device["peak"] else "unknown"
    counts = [
        f"{row['size']} {row['flops'] / 1e9:.3g} ({row['flops_whole'] / 1e9:.3g} with the pack's length)"
        for row in {row["size"]: row for row in rows if "error" not in row}.values()
    ]
    lines = [
        "# Full fine-tuning on GPUs",
        "",
        f"Qwen2.5 shapes with random weights, {args.gpus} x {device['name']}, packs of {args.seq} tokens of "
        f"{chats} ({data['fill']:.1%} full, rows of {data['mean']:.0f} tokens on average), "
        f"{args.packs_per_step} packs per GPU and optimizer step, {args.steps} steps after {args.warmup} of "
        f"warm-up, float32 masters, bfloat16 compute, fused AdamW, blocks compiled by {args.backend} "
        f"(Trainer compiles the model), torch {torch.__version__}, transformers {version('transformers')}, "
        f"accelerate {version('accelerate')}.",
        "",
        f"Peak of the data sheet: {peak}; measured ceiling, bfloat16 products of a block's shapes on the "
        f"slowest GPU: {device['flops_per_second'] / 1e12:.3g} TFLOP/s. GFLOPs per token, with the lengths "
        "of the rows: "
        f"{'; '.join(counts) or 'none'}. MFU and the share of the ceiling use the former. Tokens are those "
        "that are not padding; speed is the median of steps. Memory is the fullest GPU's after the warm-up; "
        "planned is what the planner foresaw for its plan. fsdp_sft runs the planner's fastest plan with its "
        "chunked loss; the others have full logits and recompute every block.",
        "",
        *verdicts(rows, device, args),
        "",
        *summary(rows),
        "",
        "## The machine",
        "",
        "```text",
        *device["table"].rstrip().splitlines()[:-1],
        "```",
    ]
    return "\n".join(lines) + "\n"


def write(rows: list[dict], text: str, device: dict, args: argparse.Namespace, *, picture: bool) -> None:
    if not args.output or not rows:
        return
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)
    if picture:
        title = f"{args.gpus} x {device['name']}, packs of {args.seq} tokens"
        named = [{**row, "label": label_of(row)} for row in rows]
        try:
            draw(args.output.with_suffix(".png"), named, TARGETS if args.seq == TARGET_LENGTH else {}, title)
        except ImportError:
            print("no picture: matplotlib is not installed", file=sys.stderr)


# --- the run ----------------------------------------------------------------------------------------------


def known_device(folder: Path, args: argparse.Namespace) -> dict:
    """The device by ``fsdp-sft check`` on all GPUs: name, memory, peak, rate of products, and the table.

    Raises:
        RuntimeError: If the check finds something wrong: figures of such a machine say nothing.
    """
    largest = max(args.sizes, key=lambda size: SIZES[size]["hidden_size"])
    Qwen2Config(**SIZES[largest]).save_pretrained(folder / "config")
    file = folder / "check.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}"]
    command += ["-m", "fsdp_sft", "check", "--json", str(file), "--root", str(folder / "root")]
    command += ["--model", str(folder / "config")] if args.device == "cuda" else []
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **hidden}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"fsdp-sft check found something wrong:\n{done.stdout}\n{done.stderr[-2000:]}")
    check = json.loads(file.read_text())
    name, seen = check["device"], check["measured"]
    known = known_gpu(name)
    gpu = args.gpu or (known.name if known else "h100")
    return {
        "name": "CPU" if name == "cpu" else name,
        "gpu": gpu,
        "memory": seen.get("memory_bytes", GPUS[gpu].memory_bytes),
        "peak": known.flops_per_second if known else None,
        "flops_per_second": seen.get("flops_per_second"),
        "table": done.stdout,
    }


def run_all(folder: Path, args: argparse.Namespace) -> None:
    device = remembered(args, "device", lambda: known_device(folder, args))
    sizes = {}
    for vocabulary in {min(VOCABULARY, SIZES[size]["vocab_size"]) for size in args.sizes}:
        rows = read_rows(vocabulary, args.seq)
        rows = joined(rows, args.seq) if args.rows == "full" else rows
        sizes[vocabulary] = make_packs(folder / f"packs-{vocabulary}.pt", rows, args)
    packs = [pack for ranks in sizes.values() for rank in ranks for pack in rank]
    data = {
        "fill": sum(map(sum, packs)) / len(packs) / args.seq,
        "mean": sum(map(sum, packs)) / sum(map(len, packs)),
    }
    done: list[dict] = []
    cases = cases_of(args)
    for case in cases:
        row = remembered(args, case, lambda case=case: measure(case, device, folder, args))
        if "error" not in row:
            add_rates(row, sizes[min(VOCABULARY, SIZES[row["size"]]["vocab_size"])], device, args)
        done.append(row)
        text = text_of(done, device, data, args)
        print(text if len(done) == len(cases) else summary([row])[-1], flush=True)
        write(done, text, device, args, picture=len(done) == len(cases))


def remembered(args: argparse.Namespace, what: Any, find: Any) -> dict:
    """What the file of reports has for this question and these options, or a new answer, added to it."""
    options = (
        "device",
        "gpus",
        "rows",
        "seq",
        "packs_per_step",
        "peer_micro_batch",
        "steps",
        "warmup",
        "backend",
    )
    key = json.dumps([what, *(getattr(args, name) for name in options)])
    if args.reports and args.reports.exists():
        for line in args.reports.read_text().splitlines():
            kept = json.loads(line)
            if kept["key"] == key:
                return kept["found"]
    found = find()
    if args.reports:
        with args.reports.open("a") as file:
            file.write(json.dumps({"key": key, "found": found}) + "\n")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", nargs="+", choices=SIZES, default=["0.5b", "1.5b", "7b"])
    add("--systems", nargs="+", choices=LABELS, help="default: all that this device and number of GPUs allow")
    add("--attention", choices=("varlen", "sdpa", "both"), default="both", help="of fsdp_sft")
    add("--gpus", type=int, help="default: all of this machine")
    add("--gpu", choices=GPUS, help="the planner's name for the device; default: by its name, or h100")
    add("--rows", choices=("chats", "full"), default="chats", help="full: chats run on into whole packs")
    add("--seq", type=int, help=f"tokens of a pack; default {TARGET_LENGTH}")
    add("--packs-per-step", type=int, default=8, help="per GPU and optimizer step")
    add("--peer-micro-batch", type=int, default=1, help="packs a forward of loop and Trainer: full logits")
    add("--steps", type=int, default=10)
    add("--warmup", type=int, default=5, help="further steps, not counted: packs of new lengths compile anew")
    add("--timeout", type=int, default=900, help="seconds for one row")
    add("--reports", type=Path, help="JSON lines of what was measured: read first, and added to")
    add("--output", type=Path, help="Markdown to write, and a PNG beside it")
    add("--show-errors", type=int, default=40, help="last lines of a failed run to print")
    add("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    add("--backend", help="of torch.compile")
    args = parser.parse_args()
    if "FSDP_SFT_DATA" not in os.environ:
        parser.error("set FSDP_SFT_DATA to a folder with chats as .json or .jsonl")
    on_cpu = args.device == "cpu"  # to try out this script: nothing is to be learned from its numbers
    if not on_cpu and not torch.cuda.device_count():
        parser.error("this benchmark needs a CUDA device; here there is none")
    args.gpus = args.gpus or (1 if on_cpu else torch.cuda.device_count())
    args.seq = args.seq or (256 if on_cpu else TARGET_LENGTH)
    args.backend = args.backend or ("aot_eager" if on_cpu else "inductor")
    if on_cpu:
        args.gpu = "cpu"
    allowed = list(LABELS)
    if on_cpu:
        allowed.remove("trainer_fsdp")  # accelerate has FSDP2 for accelerators only
    elif args.gpus > 1:
        allowed.remove("trainer")  # its DDP would keep the whole model on each GPU
    args.systems = [system for system in args.systems or allowed if system in allowed]
    if args.packs_per_step % args.peer_micro_batch:
        parser.error("--peer-micro-batch must divide --packs-per-step")
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        run_all(Path(folder), args)


if __name__ == "__main__":
    main()
