"""FSDP2 building blocks for supervised fine-tuning of Hugging Face causal language models.

Every public name can be imported from here; the module that owns it is loaded on first use, so importing
the package starts nothing and costs next to nothing. These are the names that training loops use; ``__all__``
has the rest: errors, classes of results, parts of the functions below.

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
    prepare_base            base model converted once
    load_prepared           that model, read in place
    prepare_experts         fastest exact way to compute a mixture's experts
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
    MixedSampler            several data sets in one order
    MixedStream             several streams as one

Loss and step
    windows                 the micro-batches of one optimizer step
    train_step              forward, backward, clipping and step of a window
    evaluate                loss over a validation set
    count_targets           number of trained positions in a window, over all ranks
    causal_lm_loss          a micro-batch's loss, ready for backward
    gradient_sync           when gradients are reduced
    prepare_loss            loss without logits, bound to a model once
    update_router_bias      experts balanced by a bias

Checkpoints and export
    save_checkpoint         crash-safe step: model, optimizer, data position
    load_checkpoint         newest sound step, on any number of ranks
    find_checkpoints        steps of a root, sound or not
    verify_checkpoint       list of a step's problems
    convert_checkpoint      steps from checkpoints of other tools
    save_full_state_dict    one file with the whole model
    load_full_state_dict    that file into a sharded model
    check_export            whether an export can be made, before training
    export_hf               folder for ``from_pretrained``, vLLM and others
    export_adapter          folder for peft

Planning
    plan_run                how to run a model on given GPUs, best first
    estimate_memory         peak memory per GPU, from a config
    smallest_num_gpus       fewest GPUs on which a run fits
    longest_rows            longest row that fits
    model_flops_per_token   FLOPs of forward and backward

Watching
    MetricLogger            metrics of steps to files and trackers
    ProgressBar             one line in the terminal
    ThroughputMeter         tokens per second and utilisation
    StepProfiler            torch's profiler on chosen steps
    trace_seconds           how long each part of them took on a rank
    plot_run                loss, rate and speed as a picture
    watch_experts           how many tokens each expert is given
    plot_expert_load        that, as a picture
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_sft.adapters import add_adapters as add_adapters
    from fsdp_sft.blocks import find_blocks as find_blocks
    from fsdp_sft.collate import IGNORE_INDEX as IGNORE_INDEX
    from fsdp_sft.collate import EncodedChat as EncodedChat
    from fsdp_sft.collate import FilterCounts as FilterCounts
    from fsdp_sft.collate import SFTCollator as SFTCollator
    from fsdp_sft.collate import encode_chat as encode_chat
    from fsdp_sft.collate import filter_rows as filter_rows
    from fsdp_sft.collate import render_labels as render_labels
    from fsdp_sft.collate import render_labels_html as render_labels_html
    from fsdp_sft.context_parallel import use_context_parallel as use_context_parallel
    from fsdp_sft.dcp_io import CheckpointInfo as CheckpointInfo
    from fsdp_sft.dcp_io import LoadedCheckpoint as LoadedCheckpoint
    from fsdp_sft.dcp_io import SavedCheckpoint as SavedCheckpoint
    from fsdp_sft.dcp_io import convert_checkpoint as convert_checkpoint
    from fsdp_sft.dcp_io import find_checkpoints as find_checkpoints
    from fsdp_sft.dcp_io import load_checkpoint as load_checkpoint
    from fsdp_sft.dcp_io import load_full_state_dict as load_full_state_dict
    from fsdp_sft.dcp_io import load_optimizer_state as load_optimizer_state
    from fsdp_sft.dcp_io import save_checkpoint as save_checkpoint
    from fsdp_sft.dcp_io import save_full_state_dict as save_full_state_dict
    from fsdp_sft.dcp_io import save_optimizer_state as save_optimizer_state
    from fsdp_sft.dcp_io import verify_checkpoint as verify_checkpoint
    from fsdp_sft.distributed import DistributedContext as DistributedContext
    from fsdp_sft.distributed import build_mesh as build_mesh
    from fsdp_sft.distributed import init_distributed as init_distributed
    from fsdp_sft.encoded import EncodedDataset as EncodedDataset
    from fsdp_sft.encoded import encode_dataset as encode_dataset
    from fsdp_sft.errors import AdapterError as AdapterError
    from fsdp_sft.errors import BatchError as BatchError
    from fsdp_sft.errors import CallMismatchError as CallMismatchError
    from fsdp_sft.errors import ChatTemplateError as ChatTemplateError
    from fsdp_sft.errors import CheckpointCorruptError as CheckpointCorruptError
    from fsdp_sft.errors import CheckpointError as CheckpointError
    from fsdp_sft.errors import CheckpointExistsError as CheckpointExistsError
    from fsdp_sft.errors import CheckpointFormatError as CheckpointFormatError
    from fsdp_sft.errors import CheckpointInUseError as CheckpointInUseError
    from fsdp_sft.errors import CheckpointMismatchError as CheckpointMismatchError
    from fsdp_sft.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from fsdp_sft.errors import DroppedTextError as DroppedTextError
    from fsdp_sft.errors import ExportExistsError as ExportExistsError
    from fsdp_sft.errors import FsdpSftError as FsdpSftError
    from fsdp_sft.errors import HostMemoryError as HostMemoryError
    from fsdp_sft.errors import LostRankError as LostRankError
    from fsdp_sft.errors import MediaError as MediaError
    from fsdp_sft.errors import MissingKeysError as MissingKeysError
    from fsdp_sft.errors import ModelLossError as ModelLossError
    from fsdp_sft.errors import NoBlocksError as NoBlocksError
    from fsdp_sft.errors import NonFiniteGradientError as NonFiniteGradientError
    from fsdp_sft.errors import NonFiniteWeightsError as NonFiniteWeightsError
    from fsdp_sft.errors import NoPlanError as NoPlanError
    from fsdp_sft.errors import NotFusedError as NotFusedError
    from fsdp_sft.errors import NotRecomputedError as NotRecomputedError
    from fsdp_sft.errors import OptimizerError as OptimizerError
    from fsdp_sft.errors import PackingError as PackingError
    from fsdp_sft.errors import RemoteRankError as RemoteRankError
    from fsdp_sft.errors import SafetensorsError as SafetensorsError
    from fsdp_sft.errors import TooLongError as TooLongError
    from fsdp_sft.errors import UnexpectedKeysError as UnexpectedKeysError
    from fsdp_sft.errors import UnfilledTensorsError as UnfilledTensorsError
    from fsdp_sft.errors import UnstorableStateError as UnstorableStateError
    from fsdp_sft.errors import UnsupportedModelError as UnsupportedModelError
    from fsdp_sft.errors import VocabularyError as VocabularyError
    from fsdp_sft.errors import WrappedModelError as WrappedModelError
    from fsdp_sft.experts import ExpertLoad as ExpertLoad
    from fsdp_sft.experts import plot_expert_load as plot_expert_load
    from fsdp_sft.experts import prepare_experts as prepare_experts
    from fsdp_sft.experts import update_router_bias as update_router_bias
    from fsdp_sft.experts import watch_experts as watch_experts
    from fsdp_sft.export import check_export as check_export
    from fsdp_sft.export import export_adapter as export_adapter
    from fsdp_sft.export import export_hf as export_hf
    from fsdp_sft.loss import causal_lm_loss as causal_lm_loss
    from fsdp_sft.loss import count_targets as count_targets
    from fsdp_sft.loss import linear_cross_entropy_sum as linear_cross_entropy_sum
    from fsdp_sft.loss import loss_sum as loss_sum
    from fsdp_sft.loss import prepare_loss as prepare_loss
    from fsdp_sft.loss import scale_for_backward as scale_for_backward
    from fsdp_sft.loss import target_weight as target_weight
    from fsdp_sft.metrics import MetricLogger as MetricLogger
    from fsdp_sft.metrics import MetricSink as MetricSink
    from fsdp_sft.metrics import ProgressBar as ProgressBar
    from fsdp_sft.metrics import StepProfiler as StepProfiler
    from fsdp_sft.metrics import TensorBoardSink as TensorBoardSink
    from fsdp_sft.metrics import ThroughputMeter as ThroughputMeter
    from fsdp_sft.metrics import TrackioSink as TrackioSink
    from fsdp_sft.metrics import WandbSink as WandbSink
    from fsdp_sft.metrics import aggregate_metrics as aggregate_metrics
    from fsdp_sft.metrics import memory_stats as memory_stats
    from fsdp_sft.metrics import model_flops_per_token as model_flops_per_token
    from fsdp_sft.metrics import peak_flops_per_second as peak_flops_per_second
    from fsdp_sft.metrics import plot_run as plot_run
    from fsdp_sft.metrics import reset_peak_memory as reset_peak_memory
    from fsdp_sft.metrics import trace_seconds as trace_seconds
    from fsdp_sft.mixing import MixedSampler as MixedSampler
    from fsdp_sft.mixing import MixedStream as MixedStream
    from fsdp_sft.optimizer import StochasticAdamW as StochasticAdamW
    from fsdp_sft.packing import PackedCollator as PackedCollator
    from fsdp_sft.packing import PackedSampler as PackedSampler
    from fsdp_sft.packing import PackedStream as PackedStream
    from fsdp_sft.packing import PackingReport as PackingReport
    from fsdp_sft.packing import attention_cost as attention_cost
    from fsdp_sft.packing import pack_lengths as pack_lengths
    from fsdp_sft.packing import row_sizes as row_sizes
    from fsdp_sft.packing import verify_packing as verify_packing
    from fsdp_sft.planner import LongestRow as LongestRow
    from fsdp_sft.planner import MemoryEstimate as MemoryEstimate
    from fsdp_sft.planner import RunPlan as RunPlan
    from fsdp_sft.planner import estimate_memory as estimate_memory
    from fsdp_sft.planner import longest_rows as longest_rows
    from fsdp_sft.planner import plan_run as plan_run
    from fsdp_sft.planner import smallest_num_gpus as smallest_num_gpus
    from fsdp_sft.preemption import REQUEUE_EXIT_CODE as REQUEUE_EXIT_CODE
    from fsdp_sft.preemption import PreemptionGuard as PreemptionGuard
    from fsdp_sft.preemption import keep_workers_alive as keep_workers_alive
    from fsdp_sft.prepared import load_prepared as load_prepared
    from fsdp_sft.prepared import prepare_base as prepare_base
    from fsdp_sft.pretrained import load_pretrained as load_pretrained
    from fsdp_sft.sac import apply_op_sac as apply_op_sac
    from fsdp_sft.sac import apply_sac as apply_sac
    from fsdp_sft.sac import compile_with_memory_budget as compile_with_memory_budget
    from fsdp_sft.sac import remove_sac as remove_sac
    from fsdp_sft.sac import select_block_indices as select_block_indices
    from fsdp_sft.sampler import ResumableSampler as ResumableSampler
    from fsdp_sft.shard import compile_blocks as compile_blocks
    from fsdp_sft.shard import shard_model as shard_model
    from fsdp_sft.shares import describe_sharding as describe_sharding
    from fsdp_sft.step import EvalResult as EvalResult
    from fsdp_sft.step import StepResult as StepResult
    from fsdp_sft.step import evaluate as evaluate
    from fsdp_sft.step import gradient_sync as gradient_sync
    from fsdp_sft.step import train_step as train_step
    from fsdp_sft.step import windows as windows
    from fsdp_sft.varlen import use_varlen_attention as use_varlen_attention
    from fsdp_sft.watchdog import STALL_EXIT_CODE as STALL_EXIT_CODE
    from fsdp_sft.watchdog import Watchdog as Watchdog
    from fsdp_sft.weights import LoadReport as LoadReport
    from fsdp_sft.weights import build_meta_model as build_meta_model
    from fsdp_sft.weights import load_weights as load_weights

__version__ = "0.1.0"

_OWNERS = {
    "AdapterError": "errors",
    "BatchError": "errors",
    "ChatTemplateError": "errors",
    "DroppedTextError": "errors",
    "CheckpointCorruptError": "errors",
    "CheckpointError": "errors",
    "CheckpointExistsError": "errors",
    "CheckpointInUseError": "errors",
    "CheckpointFormatError": "errors",
    "CheckpointMismatchError": "errors",
    "CheckpointNotFoundError": "errors",
    "ExportExistsError": "errors",
    "FsdpSftError": "errors",
    "HostMemoryError": "errors",
    "CallMismatchError": "errors",
    "LostRankError": "errors",
    "MissingKeysError": "errors",
    "ModelLossError": "errors",
    "NoBlocksError": "errors",
    "NoPlanError": "errors",
    "NonFiniteGradientError": "errors",
    "NonFiniteWeightsError": "errors",
    "NotFusedError": "errors",
    "NotRecomputedError": "errors",
    "OptimizerError": "errors",
    "PackingError": "errors",
    "RemoteRankError": "errors",
    "SafetensorsError": "errors",
    "UnexpectedKeysError": "errors",
    "UnsupportedModelError": "errors",
    "UnfilledTensorsError": "errors",
    "WrappedModelError": "errors",
    "UnstorableStateError": "errors",
    "MediaError": "errors",
    "TooLongError": "errors",
    "VocabularyError": "errors",
    "ExpertLoad": "experts",
    "plot_expert_load": "experts",
    "prepare_experts": "experts",
    "update_router_bias": "experts",
    "watch_experts": "experts",
    "CheckpointInfo": "dcp_io",
    "DistributedContext": "distributed",
    "EncodedChat": "collate",
    "EncodedDataset": "encoded",
    "encode_dataset": "encoded",
    "FilterCounts": "collate",
    "EvalResult": "step",
    "IGNORE_INDEX": "collate",
    "LoadReport": "weights",
    "LoadedCheckpoint": "dcp_io",
    "LongestRow": "planner",
    "MemoryEstimate": "planner",
    "MetricLogger": "metrics",
    "MetricSink": "metrics",
    "MixedSampler": "mixing",
    "MixedStream": "mixing",
    "PackedCollator": "packing",
    "PackedSampler": "packing",
    "PackedStream": "packing",
    "PackingReport": "packing",
    "PreemptionGuard": "preemption",
    "ProgressBar": "metrics",
    "REQUEUE_EXIT_CODE": "preemption",
    "keep_workers_alive": "preemption",
    "ResumableSampler": "sampler",
    "RunPlan": "planner",
    "SFTCollator": "collate",
    "STALL_EXIT_CODE": "watchdog",
    "SavedCheckpoint": "dcp_io",
    "StepProfiler": "metrics",
    "StepResult": "step",
    "StochasticAdamW": "optimizer",
    "TensorBoardSink": "metrics",
    "ThroughputMeter": "metrics",
    "TrackioSink": "metrics",
    "WandbSink": "metrics",
    "Watchdog": "watchdog",
    "add_adapters": "adapters",
    "aggregate_metrics": "metrics",
    "apply_op_sac": "sac",
    "apply_sac": "sac",
    "attention_cost": "packing",
    "build_mesh": "distributed",
    "build_meta_model": "weights",
    "causal_lm_loss": "loss",
    "compile_blocks": "shard",
    "compile_with_memory_budget": "sac",
    "count_targets": "loss",
    "describe_sharding": "shares",
    "encode_chat": "collate",
    "estimate_memory": "planner",
    "evaluate": "step",
    "check_export": "export",
    "export_adapter": "export",
    "export_hf": "export",
    "filter_rows": "collate",
    "find_blocks": "blocks",
    "convert_checkpoint": "dcp_io",
    "find_checkpoints": "dcp_io",
    "gradient_sync": "step",
    "init_distributed": "distributed",
    "linear_cross_entropy_sum": "loss",
    "load_checkpoint": "dcp_io",
    "load_full_state_dict": "dcp_io",
    "load_optimizer_state": "dcp_io",
    "load_prepared": "prepared",
    "load_pretrained": "pretrained",
    "prepare_base": "prepared",
    "load_weights": "weights",
    "longest_rows": "planner",
    "loss_sum": "loss",
    "memory_stats": "metrics",
    "model_flops_per_token": "metrics",
    "pack_lengths": "packing",
    "peak_flops_per_second": "metrics",
    "plan_run": "planner",
    "plot_run": "metrics",
    "prepare_loss": "loss",
    "remove_sac": "sac",
    "render_labels": "collate",
    "render_labels_html": "collate",
    "reset_peak_memory": "metrics",
    "row_sizes": "packing",
    "save_checkpoint": "dcp_io",
    "save_full_state_dict": "dcp_io",
    "save_optimizer_state": "dcp_io",
    "scale_for_backward": "loss",
    "select_block_indices": "sac",
    "shard_model": "shard",
    "target_weight": "loss",
    "smallest_num_gpus": "planner",
    "trace_seconds": "metrics",
    "train_step": "step",
    "use_varlen_attention": "varlen",
    "verify_checkpoint": "dcp_io",
    "use_context_parallel": "context_parallel",
    "verify_packing": "packing",
    "windows": "step",
}

__all__ = sorted([*_OWNERS, "__version__"])


def __getattr__(name: str) -> Any:
    owner = _OWNERS.get(name)
    if owner is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{owner}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
