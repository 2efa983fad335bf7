r"""Fine-tune a causal LM on rows so long that several ranks share the tokens of each (context parallelism).

    torchrun --standalone --nproc-per-node 2 examples/long_context.py
    torchrun --standalone --nproc-per-node 8 examples/long_context.py --model PATH --data books.jsonl \
        --cp 4 --seq-length 65536

Without --data the documents are Python's own help topics (pydoc_data.topics), which come with every Python:
nothing is downloaded. Without --model a tiny untrained one is made, and learns a little of their language.

Before and after, held-out rows are read in two ways: whole, and from their middle on. Both losses are of the
same tokens, those of the second half, so that the difference is what the first half was worth to the model.

--data is UTF-8 and holds
  chats       .jsonl or .json, rows as in minimal_sft.py: what the assistant says is trained
  documents   .jsonl or .json, rows with a "text": every token is trained
  a document  any other file
Documents are cut into rows of --seq-length tokens. A chat that is longer loses its end, and is left out if
nothing trained remains. Short rows are packed, up to --seq-length. One row in ten, 64 at most, is held out.

Signals, exit code 85 and --resume are as in minimal_sft.py. --cp may be another one when a run goes on, and
so may be the number of ranks.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, get_cosine_schedule_with_warmup
from transformers.utils.logging import disable_progress_bar

import fsdp_sft as fs

Rows = list[fs.EncodedChat]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="Hugging Face folder or Hub id (default: a tiny one made here)")
    add("--data", type=Path, help="chats or documents, see above (default: Python's help topics)")
    add("--output", type=Path, default=Path("long-output"), help="checkpoints, log, export")
    add(
        "--cp",
        type=int,
        help="ranks that share a row; divides the ranks and query heads (default: all ranks)",
    )
    add("--seq-length", type=int, default=512, help="tokens per row, and per pack of short rows")
    add("--steps", type=int, default=100, help="optimizer steps")
    add("--grad-accum-steps", type=int, default=2, help="packs per group of --cp ranks and optimizer step")
    add("--learning-rate", type=float, default=3e-3)
    add("--warmup-steps", type=int, default=20)
    add("--sac-ratio", default="1", help="fraction of blocks that recompute their activations")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="compute; masters are float32")
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


def read_rows(path: Path) -> list[Any]:
    """Chats, or documents as rows with a "text"."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            rows = json.loads(text)
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            rows = [{"text": text}] if text.strip() else []
    except (OSError, ValueError) as error:
        raise SystemExit(f"--data {path} cannot be read: {error}") from None
    if not isinstance(rows, list) or not rows:
        raise SystemExit(f"--data {path} holds no rows")
    return rows


def help_topics() -> list[Any]:
    """Documents that Python carries with it."""
    from pydoc_data.topics import topics

    return [{"text": topics[name]} for name in sorted(topics)]


def is_document(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("text"), str) and "messages" not in row


