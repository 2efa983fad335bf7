"""No public function moves a generator of random numbers, on any device, unless its pages say so."""

import gc
import inspect
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from tests.harness.architectures import quiet, tiny_architecture
from tests.harness.chats import TOKENIZERS, chat
from tests.harness.composed import composed
from tests.harness.hf_folders import rewrite, save_tiny, tensors_of
from tests.harness.models import ragged_batches, tiny_config, tiny_model
from tests.harness.packs import drawn_rows
from tests.harness.ranks import mesh_here, run_distributed
from tests.simulated.ranks import run_simulated

# These set or take from generators by contract.
DOCUMENTED = {
    "load_checkpoint": "restores the generators of the run it continues",
    "train_step": "draws what the model's forward draws: dropout",
    "causal_lm_loss": "likewise",
    "loss_sum": "likewise",
    "token_losses": "likewise",
}
# Classes do their work in methods, which the calls below run where they could draw.
NUMPY = "numpy"


def _states() -> dict[str, Any]:
    found: dict[str, Any] = {"host": torch.get_rng_state().tolist(), "python": random.getstate()}
    if NUMPY in sys.modules:
        found[NUMPY] = str(sys.modules[NUMPY].random.get_state())
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        for index in range(module.device_count()):
            found[f"{accelerator.type}:{index}"] = module.get_rng_state(index).tolist()
    return found


def _base(folder: Path) -> Path:
    """A checkpoint that lacks a key, so that loading initialises it, of a model with dropout."""
    tensors = tensors_of(save_tiny(folder, "llama", attention_dropout=0.1))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    rewrite(folder, tensors)
    return folder


def _calls(root: Path) -> dict[str, Callable[[], Any]]:
    """A call of every public function, in an order in which each finds what it needs."""
    kept: dict[str, Any] = {}
    base, rows, batches = root / "base", drawn_rows(6), ragged_batches(4)
    tokenizer, talk = TOKENIZERS["chatml"], [chat("Hi", "Hello"), chat("1 + 1?", "2")]
    config = tiny_config("llama")
    sizes = {"num_gpus": 2, "micro_batch_size": 1, "seq_length": 16}
    memory = {"gpu_memory_bytes": 1 << 34, "seq_length": 16}

    dropping = tiny_model("gpt2", resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1).train()
    by_row, narrow = (tiny_model("llama") for _ in range(2))
    with quiet():
        mixture = tiny_architecture("Glm4MoeForCausalLM").eval()

    def keep(name: str, value: Any) -> Any:
        kept[name] = value
        return value

    def load(**options: Any) -> Any:
        return composed(base, mesh=kept["mesh"], missing="initialise", **options)

    def loaded() -> None:
        keep("optimizer", torch.optim.SGD(keep("model", load()).parameters(), lr=0.1))

    def streamed() -> Any:
        collate = fs.SFTCollator(tokenizer, max_length=32)
        list(fs.PackedSampler(fs.row_sizes(rows)[0], max_length=64, seed=1))
        list(fs.ResumableSampler(talk, seed=1))
        return list(fs.windows([collate([row]) for row in talk], 2))

    def prefix(name: str) -> str:
        return str(root / f"{name}-{torch.distributed.get_world_size()}")

    return {
        "init_distributed": lambda: fs.init_distributed(),
        "build_mesh": lambda: keep("mesh", fs.build_mesh()),
        "check_export": lambda: fs.check_export(prefix("out")),
        "build_meta_model": lambda: keep("meta", fs.build_meta_model(base)),
        "find_blocks": lambda: fs.find_blocks(kept["meta"]),
        "freeze_towers": lambda: fs.freeze_towers(kept["meta"]),
        "apply_sac": lambda: fs.apply_sac(kept["meta"], "1/3"),
        "remove_sac": lambda: fs.remove_sac(kept["meta"]),
        "compile_blocks": lambda: fs.compile_blocks(fs.build_meta_model(base), backend="eager"),
        "select_block_indices": lambda: fs.select_block_indices(4, "1/2"),
        "shard_model": lambda: fs.shard_model(kept["meta"], mesh=kept["mesh"]),
        "load_weights": lambda: fs.load_weights(kept["meta"], base, missing="initialise"),
        "load_pretrained": loaded,
        "add_adapters": lambda: fs.add_adapters(fs.build_meta_model(base, new_vocab_size=120), _lora()),
        "describe_sharding": lambda: fs.describe_sharding(kept["model"]),
        "encode_chat": lambda: keep("chat", fs.encode_chat(talk[0], tokenizer)),
        "render_labels": lambda: fs.render_labels(tokenizer, kept["chat"].input_ids, kept["chat"].labels),
        "render_labels_html": lambda: fs.render_labels_html(
            tokenizer, [kept["chat"].input_ids], [kept["chat"].labels]
        ),
        "filter_rows": lambda: fs.filter_rows(talk, tokenizer),
        "encode_dataset": lambda: fs.encode_dataset(
            talk, tokenizer, max_length=64, cache_dir=root / "encoded"
        ),
        "row_sizes": lambda: fs.row_sizes(rows),
        "pack_lengths": lambda: fs.pack_lengths([3, 4, 5], 8),
        "attention_cost": lambda: fs.attention_cost(kept["model"].config),
        "windows": streamed,
        "keep_workers_alive": lambda: list(fs.keep_workers_alive(batches)),
        "count_targets": lambda: fs.count_targets(batches),
        "prepare_loss": lambda: fs.prepare_loss(kept["model"]),
        "prepare_experts": lambda: fs.prepare_experts(mixture),
        "loss_sum": lambda: keep("loss", fs.loss_sum(kept["model"].eval(), _on(kept["model"], batches[0]))),
        "token_losses": lambda: fs.token_losses(kept["model"].eval(), _on(kept["model"], batches[0])),
        "causal_lm_loss": lambda: fs.causal_lm_loss(
            kept["model"], _on(kept["model"], batches[0]), num_targets=9
        ),
        "scale_for_backward": lambda: fs.scale_for_backward(kept["loss"][0], num_targets=9),
        "linear_cross_entropy_sum": lambda: fs.linear_cross_entropy_sum(
            torch.ones(1, 3, 4), torch.ones(7, 4), torch.ones(1, 3, dtype=torch.int64)
        ),
        "verify_packing": lambda: fs.verify_packing(dropping, max_length=64),
        "use_context_parallel": lambda: _shared_rows(base),
        "use_varlen_attention": lambda: fs.use_varlen_attention(by_row),
        "gradient_sync": lambda: fs.gradient_sync(kept["model"], "none").__enter__(),
        "train_step": lambda: fs.train_step(kept["model"].eval(), batches[:2], kept["optimizer"]),
        "StochasticAdamW": lambda: _rounded(narrow, mesh_here()),
        "evaluate": lambda: fs.evaluate(kept["model"].train(), batches),
        "save_checkpoint": lambda: fs.save_checkpoint(
            prefix("steps"), 1, model=kept["model"], optimizer=kept["optimizer"]
        ),
        "find_checkpoints": lambda: keep("found", fs.find_checkpoints(prefix("steps"))),
        "verify_checkpoint": lambda: fs.verify_checkpoint(kept["found"][0].path),
        "load_checkpoint": lambda: fs.load_checkpoint(prefix("steps"), model=kept["model"]),
        "save_full_state_dict": lambda: fs.save_full_state_dict(kept["model"], prefix("f") + ".safetensors"),
        "load_full_state_dict": lambda: fs.load_full_state_dict(kept["model"], prefix("f") + ".safetensors"),
        "export_hf": lambda: fs.export_hf(kept["model"], prefix("out")),
        "iter_hf_tensors": lambda: dict(fs.iter_hf_tensors(kept["model"])),
        "export_adapter": lambda: fs.export_adapter(load(peft_config=_lora()), prefix("adapter")),
        "memory_stats": fs.memory_stats,
        "reset_peak_memory": fs.reset_peak_memory,
        "aggregate_metrics": lambda: fs.aggregate_metrics({"loss": 1.0}),
        "model_flops_per_token": lambda: fs.model_flops_per_token(config, 16),
        "peak_flops_per_second": lambda: fs.peak_flops_per_second("cpu"),
        "estimate_memory": lambda: fs.estimate_memory(config, fs.Run(**sizes)),
        "plan_run": lambda: fs.plan_run(config, num_gpus=2, global_batch_size=4, **memory),
        "watch_experts": lambda: fs.watch_experts(mixture),
        "plot_run": lambda: _plotted(root),
    }


