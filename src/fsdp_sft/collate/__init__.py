"""Turn chat rows into input_ids and labels, pad them to batches, and show which tokens are trained.

Labels are aligned with input_ids, as in Hugging Face; the shift by one happens once, in the loss.
"""

from fsdp_sft.collate.collator import (
    FilterCounts as FilterCounts,
    SFTCollator as SFTCollator,
    filter_rows as filter_rows,
)
from fsdp_sft.collate.encode import EncodedChat as EncodedChat, encode_chat as encode_chat
from fsdp_sft.collate.render import render_labels as render_labels, render_labels_html as render_labels_html
