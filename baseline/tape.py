"""Fixed runs of tiny models through the public functions, recorded bit for bit.

Each run loads a checkpoint, trains three steps, saves after the second, goes on from there on other ranks
and exports: classes, meshes, adapters, packs, context and expert parallelism, packed bases, published
quantised formats. Recorded are the losses and norms of the steps, digests of what was loaded, of a step's
files and of an export's, and labels and orders of data. Values are digested by name.

Bits are those of one machine: on another kind of processor, or another torch, the commit that wrote the
frozen file is recorded first, in a work tree of its own (``here``).
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import fsdp_sft as fs
from tests.harness.architectures import quiet, tiny_architecture
from tests.harness.chat_templates import FAMILIES, byte_tokenizer
from tests.harness.models import full
from tests.harness.quantised_folders import quantised
from tests.harness.quantised_weights import FORMATS
from tests.harness.ranks import run_distributed

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".tape"
_FINGERPRINT = "fingerprint"
_SECONDS = 120  # of a run
_LENGTH, _VOCABULARY = 24, 96


@dataclass(frozen=True)
class Played:
    """One run.

    Attributes:
        model: Class of transformers, or name of a quantised format of the harness.
        ranks: Number of ranks; ``mesh`` divides them.
        again: Number of ranks that go on from the saved step; 0 for none.
    """

    model: str = "LlamaForCausalLM"
    ranks: int = 2
    mesh: dict[str, int] = field(default_factory=dict)
    ep_size: int = 1
    lora: str = ""
    frozen: str | None = None
    packed: bool = False
    sac: str = "0"
    reshard: bool | int = True
    compute: str = "float32"
    loss_impl: str = "auto"
    accumulation: int = 1
    grad_sync: str = "each"
    router_loss: str | None = None
    again: int = 0

    @property
    def name(self) -> str:
        """The model, and what is not the default."""
        plain = asdict(Played(self.model))
        others = {key: value for key, value in asdict(self).items() if value != plain[key]}
        return " ".join([self.model, *(f"{key}={value}" for key, value in others.items())]).replace("'", "")


DENSE = (
    *("Llama", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Mistral", "Phi3", "Olmo2", "Glm4", "Granite"),
    *("Cohere2", "SmolLM3", "StableLm", "GPTNeoX", "GPTBigCode", "Falcon", "Bloom", "OPT", "Mpt", "Ernie4_5"),
    *("Exaone4", "HunYuanDenseV1", "Helium", "SeedOss", "Mamba", "RecurrentGemma", "Qwen3_5"),
)
MIXED = (
    "Mixtral",
    "Qwen2Moe",
    "Qwen3Moe",
    "GptOss",
    "DeepseekV3",
    "Olmoe",
    "Glm4Moe",
    "GraniteMoe",
    "Qwen3Next",
)


def _of(*names: str, **options: Any) -> list[Played]:
    return [Played(f"{name}ForCausalLM", **options) for name in names]


def runs() -> list[Played]:
    """All runs of models, in a fixed order."""
    hsdp, cp = {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 1, "cp": 2}
    found = [*_of(*DENSE), Played("GPT2LMHeadModel"), *_of(*MIXED)]
    for name in ("Llama", "Qwen2", "Gemma3", "Qwen3Moe", "GptOss"):
        found += _of(name, ranks=1)
        found += _of(name, ranks=4, mesh=hsdp, sac="1/2", compute="bfloat16", again=2)
        found += _of(name, lora="all-linear", again=1)
        found += _of(name, packed=True, compute="bfloat16", sac="1")
        found += _of(name, accumulation=3, grad_sync="last", loss_impl="logits")
    for name in ("Llama", "Qwen3", "Mistral", "Qwen3Moe"):
        found += _of(name, mesh=cp, packed=True)
        found += _of(name, ranks=4, mesh={"dp_shard": 2, "cp": 2}, again=4)
    for name in ("Mixtral", "Qwen3Moe", "GptOss", "Olmoe"):
        found += _of(name, ep_size=2, again=2)
        found += _of(name, ranks=4, mesh={"dp_shard": 4}, ep_size=2, compute="bfloat16")
        found += _of(name, router_loss="micro_batch", accumulation=2)
        found += _of(name, lora="experts", again=1)
    for name in ("Llama", "Qwen3Moe", "Gemma3"):
        for frozen in ("nf4", "fp8"):
            found += _of(name, lora="all-linear", frozen=frozen, again=1)
        found += _of(name, reshard=False, loss_impl="chunked")
        found += _of(name, ranks=4, reshard=2, mesh={"dp_shard": 4}, sac="1/3")
        found += _of(name, ranks=3, again=2)
    found += [Played(name) for name in FORMATS]
    found += [
        Played(name, lora="all-linear", frozen="stored") for name in ("fp8 block", "mxfp4", "nvfp4", "int4")
    ]
    return found


def now(arguments: Any, frozen: Any) -> dict[str, Any]:
    """By run: what it gave; what was logged for this source tree is not run again."""
    CACHE.mkdir(exist_ok=True)
    log = arguments.log or CACHE / "log.jsonl"
    tree = _tree()
    found: dict[str, Any] = {_FINGERPRINT: fingerprint()}
    if log.exists():
        found |= {
            e["name"]: e["found"] for e in map(json.loads, log.read_text().splitlines()) if e["tree"] == tree
        }
    todo: list[tuple[str, Callable[[Path], Any]]] = [
        (run.name, lambda at, run=run: play(run, at)) for run in runs()
    ]
    todo += [(f"labels {name}", lambda _, name=name: labels(name)) for name in FAMILIES]
    todo += [("orders", lambda _: orders())]
    with quiet(), tempfile.TemporaryDirectory() as folder:
        for number, (name, run) in enumerate(todo):
            if name in found or arguments.only not in name:
                continue
            try:
                entry = run(Path(folder) / str(number))
            except Exception as error:  # what cannot be done is recorded too
                entry = {"error": _said(error)}
            found[name] = entry
            with log.open("a") as file:
                file.write(json.dumps({"tree": tree, "name": name, "found": entry}) + "\n")
    return found


def here(frozen: dict[str, Any], path: Path) -> dict[str, Any]:
    """What is frozen, on this machine: the frozen file's, or the same commit's runs recorded here."""
    if frozen.get(_FINGERPRINT) == fingerprint():
        return frozen
    commit = _git("log", "-1", "--format=%H", "--", str(path))
    cache = CACHE / f"{commit[:12]}-{hashlib.sha256(fingerprint().encode()).hexdigest()[:8]}.json"
    if not cache.exists():
        CACHE.mkdir(exist_ok=True)
        print(
            f"tape: frozen on {frozen.get(_FINGERPRINT)}; recording {commit[:12]} on {fingerprint()}",
            flush=True,
        )
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "tree"
            _git("worktree", "add", "--detach", str(tree), commit)
            try:
                environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
                command = [sys.executable, "-m", "baseline", "write", "tape"]
                subprocess.run(command, cwd=tree, env=environment, check=True)
                cache.write_text((tree / "baseline" / "frozen" / "tape.json").read_text())
            finally:
                _git("worktree", "remove", "--force", str(tree))
    recorded: dict[str, Any] = json.loads(cache.read_text())
    return recorded


def fingerprint() -> str:
    """What bits depend on beside the source."""
    import transformers

    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    cpu = f"{model[1] if model else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {cpu}"


# --- one run ----------------------------------------------------------------------------------------------


def play(run: Played, folder: Path) -> dict[str, Any]:
    """The record of one run."""
    folder.mkdir(parents=True)
    base = folder / "base"
    if run.model in FORMATS:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": _VOCABULARY}
        quantised(folder, FORMATS[run.model], **sizes)
        base = folder / "stored"
    else:
        tiny_architecture(run.model).to(torch.bfloat16).save_pretrained(base)
    found: dict[str, Any] = run_distributed(_train, run.ranks, run, base, folder, timeout=_SECONDS)[0]
    found["step"] = _digest_of_files(sorted((folder / "steps" / "step-2" / "shards").iterdir()), own=True)
    exported = folder / "out"
    found["export"] = _digest_of_files(sorted(exported.glob("*.safetensors")))
    found["settings"] = _digest_of_settings(exported)
    if run.again:
        found["again"] = run_distributed(_resume, run.again, run, base, folder, timeout=_SECONDS)[0]
    return found


def _train(run: Played, base: Path, folder: Path) -> dict[str, Any]:
    mesh = fs.build_mesh(**run.mesh, device_type="cpu")
    model = _built(run, base, mesh)
    found: dict[str, Any] = {"loaded": _digest((name, full(p)) for name, p in model.named_parameters())}
    optimizer = _optimizer(model)
    found["steps"] = [_step(run, model, optimizer, mesh, step) for step in (1, 2)]
    fs.save_checkpoint(folder / "steps", 2, model=model, optimizer=optimizer)
    found["steps"].append(_step(run, model, optimizer, mesh, 3))
    found["evaluated"] = fs.evaluate(model, _window(run, mesh, 9)).loss.hex()
    (fs.export_adapter if run.lora else fs.export_hf)(model, folder / "out")
    return found


def _resume(run: Played, base: Path, folder: Path) -> list[str]:
    ranks = torch.distributed.get_world_size()
    shape = run.mesh if ranks == run.ranks else {}
    mesh = fs.build_mesh(**shape, device_type="cpu")
    model = _built(run, base, mesh, ep_size=run.ep_size if ranks == run.ranks else 1)
    optimizer = _optimizer(model)
    fs.load_checkpoint(folder / "steps", model=model, optimizer=optimizer)
    return [
        _digest((name, full(p)) for name, p in model.named_parameters()),
        *_step(run, model, optimizer, mesh, 3),
    ]


def _built(run: Played, base: Path, mesh: Any, *, ep_size: int | None = None) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model: Any = fs.build_meta_model(base)
    if run.lora:
        from peft import LoraConfig

        experts = [
            name for name, _ in model.named_parameters() if re.search(r"experts\.(gate_up|down)_proj$", name)
        ]
        kind = (
            {"target_modules": "all-linear"} if run.lora == "all-linear" else {"target_parameters": experts}
        )
        model = fs.add_adapters(model, LoraConfig(r=4, task_type="CAUSAL_LM", **kind), seed=1)
    fs.apply_sac(model, run.sac)
    dtype = getattr(torch, run.compute)
    options: dict[str, Any] = {"frozen_dtype": run.frozen} if run.frozen else {}
    fs.shard_model(
        model,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        reshard_after_forward=run.reshard,
        ep_size=run.ep_size if ep_size is None else ep_size,
        **options,
    )
    fs.load_weights(model, base)
    if mesh.mesh_dim_names and "cp" in mesh.mesh_dim_names and mesh["cp"].size() > 1:
        fs.use_context_parallel(model, mesh=mesh)
    if run.loss_impl != "auto" or run.router_loss:
        fs.prepare_loss(model, impl=run.loss_impl, router_loss=run.router_loss)  # type: ignore[arg-type]
    return model.train()


def _optimizer(model: Any) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, foreach=False)


def _step(run: Played, model: Any, optimizer: Any, mesh: Any, step: int) -> list[str]:
    result = fs.train_step(
        model,
        _window(run, mesh, step),
        optimizer,
        grad_sync=run.grad_sync,
    )
    return [result.loss.hex(), result.grad_norm.hex(), result.router_loss.hex()]


def _window(run: Played, mesh: Any, step: int) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of this rank, which ranks along ``cp`` share."""
    shared = mesh["cp"].size() if "cp" in (mesh.mesh_dim_names or ()) else 1
    share = torch.distributed.get_rank() // shared
    return [_batch(run.packed, 1000 * step + 10 * share + number) for number in range(run.accumulation)]