def _on(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in batch.items()}


def _shared_rows(base: Path) -> Any:
    mesh = mesh_here(cp=torch.distributed.get_world_size())
    model = composed(base, mesh=mesh, missing="initialise")
    fs.use_context_parallel(model, mesh=mesh)
    del model, mesh
    gc.collect()  # while there is such a mesh, others want to be told who shares rows


def _rounded(model: Any, mesh: Any) -> Any:
    fs.shard_model(model, mesh=mesh, master_dtype=torch.bfloat16)
    return fs.train_step(model, ragged_batches(2)[:1], fs.StochasticAdamW(model.parameters()))


def _lora() -> Any:
    import peft

    return peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")


def _plotted(root: Path) -> Any:
    pytest.importorskip("matplotlib")
    (root / "log.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    return fs.plot_run(root / "log.jsonl", root / f"plot-{torch.distributed.get_rank()}.png")


def _moved_by_each(root: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Names of the generators that each function has moved, and what failed."""
    moved: dict[str, list[str]] = {}
    failed: dict[str, str] = {}
    calls = _calls(root)
    torch.manual_seed(1234)  # the caller's, of every device
    random.seed(5)
    for name, call in calls.items():
        before = _states()
        try:
            call()
        except pytest.skip.Exception:
            pass
        except Exception as error:
            failed[name] = repr(error)
        after = _states()
        if after != before:
            moved[name] = [key for key in after if after[key] != before.get(key, after[key])]
    return {name: keys for name, keys in moved.items() if keys}, failed


def test_every_public_function_is_called() -> None:
    called = _calls(Path()).keys()
    assert {name for name in fs.__all__ if inspect.isfunction(getattr(fs, name))} - called == set()


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_no_generator_moves_unless_documented(tmp_path: Path, device: str) -> None:
    pytest.importorskip("peft", reason="adapters need the 'peft' extra")
    _base(tmp_path / "base")
    run = run_simulated if device == "simulated" else run_distributed
    for moved, failed in run(_moved_by_each, 2, tmp_path):
        assert {name: keys for name, keys in moved.items() if name not in DOCUMENTED} == {}
        assert not failed, "\n".join(f"{name}: {error[:300]}" for name, error in failed.items())
