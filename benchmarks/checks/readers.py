"""What other programs make of an exported folder: logits beside those of the model that was exported.

    python -m venv others
    others/bin/pip install transformers==4.57.6 torch 'mlx[cpu]' jinja2 sentencepiece pyyaml
    others/bin/pip install --no-deps mlx-lm==0.32.2  # which asks for transformers 5
    python -m benchmarks.checks.readers --python others/bin/python --output readers.md

Tiny models with random weights and rotary embeddings that are not the default are exported by ``export_hf``,
and read by transformers 4.57 and mlx-lm, in a process of that environment. "Alone" is the same folder with
``rope_parameters`` only, as ``save_pretrained`` of transformers 5 writes it. A second table has what each
reader takes from the other fields of an export in bfloat16: dtype, tied weights, and where an answer ends.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import fsdp_sft as fs
from benchmarks.tables import publish, table
from examples.tiny_model import make_tokenizer

_THETA = 500_000.0
_SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Class, rotary embeddings, further fields.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama": ("Llama", {"rope_type": "default"}, {}),
    "Llama, llama3": ("Llama", {"rope_type": "llama3", **_LLAMA3}, {}),
    "Llama, yarn": ("Llama", {"rope_type": "yarn", **_YARN}, {}),
    "Llama, linear": ("Llama", {"rope_type": "linear", "factor": 2.0}, {}),
    "Llama, tied": ("Llama", {"rope_type": "default"}, {"tie_word_embeddings": True}),
    "Qwen2": ("Qwen2", {"rope_type": "default"}, {}),
    "Qwen2, tied": ("Qwen2", {"rope_type": "default"}, {"tie_word_embeddings": True}),
    "Qwen2, yarn": ("Qwen2", {"rope_type": "yarn", **_YARN}, {}),
    "Qwen3": ("Qwen3", {"rope_type": "default"}, {"head_dim": 16}),
    "Qwen3-MoE": (
        "Qwen3Moe",
        {"rope_type": "default"},
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "Mistral": ("Mistral", {"rope_type": "default"}, {"sliding_window": None}),
    "Mixtral": ("Mixtral", {"rope_type": "default"}, {**_EXPERTS, "sliding_window": None}),
    "Gemma 2": ("Gemma2", {"rope_type": "default"}, {"head_dim": 16}),
    "Gemma 3": ("Gemma3", {}, {"head_dim": 16, "sliding_window": 16}),
    "Phi-3": ("Phi3", {"rope_type": "default"}, {"pad_token_id": 0}),
    "GLM-4": (
        "Glm4",
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"head_dim": 16, "pad_token_id": 0},
    ),
    "OLMo 2": ("Olmo2", {"rope_type": "default"}, {}),
    "Granite": ("Granite", {"rope_type": "default"}, {}),
    "gpt-oss": ("GptOss", {"rope_type": "yarn", "truncate": False, **_YARN}, {"head_dim": 16, **_EXPERTS}),
    "GPT-NeoX": ("GPTNeoX", {"rope_type": "default", "partial_rotary_factor": 0.25}, {}),
}
_FORMER = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "num_experts")
_FORMER += ("rotary_emb_base", "rotary_pct")
_FIELDS = ("dtype", "tied", "ends at")
_READER = """
import json, sys
import torch
ids = list(range(3, 99))
found = {}
for name, folder in json.load(open(sys.argv[1])).items():
    own = found[name] = {}
    wanted = torch.load(folder + ".pt")
    try:
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        own["transformers"] = float((logits - wanted).abs().max() / wanted.abs().max())
    except Exception as error:
        own["transformers"] = f"{type(error).__name__}: {error}"[:60]
    try:
        from transformers import AutoTokenizer
        own["tokenizer"] = AutoTokenizer.from_pretrained(folder)("A tool chat").input_ids
    except Exception as error:
        own["tokenizer"] = type(error).__name__
    try:
        import mlx.core as mx
        from mlx_lm.utils import load_model
        from pathlib import Path
        mx.set_default_device(mx.cpu)
        model = load_model(Path(folder))[0]
        model.set_dtype(mx.float32)
        logits = torch.tensor(model(mx.array([ids])).tolist())[0]
        own["mlx"] = float((logits - wanted).abs().max() / wanted.abs().max())
    except Exception as error:
        own["mlx"] = f"{type(error).__name__}: {error}"[:60]
    if name.endswith("alone"):
        continue
    folder += "-bf16"
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        head, tokens = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        own["transformers fields"] = [str(model.dtype), head is tokens, model.generation_config.eos_token_id]
    except Exception as error:
        own["transformers fields"] = [f"{type(error).__name__}: {error}"[:60]] * 3
    try:
        from mlx_lm import load
        from mlx.utils import tree_flatten
        model, tokenizer = load(folder)
        weights = dict(tree_flatten(model.parameters()))
        dtypes = sorted({str(value.dtype).rpartition(".")[2] for value in weights.values()})
        tied = "lm_head.weight" not in weights
        own["mlx fields"] = [" ".join(dtypes), tied, sorted(tokenizer.eos_token_ids)]
    except Exception as error:
        own["mlx fields"] = [f"{type(error).__name__}: {error}"[:60]] * 3