def _batch(packed: bool, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, _LENGTH // 2, (3,), generator=generator).tolist()
    rows = []
    for length in lengths:
        ids = torch.randint(3, _VOCABULARY, (length,), generator=generator).tolist()
        rows.append(fs.EncodedChat(input_ids=ids, labels=[-100, *ids[1:]]))
    if packed:
        return fs.PackedCollator(max_length=2 * _LENGTH, pad_to_multiple_of=2 * _LENGTH)(rows)
    width = max(lengths) + max(lengths) % 2  # which two ranks can share
    columns = {
        "input_ids": [[*row.input_ids, *[0] * (width - len(row.input_ids))] for row in rows],
        "labels": [[*row.labels, *[-100] * (width - len(row.labels))] for row in rows],
        "attention_mask": [[1] * len(row.labels) + [0] * (width - len(row.labels)) for row in rows],
    }
    return {name: torch.tensor(column) for name, column in columns.items()}


# --- data -------------------------------------------------------------------------------------------------

_CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}],
    [
        {"role": "user", "content": "A colour"},
        {"role": "assistant", "content": "Red, or blue."},
        {"role": "user", "content": " another one "},
        {"role": "assistant", "content": "Green\n"},
    ],
    [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because.", "reasoning_content": "They ask why."},
    ],
]


