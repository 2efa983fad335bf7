"""Chat rows to input_ids and labels: what is trained, padding, truncation, and a way to look at it.

Labels are aligned with input_ids, as in Hugging Face; the shift by one happens once, in the loss.
"""

from fsdp_sft.collate.collator import SFTCollator, filter_rows
from fsdp_sft.collate.encode import IGNORE_INDEX, EncodedChat, encode_chat
from fsdp_sft.collate.render import render_labels, render_labels_html
from fsdp_sft.errors import ChatTemplateError

__all__ = [
    "IGNORE_INDEX",
    "ChatTemplateError",
    "EncodedChat",
    "SFTCollator",
    "encode_chat",
    "filter_rows",
    "render_labels",
    "render_labels_html",
]
