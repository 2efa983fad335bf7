"""Folders in quantised formats, written by hand, and the values that they hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import save_file

from fsdp_sft._quantised.find import published
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._tensors import packed
from fsdp_sft._tensors.boxes import Box
from fsdp_sft._tensors.reader import do_reads
from fsdp_sft._tensors.stored import InFile, Stored, file_header
from tests.harness.hf_folders import configure, rewrite, save_tiny, tensors_of
from tests.harness.quantised_weights import Written, mxfp4_experts

# Rows and columns that neither blocks of 128 nor 3 ranks divide.
UNEVEN = {
    "hidden_size": 192,
    "intermediate_size": 576,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def fp8_folder(folder: Path, config: Any = None, *, block: int = 16) -> dict[str, torch.Tensor]:
    """A folder in FP8 with a scale for each block, and its values."""
    tiny = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    transformers.AutoModelForCausalLM.from_config(config or tiny).bfloat16().save_pretrained(folder)
    return quantise(folder, block=block)


def mxfp4_folder(folder: Path, config: Any = None) -> dict[str, torch.Tensor]:
    """A gpt-oss with the experts in MXFP4, and its values."""
    tiny = transformers.GptOssConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=101,
        num_key_value_heads=1, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config or tiny)
    stored, values = {}, {}
    for name, weight in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = values[name] = weight.bfloat16()
            continue
        made = mxfp4_experts(*weight.shape, least=118)
        stored |= {f"{name}{ending}": part for ending, part in made.tensors.items()}
        values[name] = made.values.bfloat16()
    model.save_pretrained(folder)
    rewrite(folder, stored)
    configure(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return values


def fp8_experts_folder(folder: Path) -> None:
    """A mixture in FP8: experts apart, as published; transformers merges and dequantises them together."""
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    fp8_folder(folder, config)


def quantised(
    folder: Path,
    make: Callable[[int, int], Written],
    family: str = "llama",
    *,
    marked: str = "_proj",
    files: int = 3,
    **sizes: Any,
) -> Written:
    """Two folders of one model, whose marked matrices are quantised at random, and the last of these.

    ``stored`` has them as ``make`` writes them, over several files, ``published`` their values in float32.
    """
    torch.manual_seed(0)
    for name in ("published", "stored"):
        save_tiny(folder / name, family, **sizes)
    published = {name: t.float() for name, t in tensors_of(folder / "published").items()}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in list(published.items()):
        if marked in name and tensor.ndim == 2:
            made = make(*tensor.shape)
            published[name] = made.values
            stored |= {
                f"{name.removesuffix('.weight')}{ending}": part for ending, part in made.tensors.items()
            }
        else:
            stored[name] = tensor.bfloat16()
    rewrite(folder / "published", published)
    rewrite(folder / "stored", stored, files=files)
    configure(folder / "stored", quantization_config=made.settings)
    return made


def quantise(folder: Path, values: Path | None = None, *, block: int = 16) -> dict[str, torch.Tensor]:
    """Put projections and experts of a folder into FP8; what they hold in float32, also as a folder."""
    stored, plain = {}, {}
    for name, weight in tensors_of(folder).items():
        stored[name] = plain[name] = weight
        if weight.ndim == 2 and ("_proj" in name or ".experts." in name):
            rows, columns = weight.shape
            scale = torch.rand(-(-rows // block), -(-columns // block)) / 1000 + 1e-3
            spread = torch.kron(scale, torch.ones(block, block))[:rows, :columns]
            stored[name] = (weight.float() / spread).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            plain[name] = stored[name].float() * spread
    rewrite(folder, stored, files=3)
    if values is not None:
        rewrite(values, plain)
    settings = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    configure(folder, quantization_config=settings)
    return plain


def deepseek_folder(folder: Path) -> dict[str, torch.Tensor]:
    """A DeepSeek-V3 in FP8 with matrices of 576 rows and blocks of 128, and its values in float32."""
    config = transformers.DeepseekV3Config(
        hidden_size=192, intermediate_size=160, moe_intermediate_size=96, num_hidden_layers=2, vocab_size=101,
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=160, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=32, v_head_dim=32, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=2, first_k_dense_replace=1, max_position_embeddings=128, rope_parameters=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return {name: tensor.float() for name, tensor in fp8_folder(folder, config, block=128).items()}


def opened(folder: Path, made: Written, name: str = "m") -> dict[str, Stored]:
    """What a checkpoint of one matrix holds, its tensors in two files."""
    stored: dict[str, InFile] = {}
    for number in range(2):
        part = {f"{name}{end}": t for end, t in list(made.tensors.items())[number::2]}
        path = folder / f"{number}.safetensors"
        save_file(part, path)
        entries = file_header(path, AssertionError).entries
        stored |= {key: InFile(path, entry) for key, entry in entries.items()}
    return published(stored, Settings(str(folder), made.settings["quant_method"], made.settings))


def read(source: Stored, box: Box, at_once: int = 1 << 20) -> tuple[torch.Tensor, int]:
    """The values in a box, of which so many are computed at once, and the bytes that it took."""
    out = torch.full(box.shape, torch.nan)
    with mock.patch.object(packed, "_AT_ONCE", at_once):
        count = do_reads(source.reads(source.piece("m"), box, out))
    return out, count