def labels(family: str) -> dict[str, Any]:
    """Digests of ids and labels of some chats in a template, with each choice of what is trained."""
    tokenizer, found = byte_tokenizer(family), {}
    for options in ({}, {"train_on": "last"}, {"train_on": "all"}):
        for number, chat in enumerate(_CHATS):
            key = f"{number} {options or ''}".strip()
            try:
                row = fs.encode_chat({"messages": chat}, tokenizer, **options)
                found[key] = hashlib.sha256(json.dumps([row.input_ids, row.labels]).encode()).hexdigest()[:16]
            except fs.FsdpSftError as error:
                found[key] = type(error).__name__
    return found


def orders() -> dict[str, str]:
    """Digests of what samplers give each rank in two epochs."""
    lengths = torch.randint(5, 300, (500,), generator=torch.Generator().manual_seed(5)).tolist()
    found = {}
    for ranks in (1, 2, 3):
        for rank in range(ranks):
            place: dict[str, Any] = {"num_replicas": ranks, "rank": rank}
            made = {
                "rows": fs.ResumableSampler(list(range(500)), seed=7, **place),
                "packs": fs.PackedSampler(lengths, max_length=512, seed=7, **place),
                "mixed": fs.ResumableSampler(fs.Mixture([300, 200], weights=[1, 3]), seed=7, **place),
            }
            for name, sampler in made.items():
                given = []
                for epoch in range(2):
                    sampler.set_epoch(epoch)
                    given.append(list(sampler))
                key = f"{name} {rank} of {ranks}"
                found[key] = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]
    return found


