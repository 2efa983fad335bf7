"""How evenly the parameters of large models lie on many ranks.

    python -m benchmarks.checks.placement [--output FILE]

Fake process groups, models on the meta device: what rank 0 of each job holds, which is the most of all ranks,
over the mean, with FSDP2's first dimensions and with the dimensions that ``shard_model`` chooses.
"""

import argparse
import json
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdp_sft as fs
from benchmarks.tables import publish, table

RANKS = (8, 16, 64, 256)
# From the models' cards; Mixtral's and DeepSeek-V3's are transformers' defaults.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense 8B": (
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "Mixtral-8x7B": ("MixtralConfig", {}),
    "Qwen3-30B-A3B": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
        },
    ),
    "gpt-oss-120b": (
        "GptOssConfig",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "vocab_size": 201088,
        },
    ),
    "DeepSeek-V3": ("DeepseekV3Config", {}),
    "Llama 4 Scout": (
        "Llama4TextConfig",
        {
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "vocab_size": 202048,
        },
    ),
}


def measure(name: str, ranks: int) -> dict[str, Any]:
    """In a process of its own: a fake job of ``ranks``."""
    import transformers as tf
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    kind, fields = MODELS[name]
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(getattr(tf, kind)(**fields), dtype=torch.bfloat16)
    total = sum(p.numel() for p in model.parameters())
    first = sum(math.ceil(p.shape[0] / ranks) * (p.numel() // p.shape[0]) for p in model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fs.shard_model(model, mesh=fs.build_mesh(device_type="cpu"))
    own = sum(p.to_local().numel() for p in model.parameters())
    said = [str(warning.message) for warning in caught if "times the mean" in str(warning.message)]
    return {"parameters": total, "first": first * ranks / total, "chosen": own * ranks / total, "said": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "RANKS"))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]))))
        return
    rows, notes = [], []
    for name in MODELS:
        found = []
        for ranks in RANKS:
            command = [sys.executable, "-m", "benchmarks.checks.placement", "--one", name, str(ranks)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
            notes += [f'- {name} on {ranks}: "{said}"' for said in found[-1]["said"]]
            if (found[-1]["chosen"] > 1.05) != bool(found[-1]["said"]):
                raise SystemExit(f"{name} on {ranks}: {found[-1]}")
        cells = [f"{one['first']:.2f} / {one['chosen']:.3f}" for one in found]
        rows.append([name, f"{found[0]['parameters'] / 1e9:.1f}B", *cells])
    lines = [
        "What the fullest rank holds over the mean: along first dimensions / as `shard_model` cuts.",
        "",
        *table(["model", "parameters", *(f"{ranks} ranks" for ranks in RANKS)], rows),
        "",
        "What is uneven along every dimension is named in a warning:",
        "",
        *notes,
    ]
    publish("How evenly parameters lie on the ranks", lines, args.output)


if __name__ == "__main__":
    main()
