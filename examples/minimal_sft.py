"""Fine-tune a causal LM on chats with FSDP2, from one process to many nodes, without a trainer.

    torchrun --standalone --nproc-per-node 2 examples/minimal_sft.py
    torchrun --standalone --nproc-per-node 8 examples/minimal_sft.py --model PATH --data chats.jsonl

Without --model and --data a tiny model is made and taught a small vocabulary, which the end checks.

SIGTERM or SIGUSR1 to any rank makes all ranks save the same step and exit with 85. The same command with
--resume auto begins the run, goes on after that or after a crash, and does nothing once the run is complete:
it is the one for a job that is requeued and for torchrun --max-restarts.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup
from transformers.utils.logging import disable_progress_bar

import fsdp_sft as fs

HERE = Path(__file__).parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="Hugging Face folder or Hub id (default: a tiny one made here)")
    add("--data", type=Path, help=".jsonl or .json of messages, Alpaca or ShareGPT rows (default: bundled)")
    add("--output", type=Path, default=Path("demo-output"), help="checkpoints, log, export")
    add("--steps", type=int, default=160, help="optimizer steps")
    add("--micro-batch-size", type=int, default=16, help="rows per rank and micro-batch")
    add("--grad-accum-steps", type=int, default=1, help="micro-batches per optimizer step")
    add("--max-length", type=int, default=512, help="tokens per row; longer rows are truncated")
    add("--learning-rate", type=float, help="at its highest (default: 1e-5; 1.5e-3 for the tiny model)")
    add("--warmup-steps", type=int, default=20)
    add("--sac-ratio", default="1/3", help="fraction of blocks that recompute their activations")
    add("--dp-replicate", type=int, default=1, help="replicas (HSDP); 1 shards over all ranks")
    add(
        "--dtype",
        choices=["auto", "bfloat16", "float32"],
        default="auto",
        help="compute; masters are float32. auto: bfloat16, but float32 on CPUs without instructions for it",
    )
    add("--compile", action="store_true", help="compile each block")
    add("--save-every", type=int, default=50, help="optimizer steps between checkpoints")
    add(
        "--resume",
        nargs="?",
        const="required",
        choices=["required", "auto"],
        help="continue from the newest sound checkpoint in --output; auto: begin if there is none yet",
    )
    add("--seed", type=int, default=0)
    return parser.parse_args()


def read_rows(path: Path) -> list[dict]:
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.split("\n") if line.strip()]  # splitlines cuts at U+2028 in a text too
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in lines]


def compute_dtype(choice: str, context: fs.DistributedContext) -> torch.dtype:
    """What --dtype means, the same on all ranks."""
    reason = ""
    if choice == "auto":
        cpu = torch.cpu.get_capabilities()
        is_fast = context.device.type != "cpu" or cpu.get("avx512_bf16") or cpu.get("bf16")  # x86, Arm
        slowest = fs.aggregate_metrics({"fast": 1 if is_fast else 0}, reduce="min")
        choice = "bfloat16" if slowest["fast"] else "float32"
        if choice == "float32":
            reason = ": bfloat16 takes several times as long on a CPU without instructions for it"
    if context.is_main:
        print(f"computing in {choice}{reason}")
    return torch.bfloat16 if choice == "bfloat16" else torch.float32


@torch.no_grad()
def answer(folder: str | Path, rows: list[dict], device: torch.device) -> tuple[float, list[str]]:
    """Greedy answers of a saved model to each row's first message, and the share that is exactly right."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    prompts = [
        tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, tokenize=False)
        for row in rows
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
    out = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    answers = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [a == row["messages"][1]["content"] for a, row in zip(answers, rows, strict=True)]
    return sum(right) / len(right), answers


