"""Our loop beside ``transformers.Trainer`` and TRL's ``SFTTrainer``: tokens a second and peak memory.

    FSDP_SFT_DATA=folder python -m benchmarks.speed.peers

A Qwen2-shaped model with random weights is trained on Alpaca rows on 2 CPU ranks (gloo, one thread each) by
each system in a process group of its own. All have the same weights, tokens, labels, optimizer, bfloat16
compute and float32 masters. In "plain" rows all have the same padded batches in the same order, and losses
must agree; in "packed" rows each has its own way against padding: packs here (with ``use_varlen_attention``)
and in TRL, batches of about equal length in Trainer, with as many rows as make the tokens of a pack. Trainer
sorts 50 batches at a time from long to short (``get_length_grouped_indices``), 25 for each rank, so that many
steps are what is measured.
Needs `pip install trl` for all rows.

All systems run at once and take turns: one makes an optimizer step while the others wait, so that a machine
that is slower for a while is so for all of them. What is timed is the step, not what lies between steps.

accelerate turns FSDP2 on for accelerators only. Here its state is told after its own start that the plugin is
on, and its FSDP2 code then runs on the CPU as it is; ``--peers ddp`` leaves that out. TRL's own loss has
kernels for GPUs, and what stands in for them elsewhere is slow (TRL 1.16: float32 products over all
positions), so SFTTrainer is also measured with the ``compute_loss`` of Trainer.
"""

import argparse
import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path

import torch

from benchmarks.host_memory import anonymous_bytes
from benchmarks.tables import publish, table

SYSTEMS = {
    "fsdp_sft": "fsdp_sft",
    "trainer": "transformers.Trainer",
    "trl": "trl.SFTTrainer",
    "trl_plain_loss": "trl.SFTTrainer, Trainer's loss",
}
NEEDS = {"fsdp_sft": "torch", "trainer": "datasets", "trl": "trl", "trl_plain_loss": "trl"}
WAYS = ("plain", "packed")
LEARNING_RATE = 1e-3
LOSS_TOLERANCE = 0.02


# --- what all systems get ---------------------------------------------------------------------------------


