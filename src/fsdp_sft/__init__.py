"""FSDP2 building blocks for supervised fine-tuning of Hugging Face causal language models.

Every public name can be imported from here; the module that owns it is loaded on first use, so importing
the package starts nothing and costs next to nothing. These are the names that training loops use; ``__all__``
has the rest: errors, and parts of the functions below. What functions return is described where they are.

Start
    init_distributed        process group and device, from any launcher
    build_mesh              device mesh: sharded, replicated, tokens of a row shared
    PreemptionGuard         signals that all ranks agree on
    Watchdog                ends the job if a rank dies or hangs

Model
    load_pretrained         checkpoint to sharded model, in one call
    build_meta_model        model without memory
    load_weights            its weights, read into the shards
    shard_model             FSDP2, block by block
    describe_sharding       table of what each group holds
    compile_blocks          ``torch.compile`` of each block
    add_adapters            LoRA, by peft
    prepare_experts         an exact way to compute a mixture's experts
    use_varlen_attention    attention of packs without work between rows
    use_context_parallel    ranks that share the tokens of a row

Memory
    apply_sac               which blocks recompute activations, what they keep
    remove_sac              takes it off again
    StochasticAdamW         AdamW for bfloat16 parameters
    memory_stats            bytes in use and peak of a device

Data
    encode_chat             one chat to token ids and labels
    encode_dataset          a data set, tokenised once and cached
    filter_rows             rows with nothing to train left out, and counted
    render_labels           what is trained, in a terminal
    render_labels_html      what is trained, as a page
    SFTCollator             rows to padded batches
    PackedCollator          rows to packs without padding
    PackedSampler           balanced packs for each rank, resumable
    PackedStream            packs of a stream
    row_sizes               lengths and numbers of targets of rows
    verify_packing          whether packed rows see each other
    ResumableSampler        rows for each rank, resumable
    Mixture                 several data sets in one order

Loss and step
    windows                 the micro-batches of one optimizer step
    train_step              forward, backward, clipping and step of a window
    evaluate                loss over a validation set
    count_targets           number of trained positions in a window, over all ranks
    causal_lm_loss          a micro-batch's loss, ready for backward
    token_losses            the loss of each token, for losses of your own
    gradient_sync           when gradients are reduced
    prepare_loss            loss without logits, bound to a model once

Checkpoints and export
    save_checkpoint         crash-safe step: model, optimizer, data position
    load_checkpoint         newest sound step, on any number of ranks
    find_checkpoints        steps of a root, sound or not
    verify_checkpoint       list of a step's problems
    save_full_state_dict    one file with the whole model
    load_full_state_dict    that file into a sharded model
    check_export            whether an export can be made, before training
    export_hf               folder for ``from_pretrained``, vLLM and others
    export_adapter          folder for peft

Planning
    plan_run                how to run a model on given GPUs, best first
    estimate_memory         peak memory per GPU, from a config
    model_flops_per_token   FLOPs of forward and backward

Watching
    MetricLogger            metrics of steps to a file, the terminal and trackers
    ThroughputMeter         tokens per second and utilisation
    plot_run                loss, rate and speed as a picture
    watch_experts           how many tokens each expert is given
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


# The module that owns each public name, from the stub beside this file, which type checkers read.
_OWNERS = {
    name.name: str(node.module)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for name in node.names
}
__all__ = sorted([*_OWNERS, "__version__"])


def __getattr__(name: str) -> Any:
    words: Any = import_module("fsdp_sft._process.words")
    if name not in _OWNERS:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}: {words.answer(name, __all__)}".removesuffix(": ")
        )
    return globals().setdefault(name, words.answered(import_module(_OWNERS[name]), name))


def __dir__() -> list[str]:
    return list(__all__)