def train(args: argparse.Namespace, guard: fs.PreemptionGuard) -> None:
    checkpoints, export_to = args.output / "checkpoints", args.output / "export"
    if export_to.exists() and args.resume == "auto":
        print(f"{export_to} is there already: nothing to do", flush=True)
        return
    if export_to.exists() or (checkpoints.exists() and not args.resume):
        raise SystemExit(f"{args.output} holds an earlier run: give --resume, or another --output")
    context = fs.init_distributed()
    if context.is_main:
        print(context)
    compute = compute_dtype(args.dtype, context)
    disable_progress_bar()  # transformers' own, one for each file and rank
    torch.manual_seed(args.seed)
    rate = args.learning_rate or (1.5e-3 if args.model is None else 1e-5)
    if args.model is None:
        from tiny_model import make_tiny_model

        args.model = str(args.output / "tiny-model")
        if context.is_main:
            chats = read_rows(HERE / "data" / "chats.jsonl")
            make_tiny_model(Path(args.model), [m["content"] for row in chats for m in row["messages"]])
        dist.barrier()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = read_rows(args.data or HERE / "data" / "chats.jsonl")
    if args.data is None:
        test_rows = read_rows(HERE / "data" / "chats-test.jsonl")
    else:
        every = max(len(rows) // 50 + 1, 10)
        test_rows, rows = rows[::every], [row for i, row in enumerate(rows) if i % every]
    rows, counts = fs.filter_rows(rows, tokenizer, max_length=args.max_length)
    test_rows, _ = fs.filter_rows(test_rows, tokenizer, max_length=args.max_length)
    if not rows or not test_rows:
        raise SystemExit(
            f"{args.data} leaves {len(rows)} rows to train on and {len(test_rows)} to test: {counts}"
        )
    collate = fs.SFTCollator(tokenizer, max_length=args.max_length)
    if context.is_main:
        kept = ", ".join(f"{number} {reason}" for reason, number in counts.items())
        print(f"chats: {kept}. The first one; what is trained stands between ⟦ and ⟧:\n")
        first = fs.encode_chat(rows[0], tokenizer, max_length=args.max_length)
        print(fs.render_labels(tokenizer, first.input_ids, first.labels, color=False))
        page = args.output / "labels.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        ids, mask, labels = (collate(rows[:8])[key] for key in ("input_ids", "attention_mask", "labels"))
        html = fs.render_labels_html(tokenizer, ids, labels, attention_mask=mask)
        page.write_text(html, encoding="utf-8")
        print(f"eight of them, as a page with the trained text in colour: {page}")
        if args.data is None and not checkpoints.exists():
            share, _ = answer(args.model, test_rows, context.device)
            text = f"answered exactly before training: {share:.0%} of {len(test_rows)} unseen questions\n"
            (args.output / "answers.txt").write_text(text, encoding="utf-8")
            print(text, end="", flush=True)

    mesh = fs.build_mesh(dp_replicate=args.dp_replicate)
    model = fs.load_pretrained(
        args.model,
        mesh=mesh,
        sac_ratio=args.sac_ratio,
        compile=args.compile,
        mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
    )
    if context.is_main:
        megabytes, seconds = model.load_report.job_bytes_read / 1e6, model.load_report.seconds
        print(f"loaded {megabytes:.1f} MB into the shards of all ranks in {seconds:.2f} s", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, fused=True)
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.warmup_steps, args.steps)
    sampler = fs.ResumableSampler(rows, seed=args.seed)
    loader = DataLoader(rows, args.micro_batch_size, sampler=sampler, collate_fn=collate, drop_last=True)
    mine = test_rows[context.rank :: context.world_size]
    test_loader = DataLoader(mine, args.micro_batch_size, collate_fn=collate)

    step = 0
    try:
        loaded = fs.load_checkpoint(checkpoints, model=model, optimizer=optimizer) if args.resume else None
    except fs.CheckpointNotFoundError:
        if args.resume != "auto":
            raise
        loaded = None
    if loaded is not None:
        step = loaded.step
        scheduler.load_state_dict(loaded.train_state["scheduler"])
        sampler.load_state_dict(loaded.train_state["sampler"])
    flops = fs.model_flops_per_token(model.config, args.max_length)
    meter = fs.ThroughputMeter(flops_per_token=flops, world_size=context.world_size, device=context.device)
    log = args.output / "log.jsonl"
    logger = fs.MetricLogger(jsonl=log, stdout=False)
    bar = tqdm(total=args.steps, initial=step, unit="step", disable=not context.is_main)
    while step < args.steps:
        for window in fs.windows(loader, args.grad_accum_steps, meter=meter):
            result = fs.train_step(model, window, optimizer, scheduler=scheduler)
            step += 1
            meter.update(num_tokens=result.num_tokens)
            metrics = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": scheduler.get_last_lr()[0]}
            logger.log({**metrics, **meter.stats(), **fs.memory_stats()}, step)
            bar.set_postfix_str(f"loss {result.loss:.4f}", refresh=False)
            bar.update()
            stop = guard.should_stop()
            if stop or step % args.save_every == 0 or step == args.steps:
                state = {"scheduler": scheduler.state_dict(), "sampler": sampler.state_dict()}
                with meter.paused():
                    fs.save_checkpoint(checkpoints, step, model=model, optimizer=optimizer, train_state=state)
            if stop:
                if context.is_main:
                    print(f"{guard.signal.name}: step {step} is saved, exiting with 85", flush=True)
                dist.destroy_process_group()
                raise SystemExit(fs.REQUEUE_EXIT_CODE)
            if step == args.steps:
                break
    evaluation = fs.evaluate(model, test_loader)
    logger.log({"eval_loss": evaluation.loss, "perplexity": evaluation.perplexity}, step)
    bar.close()
    export = fs.export_hf(model, export_to, tokenizer=tokenizer)
    if context.is_main:
        print(f"evaluation: loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.3f}")
        try:
            print(f"the run as a picture: {fs.plot_run(log, args.output / 'loss.png')}")
        except ImportError as error:
            print(f"no picture of the run: {error}")
        print(f"exported to {export}, a folder for from_pretrained")
        if args.data is None:
            share, answers = answer(export, test_rows, context.device)
            questions = [row["messages"][0]["content"] for row in test_rows[:3]]
            lines = [f"  {asked}  ->  {text}" for asked, text in zip(questions, answers, strict=False)]
            lines += [f"answered exactly after training: {share:.0%} of {len(test_rows)} unseen questions"]
            with (args.output / "answers.txt").open("a", encoding="utf-8") as file:
                print("\n".join(lines), file=file)
            print("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


@record  # so that torchrun's report carries the traceback of the rank that failed first
def main() -> None:
    args = parse_arguments()
    with fs.PreemptionGuard() as guard:
        train(args, guard)


if __name__ == "__main__":
    main()