# --- digests ----------------------------------------------------------------------------------------------


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """One digest of tensors by name: dtype, shape and bytes."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        value = tensor.detach().cpu().contiguous()
        whole.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        whole.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return whole.hexdigest()[:16]


def _digest_of_files(files: list[Path], *, own: bool = False) -> str:
    """One digest of the tensors of several files; of a step without the generators of its ranks."""
    tensors = [
        (f"{file.name if own else ''} {name}", tensor)
        for file in files
        for name, tensor in load_file(file).items()
        if not (own and name.startswith("rank."))
    ]
    return _digest(tensors)


def _digest_of_settings(folder: Path) -> dict[str, str]:
    """Digests of an export's JSON files, without versions."""
    found = {}
    for file in sorted(folder.glob("*config.json")):
        fields = json.loads(file.read_text())
        for name in ("transformers_version", "peft_version", "base_model_name_or_path", "_name_or_path"):
            fields.pop(name, None)
        # Sets, whose order is another in each process.
        fields = {name: sorted(v) if name.startswith("target_") and v else v for name, v in fields.items()}
        found[file.name] = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
    return found


def _said(error: Exception) -> str:
    """The type and the first words of an error, without paths."""
    lines = [line for line in str(error).splitlines() if re.match(r"\s*[\w.]*(Error|Exception)\b", line)]
    text = (lines[-1] if lines else f"{type(error).__name__}: {error}").strip()
    return re.sub(r"/\S+", "PATH", text)[:160]


def _tree() -> str:
    """A digest of the library's source, of this file and of the harness."""
    whole = hashlib.sha256(fingerprint().encode())
    for path in sorted(
        [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests" / "harness").glob("*.py"), Path(__file__)]
    ):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:16]


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
