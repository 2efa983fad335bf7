"""Turn chat rows into input_ids and labels, pad them to batches, and show which tokens are trained.

Labels are aligned with input_ids, as in Hugging Face; the shift by one happens once, in the loss.
"""

from fsdp_sft.collate.collator import REFUSALS, FilterCounts, SFTCollator, filter_rows
from fsdp_sft.collate.encode import EncodedChat, encode_chat
from fsdp_sft.collate.notes import NOTES
from fsdp_sft.collate.packs import filler_of, pack_size, refuse_masked_pack
from fsdp_sft.collate.render import render_labels, render_labels_html
from fsdp_sft.errors import ChatTemplateError
from fsdp_sft.targets import IGNORE_INDEX

__all__ = [
    "IGNORE_INDEX",
    "NOTES",
    "REFUSALS",
    "ChatTemplateError",
    "EncodedChat",
    "FilterCounts",
    "SFTCollator",
    "encode_chat",
    "filler_of",
    "filter_rows",
    "pack_size",
    "refuse_masked_pack",
    "render_labels",
    "render_labels_html",
]