def make_inputs(folder: Path, args: argparse.Namespace) -> None:
    """A tokenizer, initial weights and encoded rows, made once for all systems and rounds."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import fsdp_sft as fs
    from examples.tiny_model import make_tokenizer

    data = Path(os.environ["FSDP_SFT_DATA"])
    chats = json.loads((data / "alpaca_en_demo.json").read_text())
    texts = [path.read_text() for path in sorted(data.iterdir()) if path.suffix in (".json", ".jsonl")]
    tokenizer = make_tokenizer(
        [line for text in texts for line in text.splitlines()], vocab_size=args.vocabulary
    )
    tokenizer.save_pretrained(folder / "model")
    config = Qwen2Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=False,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    random.Random(0).shuffle(chats)
    rows = [fs.encode_chat(chat, tokenizer, max_length=args.length) for chat in chats]
    kept = [{"input_ids": r.input_ids, "labels": r.labels} for r in rows if r.num_targets]
    (folder / "rows.json").write_text(json.dumps(kept))


class Meter:
    """Tokens, seconds and memory of one rank, counted from the end of the warm-up; waits for its turns."""

    def __init__(self, warmup: int) -> None:
        self.warmup, self.step = warmup, 0
        self.tokens: list[int] = []  # of each batch, as the collator made it
        self.seconds: list[float] = []  # of each step
        self.cpu: list[float] = []
        self.losses: list[float] = []
        self.peak, self.peak_stepping, self.at_start = 0, 0, anonymous_bytes()
        self._turns = Client(os.environ["PEERS_TURNS"])
        self._stop, self._waiting = threading.Event(), False
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def counted(self, collate):
        """The collator, counting tokens that are not padding."""

        def count(rows):
            batch = collate(rows)
            mask = batch.get("attention_mask")
            self.tokens.append(int(mask.sum() if mask is not None else batch["input_ids"].numel()))
            return batch

        return count

    def begin(self) -> None:
        """Wait for this system's turn; the step begins."""
        self._turns.send("ready")
        self._waiting = True
        self._turns.recv()
        self._waiting = False
        self._started, self._cpu_started = time.perf_counter(), time.process_time()

    def stepped(self) -> None:
        """The step has ended; the next system may go on."""
        self.seconds.append(time.perf_counter() - self._started)
        self.cpu.append(time.process_time() - self._cpu_started)
        self._turns.send("done")
        self.step += 1
        if self.step == self.warmup:
            self.peak_stepping = 0

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            if self._waiting:
                continue
            now = anonymous_bytes()
            self.peak, self.peak_stepping = max(self.peak, now), max(self.peak_stepping, now)

    def report(self, system: str) -> None:
        """Gather all ranks' figures and print them from rank 0."""
        import torch.distributed as dist

        self._stop.set()
        self._thread.join()
        own = {
            "tokens": self.tokens[self.warmup : self.step],
            "seconds": self.seconds[self.warmup :],
            "cpu": sum(self.cpu[self.warmup :]),
            "peak": self.peak,
            "stepping": self.peak_stepping,
            "at_start": self.at_start,
            "losses": self.losses,
        }
        ranks: list[dict] = [{}] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        if dist.get_rank() == 0:
            worst = {name: max(rank[name] for rank in ranks) for name in ("peak", "stepping", "at_start")}
            seconds = [max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)]
            tokens = [sum(counts) for counts in zip(*(rank["tokens"] for rank in ranks), strict=True)]
            cpu = [sum(rank["cpu"] for rank in ranks)]
            found = {**worst, "tokens": tokens, "seconds": seconds, "cpu": cpu}
            found |= {"losses": own["losses"], "how": system}
            print("REPORT " + json.dumps(found))


# --- the systems ------------------------------------------------------------------------------------------


