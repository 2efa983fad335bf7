"""The public names, by the module that owns them: for type checkers, and for ``__getattr__``."""

from fsdp_sft._model.adapters import add_adapters as add_adapters
from fsdp_sft._model.blocks import find_blocks as find_blocks, freeze_towers as freeze_towers
from fsdp_sft._ranks.init import (
    DistributedContext as DistributedContext,
    init_distributed as init_distributed,
)
from fsdp_sft._ranks.mesh import build_mesh as build_mesh
from fsdp_sft.attention.context_parallel import use_context_parallel as use_context_parallel
from fsdp_sft.attention.varlen import use_varlen_attention as use_varlen_attention
from fsdp_sft.collate.collator import SFTCollator as SFTCollator, filter_rows as filter_rows
from fsdp_sft.collate.encode import EncodedChat as EncodedChat, encode_chat as encode_chat
from fsdp_sft.collate.encoded import EncodedDataset as EncodedDataset, encode_dataset as encode_dataset
from fsdp_sft.collate.render import render_labels as render_labels, render_labels_html as render_labels_html
from fsdp_sft.dcp_io import (
    find_checkpoints as find_checkpoints,
    load_checkpoint as load_checkpoint,
    load_full_state_dict as load_full_state_dict,
    save_checkpoint as save_checkpoint,
    save_full_state_dict as save_full_state_dict,
    verify_checkpoint as verify_checkpoint,
)
from fsdp_sft.errors import (
    BatchError as BatchError,
    ChatTemplateError as ChatTemplateError,
    CheckpointCorruptError as CheckpointCorruptError,
    CheckpointError as CheckpointError,
    CheckpointExistsError as CheckpointExistsError,
    CheckpointFormatError as CheckpointFormatError,
    CheckpointInUseError as CheckpointInUseError,
    CheckpointMismatchError as CheckpointMismatchError,
    CheckpointNotFoundError as CheckpointNotFoundError,
    FsdpSftError as FsdpSftError,
    LostRankError as LostRankError,
    ModelLossError as ModelLossError,
    NonFiniteGradientError as NonFiniteGradientError,
    NoPlanError as NoPlanError,
    OptimizerError as OptimizerError,
    PackingError as PackingError,
    RemoteRankError as RemoteRankError,
    RowError as RowError,
    UnstorableStateError as UnstorableStateError,
    UnsupportedModelError as UnsupportedModelError,
)
from fsdp_sft.experts import (
    prepare_experts as prepare_experts,
    watch_experts as watch_experts,
)
from fsdp_sft.export.hf import (
    check_export as check_export,
    export_adapter as export_adapter,
    export_hf as export_hf,
    iter_hf_tensors as iter_hf_tensors,
)
from fsdp_sft.jobs.preemption import (
    REQUEUE_EXIT_CODE as REQUEUE_EXIT_CODE,
    PreemptionGuard as PreemptionGuard,
    keep_workers_alive as keep_workers_alive,
)
from fsdp_sft.jobs.watchdog import STALL_EXIT_CODE as STALL_EXIT_CODE, Watchdog as Watchdog
from fsdp_sft.loss import (
    causal_lm_loss as causal_lm_loss,
    count_targets as count_targets,
    linear_cross_entropy_sum as linear_cross_entropy_sum,
    loss_sum as loss_sum,
    prepare_loss as prepare_loss,
    scale_for_backward as scale_for_backward,
    token_losses as token_losses,
)
from fsdp_sft.metrics.log import MetricLogger as MetricLogger, aggregate_metrics as aggregate_metrics
from fsdp_sft.metrics.memory import memory_stats as memory_stats, reset_peak_memory as reset_peak_memory
from fsdp_sft.metrics.plot import plot_run as plot_run
from fsdp_sft.metrics.throughput import (
    ThroughputMeter as ThroughputMeter,
    model_flops_per_token as model_flops_per_token,
    peak_flops_per_second as peak_flops_per_second,
)
from fsdp_sft.optimizer.adamw import StochasticAdamW as StochasticAdamW
from fsdp_sft.planner import (
    Run as Run,
    RunPlan as RunPlan,
    estimate_memory as estimate_memory,
    plan_run as plan_run,
)
from fsdp_sft.sac import (
    apply_sac as apply_sac,
    remove_sac as remove_sac,
    select_block_indices as select_block_indices,
)
from fsdp_sft.sampling.bins import pack_lengths as pack_lengths
from fsdp_sft.sampling.collator import PackedCollator as PackedCollator, row_sizes as row_sizes
from fsdp_sft.sampling.packing import (
    PackedSampler as PackedSampler,
    PackedStream as PackedStream,
    attention_cost as attention_cost,
)
from fsdp_sft.sampling.sampler import Mixture as Mixture, ResumableSampler as ResumableSampler
from fsdp_sft.sampling.verify import verify_packing as verify_packing
from fsdp_sft.shard.apply import describe_sharding as describe_sharding, shard_model as shard_model
from fsdp_sft.shard.compile import compile_blocks as compile_blocks
from fsdp_sft.step import (
    StepResult as StepResult,
    evaluate as evaluate,
    gradient_sync as gradient_sync,
    train_step as train_step,
    windows as windows,
)
from fsdp_sft.targets import IGNORE_INDEX as IGNORE_INDEX
from fsdp_sft.weights import (
    build_meta_model as build_meta_model,
    load_weights as load_weights,
)
from fsdp_sft.weights.load import load_pretrained as load_pretrained

__version__: str
