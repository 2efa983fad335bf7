"""A data set tokenised once, into files that every rank maps into memory.

source.py reads rows from wherever they are, key.py says when two encodings are the same, store.py owns the
files, build.py fills them with any number of processes, which run worker.py, and dataset.py is what the user
gets.
"""

from fsdp_sft.encoded.dataset import encode_dataset
from fsdp_sft.encoded.store import EncodedDataset

__all__ = ["EncodedDataset", "encode_dataset"]