def run_fsdp_sft(folder: Path, args: argparse.Namespace) -> None:
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer

    import fsdp_sft as fs

    context = fs.init_distributed(device_type="cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = json.loads((folder / "rows.json").read_text())
    meter = Meter(args.warmup)
    model = fs.load_pretrained(folder / "model", mesh=fs.build_mesh(), sac_ratio=args.sac)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    if args.way == "packed":
        lengths, targets = fs.row_sizes(rows)
        sampler = fs.PackedSampler(lengths, max_length=args.pack_length, num_targets=targets)
        collate = meter.counted(
            fs.PackedCollator(max_length=args.pack_length, pad_to_multiple_of=args.pack_length)
        )
        fs.use_varlen_attention(model)
        loader = DataLoader(rows, batch_sampler=sampler, collate_fn=collate)
    else:
        batches = [
            range(start, start + args.batch) for start in range(0, len(rows) - args.batch + 1, args.batch)
        ]
        mine = batches[context.rank :: context.world_size]
        collate = meter.counted(lambda some: padded(some, tokenizer.pad_token_id))
        loader = DataLoader(rows, batch_sampler=mine, collate_fn=collate)
    while meter.step < args.steps:
        for window in fs.windows(loader, grad_accum_steps=1):
            meter.begin()
            result = fs.train_step(model, window, optimizer, max_grad_norm=1.0)
            meter.losses.append(result.loss)
            meter.stepped()
            if meter.step == args.steps:
                break
    meter.report("FSDP2" if not args.sac else f"FSDP2, sac {args.sac}")


def padded(rows: list[dict], pad: int) -> dict[str, torch.Tensor]:
    """A batch padded on the right to its longest row, the same for our loop and for Trainer."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [pad] * (width - len(row["input_ids"])) for row in rows]
    mask = [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
    labels = [row["labels"] + [-100] * (width - len(row["labels"])) for row in rows]
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: torch.tensor(value) for name, value in batch.items()}


def run_trainer(folder: Path, args: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    rows = json.loads((folder / "rows.json").read_text())
    options = shared_options(folder, args)
    if args.way == "packed":
        options["train_sampling_strategy"] = "group_by_length"
        mean = sum(len(row["input_ids"]) for row in rows) / len(rows)
        options["per_device_train_batch_size"] = round(args.pack_length / mean)
    arguments = TrainingArguments(**options)
    meter = Meter(args.warmup)
    how = force_fsdp2(args, arguments)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        arguments,
        train_dataset=as_dataset(rows),
        data_collator=meter.counted(lambda some: padded(some, tokenizer.pad_token_id)),
        callbacks=[callback(meter)],
    )
    train_and_report(trainer, meter, how)


def run_trl_plain_loss(folder: Path, args: argparse.Namespace) -> None:
    from transformers import Trainer
    from trl import SFTTrainer

    class PlainLoss(SFTTrainer):
        compute_loss = Trainer.compute_loss

    run_trl(folder, args, PlainLoss)


def run_trl(folder: Path, args: argparse.Namespace, trainer_class=None) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = json.loads((folder / "rows.json").read_text())
    options = {**shared_options(folder, args), "max_length": args.length}
    if args.way == "packed":
        options.update(packing=True, max_length=args.pack_length, per_device_train_batch_size=1)
        options["train_sampling_strategy"] = "random"
    arguments = SFTConfig(**options)
    meter = Meter(args.warmup)
    how = force_fsdp2(args, arguments)
    trainer = (trainer_class or SFTTrainer)(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        arguments,
        train_dataset=as_dataset(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[callback(meter)],
    )
    trainer.data_collator = meter.counted(trainer.data_collator)
    train_and_report(trainer, meter, how)


def as_dataset(rows: list[dict]):
    import pyarrow as pa
    from datasets import Dataset, disable_caching

    disable_caching()
    # With a fingerprint given, datasets does not pickle the table, which fails with some versions of pyarrow.
    return Dataset(pa.Table.from_pylist(rows), fingerprint="rows")


def shared_options(folder: Path, args: argparse.Namespace) -> dict:
    return {
        "output_dir": str(folder / "unused"),
        "use_cpu": True,
        "bf16": True,
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def force_fsdp2(args: argparse.Namespace, arguments) -> str:
    """Let the accelerator that a Trainer makes next take accelerate's FSDP2 path on the CPU."""
    if args.peers == "ddp":
        return "DDP"
    assert arguments.device.type == "cpu"  # asking for it makes accelerate's state anew
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    state = Accelerator(mixed_precision="bf16", cpu=True).state  # one for the whole process
    plugin.set_mixed_precision("bf16")
    state.fsdp_plugin = plugin
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    return "FSDP2"


def callback(meter: Meter):
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_step_begin(self, *_args, **_kwargs):
            meter.begin()

        def on_step_end(self, *_args, **_kwargs):
            meter.stepped()

        def on_log(self, _args, _state, _control, logs=None, **_kwargs):
            if "loss" in (logs or {}):
                meter.losses.append(float(logs["loss"]))

    return Steps()


def train_and_report(trainer, meter: Meter, how: str) -> None:
    from torch.distributed.fsdp import FSDPModule

    trainer.train()
    sharded = isinstance(trainer.model_wrapped, FSDPModule) or isinstance(trainer.model, FSDPModule)
    assert sharded == (how == "FSDP2"), f"the model is a {type(trainer.model_wrapped).__name__}"
    dtypes = {parameter.dtype for parameter in trainer.model.parameters()}
    assert dtypes == {torch.float32}, f"masters are {dtypes}"
    meter.report(how)


# --- rounds and table -------------------------------------------------------------------------------------


def measure(systems: list[str], way: str, folder: Path, argv: list[str]) -> dict[str, dict]:
    """One report for each system; all run at once and take turns."""
    address = str(folder / f"turns-{time.monotonic_ns()}")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    running, said, turns = {}, {}, {}
    try:
        for system in systems:  # one after the other: loading wants memory
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += ["-m", "benchmarks.speed.peers", "--worker", system, "--way", way]
            command += ["--folder", str(folder), *argv]
            environment |= {"HF_HOME": str(folder / system), "PEERS_TURNS": f"{address}-{system}"}
            said[system] = (folder / f"{system}.out").open("w+"), (folder / f"{system}.err").open("w+")
            with Listener(environment["PEERS_TURNS"]) as listener:
                listener._listener._socket.settimeout(300)  # type: ignore[attr-defined]
                running[system] = subprocess.Popen(
                    command, env=environment, stdout=said[system][0], stderr=said[system][1]
                )
                turns[system] = [listener.accept() for _ in range(2)]
                for rank in turns[system]:
                    assert rank.recv() == "ready"
        take_turns(turns)
        found = {}
        for system, process in running.items():
            process.wait(300)
            said[system][0].seek(0)
            lines = [line for line in said[system][0] if line.startswith("REPORT ")]
            found[system] = json.loads(lines[-1].removeprefix("REPORT "))
        return found
    except (OSError, EOFError, IndexError) as error:
        for system, (_, errors) in said.items():
            errors.seek(0)
            lines = errors.read().splitlines()
            own = [line for line in lines if line.startswith("[rank")]  # and not torchrun's
            print("\n".join([f"{system}, {way}:", *(own or lines)[-60:]]), file=sys.stderr)
        raise RuntimeError("a system failed; what they said is above") from error
    finally:
        for process in running.values():
            process.terminate()
        for files in said.values():
            for file in files:
                file.close()


def take_turns(turns: dict[str, list]) -> None:
    """Let each system, ready for its first step, make a step at a time, until they have made them all."""
    left = dict(turns)
    for number in itertools.count():
        order = [*left][number % len(left) :] + [*left][: number % len(left)]
        for system in order:
            for rank in left[system]:
                rank.send("go")
            for rank in left[system]:
                assert rank.recv() == "done"
        for system in order:
            try:
                for rank in left[system]:
                    assert rank.recv() == "ready"
            except EOFError:  # its last step
                del left[system]
        if not left:
            return


HEAD = ["batches", "system", "parallelism", "tokens/s", "ours, tokens/s (of each fifth of the steps)"]
HEAD += ["ours, tokens per CPU second", "peak, MiB", "steps over imports, MiB", "ours, peak", "ours, steps"]
HEAD += ["final loss"]


def summary(runs: dict[tuple[str, str], list[dict]]) -> list[str]:
    rows = []
    for way in WAYS:
        ours = runs.get((way, "fsdp_sft"))
        for system, name in SYSTEMS.items():
            found = runs.get((way, system))
            if not found or not ours:
                continue
            times, per_cpu = (rate(ours, over) / rate(found, over) for over in ("seconds", "cpu"))
            length = len(found[0]["seconds"])
            parts = [slice(i * length // 5, (i + 1) * length // 5) for i in range(5)]
            fifths = (f"{rate(ours, 'seconds', p) / rate(found, 'seconds', p):.2f}" for p in parts)
            peak, own_peak = (max(run["peak"] for run in some) for some in (found, ours))
            growth, own_growth = (
                max(run["stepping"] - run["at_start"] for run in some) for some in (found, ours)
            )
            speed = f"{rate(found, 'seconds'):.0f}"
            memory = [f"{peak / 2**20:.0f}", f"{growth / 2**20:.0f}"]
            ratios = [f"{own_peak / peak:.2f}x", f"{own_growth / growth:.2f}x"]
            cells = [f"{times:.2f}x ({', '.join(fifths)})", f"{per_cpu:.2f}x", *memory, *ratios]
            rows.append([way, name, found[0]["how"], speed, *cells, f"{found[0]['losses'][-1]:.4f}"])
    return table(HEAD, rows)


def rate(runs: list[dict], over: str, part: slice = slice(None)) -> float:
    """Tokens a second, of the clock or the CPU, of some steps of all runs together."""
    return sum(sum(run["tokens"][part]) for run in runs) / sum(sum(run[over][part]) for run in runs)


def check_losses(runs: dict[tuple[str, str], list[dict]]) -> None:
    """In plain rows every step's loss is that of the same batch; bfloat16 and reduction dtypes differ."""
    ours = runs["plain", "fsdp_sft"][0]["losses"]
    for (way, system), found in runs.items():
        for run in found if way == "plain" else ():
            assert len(run["losses"]) == len(ours), (system, len(run["losses"]))
            worst = max(abs(a - b) / b for a, b in zip(run["losses"], ours, strict=True))
            assert worst <= LOSS_TOLERANCE, f"{system}: losses differ by {worst:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=2, help="new processes each")
    parser.add_argument(
        "--steps", type=int, default=28, help="of which --warmup are not counted; Trainer sorts 25 at a time"
    )
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="rows of a rank's batch")
    parser.add_argument("--length", type=int, default=512, help="most tokens of a row")
    parser.add_argument("--pack-length", type=int, default=1024, help="most tokens of a pack, one a batch")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=384, help="a multiple of 128")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--sac", default="0", help="ours: fraction of blocks to recompute, such as 1/3")
    parser.add_argument("--peers", choices=("fsdp2", "ddp"), default="fsdp2")
    parser.add_argument("--quick", action="store_true", help="a small model, few steps, one round")
    parser.add_argument("--output", type=Path, help="also write the table there")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps, args.warmup, args.layers, args.hidden = 1, 8, 2, 2, 128
    args.sac = 0 if args.sac == "0" else args.sac
    if args.worker:
        torch.set_num_threads(1)
        globals()[f"run_{args.worker}"](args.folder, args)
        return
    if "FSDP_SFT_DATA" not in os.environ:
        parser.error("set FSDP_SFT_DATA to the folder with alpaca_en_demo.json")
    systems = [system for system, needed in NEEDS.items() if importlib.util.find_spec(needed)]
    runs: dict[tuple[str, str], list[dict]] = {}
    with tempfile.TemporaryDirectory() as name:
        make_inputs(Path(name), args)
        try:
            for number in range(args.rounds):
                for way in WAYS:
                    for system, found in measure(systems, way, Path(name), sys.argv[1:]).items():
                        runs.setdefault((way, system), []).append(found)
                        speed = rate([found], "seconds")
                        print(f"{number + 1}: {way}, {system}: {speed:.0f} tokens/s", flush=True)
        except KeyboardInterrupt:
            print("stopped: what follows is of the rounds that were complete")
    args.rounds = min(map(len, runs.values()))
    runs = {key: found[: args.rounds] for key, found in runs.items()}
    check_losses(runs)
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    lines = [
        f"{args.layers} layers of {args.hidden}, vocabulary {args.vocabulary}, 2 gloo ranks of one thread, "
        f"batches of {args.batch} rows of at most {args.length} tokens a rank (packs of {args.pack_length}), "
        f"{args.rounds} rounds of {args.steps - args.warmup} steps after {args.warmup} of warm-up, in turns "
        f"of one step, load {load} at the end, torch {torch.__version__}, {versions()}.",
        "",
        'Tokens are those that are not padding. Memory is RssAnon of the larger rank: "peak" of the whole '
        'run, loading included, "steps" after the warm-up less what there was before the model, the largest '
        'of all rounds; "ours" is the ratio of fsdp_sft to the row\'s system. CPU seconds are those of both '
        "ranks, which other work on the machine stretches less than it does the clock's.",
        "",
        *summary(runs),
    ]
    publish("Beside Trainer and SFTTrainer", lines, args.output)


def versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in ("transformers", "accelerate", "trl"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


if __name__ == "__main__":
    main()