print("FOUND " + json.dumps(found))
"""


def build(name: str) -> Any:
    """The model of a case, with random weights."""
    kind, rope, further = CASES[name]
    fields = {**_SHAPE, **further}
    if rope:
        fields["rope_parameters"] = {"rope_theta": _THETA, **rope}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**fields)
    return getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()


def write(folder: Path, tokenizer: Any) -> dict[str, str]:
    """Folders by name: of each case the export, and the same with ``rope_parameters`` alone."""
    folders = {}
    for number, name in enumerate(CASES):
        model, own = build(name), folder / str(number)
        fs.export_hf(model, own, tokenizer=tokenizer, dtype=torch.float32)
        fs.export_hf(model, f"{own}-bf16", tokenizer=tokenizer, dtype=torch.bfloat16)
        alone = folder / f"{number}-alone"
        alone.mkdir()
        for file in own.iterdir():
            (alone / file.name).symlink_to(file)
        config = json.loads((own / "config.json").read_text())
        (alone / "config.json").unlink()
        (alone / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in _FORMER}))
        with torch.no_grad():
            logits = model(torch.arange(3, 99)[None]).logits[0]
        for one in (own, alone):
            torch.save(logits, f"{one}.pt")
        folders |= {name: str(own), f"{name} alone": str(alone)}
    return folders


def said(value: Any) -> str:
    """A cell: an error, or what was raised."""
    return f"{value:.1e}" if isinstance(value, float) else " ".join(str(value).split())


def main() -> None:
    """Export, let the other environment read, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="interpreter with transformers 4.57 and mlx-lm")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    tokenizer = make_tokenizer(["A tool chat", "an answer of some words"], vocab_size=400)
    with tempfile.TemporaryDirectory() as folder:
        folders = write(Path(folder), tokenizer)
        listed = Path(folder) / "folders.json"
        listed.write_text(json.dumps(folders))
        done = subprocess.run(
            [args.python, "-c", _READER, str(listed)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found = json.loads(done.stdout.partition("FOUND ")[2])
    ids = tokenizer("A tool chat").input_ids
    head = [
        "family",
        "transformers 4.57",
        "`rope_parameters` alone",
        "mlx-lm",
        "`rope_parameters` alone",
        "tokenizer",
    ]
    rows = []
    for name in CASES:
        own, alone = found[name], found[f"{name} alone"]
        same = "same ids" if own["tokenizer"] == ids else str(own["tokenizer"])
        rows.append(
            [name, *(said(one[key]) for key in ("transformers", "mlx") for one in (own, alone)), same]
        )
    fields = [
        [
            name,
            *(said(value) for reader in ("transformers", "mlx") for value in found[name][f"{reader} fields"]),
        ]
        for name in CASES
    ]
    lines = [
        "Largest difference of a logit over the largest logit, 96 positions, float32, tiny models with "
        f"random weights and a base of {_THETA:,.0f} where the family has one; mlx-lm has its own kernels.",
        "",
        *table(head, rows),
        "",
        f"Of an export in bfloat16 whose tokenizer ends an answer with token {tokenizer.eos_token_id}: the "
        'dtype that `dtype="auto"` and mlx-lm load, whether the head is the embedding, and the tokens that '
        "end generation.",
        "",
        *table(
            ["family", *[f"{reader}: {field}" for reader in ("4.57", "mlx-lm") for field in _FIELDS]], fields
        ),
    ]
    publish("What other programs make of an export", lines, args.output)


if __name__ == "__main__":
    main()
