"""Saving and loading: full state dicts, crash-safe checkpoints.

A checkpoint is a folder of safetensors and JSON files with a manifest (see ``manifest``), and loading one
cannot run code. torch's distributed checkpoint (DCP) reads the steps that are written here. All functions
that take a model ``reshard`` it first.
"""

from fsdp_sft.dcp_io.checkpoint import LoadedCheckpoint, SavedCheckpoint, load_checkpoint, save_checkpoint
from fsdp_sft.dcp_io.full_state import load_full_state_dict, save_full_state_dict
from fsdp_sft.dcp_io.retention import CheckpointInfo, find_checkpoints, verify_checkpoint

__all__ = [
    "CheckpointInfo",
    "LoadedCheckpoint",
    "SavedCheckpoint",
    "find_checkpoints",
    "load_checkpoint",
    "load_full_state_dict",
    "save_checkpoint",
    "save_full_state_dict",
    "verify_checkpoint",
]