def encode(rows: list[Any], tokenizer: PreTrainedTokenizerBase, length: int) -> Rows:
    """Documents cut into rows of ``length`` tokens, all of them trained; or chats, no longer than that."""
    if not is_document(rows[0]):
        kept, counts = fs.filter_rows(rows, tokenizer, max_length=length)
        say(f"chats: {dict(counts)}")
        return [fs.encode_chat(row, tokenizer, max_length=length) for row in kept]
    strays = [index for index, row in enumerate(rows) if not is_document(row)]
    if strays:
        raise SystemExit(f'row 0 has a "text" and is a document, row {strays[0]} has none: give one kind')
    cut: Rows = []
    for row in rows:
        ids = tokenizer(row["text"], add_special_tokens=False, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        parts = [ids[start : start + length] for start in range(0, len(ids), length)]
        cut += [fs.EncodedChat(part, part) for part in parts if len(part) > 1]
    return cut


def hold_out(rows: Rows) -> tuple[Rows, Rows]:
    every = max(10, len(rows) // 64 + 1)
    train = [row for index, row in enumerate(rows) if index % every]
    if not train:
        raise SystemExit(
            f"the data makes {len(rows)} row of --seq-length: that is held out, and none is left"
        )
    return train, rows[::every]


def pack(rows: Rows, length: int, **options: Any) -> DataLoader[Any]:
    """Rows in packs of up to ``length`` tokens; ranks that share rows get the same ones."""
    lengths, targets = fs.row_sizes(rows)
    sampler = fs.PackedSampler(lengths, num_targets=targets, max_length=length, **options)
    return DataLoader(rows, batch_sampler=sampler, collate_fn=fs.PackedCollator(max_length=length))


def second_halves(rows: Rows, *, whole: bool) -> Rows:
    """Rows with targets in their second half alone: whole rows, or without the first half."""
    halves = []
    for row in rows:
        middle = len(row.input_ids) // 2
        labels = [fs.IGNORE_INDEX] * (middle + 1) + row.labels[middle + 1 :]
        seen = slice(0 if whole else middle, None)
        halves.append(fs.EncodedChat(row.input_ids[seen], labels[seen]))
    return [row for row in halves if row.num_targets]


def held_out_loss(model: Any, rows: Rows, length: int) -> dict[str, float]:
    """Loss in the second half of rows that the model sees whole, and that it sees from the middle on."""
    losses = {}
    for name, whole in (("whole", True), ("from_middle", False)):
        loader = pack(second_halves(rows, whole=whole), length, shuffle=False)
        losses[f"held_out_{name}"] = fs.evaluate(model, loader).loss
    say(
        f"held-out loss in the second half of rows: {losses['held_out_whole']:.4f} seeing the whole row, "
        f"{losses['held_out_from_middle']:.4f} seeing that half alone"
    )
    return losses


def peak_memory(device: torch.device) -> int:
    """Bytes of the rank that took most: of its device, or without one of its process."""
    stats = fs.memory_stats(device)
    own = stats.get("peak_allocated_bytes", stats.get("peak_resident_bytes"))
    return int(fs.aggregate_metrics({"peak": own}, reduce="max")["peak"] or 0)


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        tqdm.write(text)


def load_rows(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[Rows, Rows]:
    """Rows to train on, and rows held out."""
    rows = help_topics() if args.data is None else read_rows(args.data)
    train, held_out = hold_out(encode(rows, tokenizer, args.seq_length))
    lengths = [len(row.input_ids) for row in train]
    say(f"rows: {len(train)} of {min(lengths)} to {max(lengths)} tokens, {len(held_out)} held out")
    if not second_halves(held_out, whole=True):
        raise SystemExit("no held-out row has a target in its second half: there is nothing to compare")
    return train, held_out


def load_model(args: argparse.Namespace, mesh: DeviceMesh) -> Any:
    compute = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    model = fs.load_pretrained(
        args.model,
        mesh=mesh,
        sac_ratio=args.sac_ratio,
        compile=args.compile,
        mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
    )
    fs.use_varlen_attention(model)  # within the rows of a pack, without a mask of S x S
    fs.use_context_parallel(model, mesh=mesh)
    return model


def check_length(args: argparse.Namespace) -> None:
    config = AutoConfig.from_pretrained(args.model).get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and args.seq_length > most:
        raise SystemExit(
            f"--seq-length {args.seq_length} is more than the {most} positions of {args.model}: give a "
            "shorter one, or a model whose config.json says (with its rope_parameters) how it reaches further"
        )


def make_model_if_none(args: argparse.Namespace) -> None:
    if args.model is None:
        from tiny_model import make_tiny_model

        args.model = str(args.output / "tiny-model")
        if dist.get_rank() == 0:
            texts = [row["text"] for row in help_topics()]
            make_tiny_model(Path(args.model), texts, max_length=args.seq_length)
        dist.barrier()


def train(args: argparse.Namespace, guard: fs.PreemptionGuard) -> None:
    checkpoints, export_to = args.output / "checkpoints", args.output / "export"
    if export_to.exists() and args.resume == "auto":
        print(f"{export_to} is there already: nothing to do", flush=True)
        return
    if export_to.exists() or (checkpoints.exists() and not args.resume):
        raise SystemExit(f"{args.output} holds an earlier run: give --resume, or another --output")
    context = fs.init_distributed()
    mesh = fs.build_mesh(cp=args.cp or context.world_size)
    say(f"{context}, {mesh}")
    disable_progress_bar()  # transformers' own, one for each file and rank
    torch.manual_seed(args.seed)
    make_model_if_none(args)
    check_length(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows, held_out = load_rows(args, tokenizer)
    model = load_model(args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.warmup_steps, args.steps)
    loader = pack(rows, args.seq_length, seed=args.seed)
    sampler = loader.batch_sampler

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
        say(f"going on after step {step}")
    logger = fs.MetricLogger(jsonl=args.output / "log.jsonl", stdout=False)
    logger.log(held_out_loss(model, held_out, args.seq_length), step)
    flops = fs.model_flops_per_token(model.config, args.seq_length)
    meter = fs.ThroughputMeter(flops_per_token=flops, world_size=context.world_size, device=context.device)
    bar = tqdm(total=args.steps, initial=step, unit="step", disable=not context.is_main)
    fs.reset_peak_memory(context.device)
    while step < args.steps:
        for window in fs.windows(loader, args.grad_accum_steps, meter=meter):
            result = fs.train_step(model, window, optimizer, scheduler=scheduler)
            step += 1
            meter.update(num_tokens=result.num_tokens)
            metrics = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": scheduler.get_last_lr()[0]}
            speed = meter.stats()
            logger.log({**metrics, **speed}, step)
            rate = f"{speed['tokens_per_second'] or 0:.0f} tokens/s"
            bar.set_postfix_str(f"loss {result.loss:.4f}, {rate}", refresh=False)
            bar.update()
            stop = guard.should_stop()
            if stop or step % args.save_every == 0 or step == args.steps:
                state = {"scheduler": scheduler.state_dict(), "sampler": sampler.state_dict()}
                with meter.paused():
                    fs.save_checkpoint(checkpoints, step, model=model, optimizer=optimizer, train_state=state)
            if stop:
                say(f"{guard.signal.name}: step {step} is saved, exiting with 85")
                dist.destroy_process_group()
                raise SystemExit(fs.REQUEUE_EXIT_CODE)
            if step == args.steps:
                break
    bar.close()

    peak = peak_memory(context.device)
    say(f"peak memory of a rank in training: {peak / 2**20:.0f} MiB on {context.device.type}")
    logger.log({"peak_memory_bytes": peak, **held_out_loss(model, held_out, args.seq_length)}, step)
    export = fs.export_hf(model, export_to, tokenizer=tokenizer)
    say(f"exported to {export}")
    dist.barrier()
    dist.destroy_process_group()


@record  # so that torchrun's report carries the traceback of the rank that failed first
def main() -> None:
    args = parse_arguments()
    with fs.PreemptionGuard() as guard:
        train(args, guard)


if __name__ == "__main__":
    main()
