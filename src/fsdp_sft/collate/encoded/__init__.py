"""A data set tokenised once, into files that every rank maps into memory.

- source.py reads rows, from memory, a Hugging Face data set or files.
- key.py decides when two encodings are the same.
- store.py owns the format of the files.
- build.py fills them with any number of processes, which run worker.py.
- dataset.py has the public function: which rank encodes, and which ranks wait.
"""

from fsdp_sft.collate.encoded.dataset import encode_dataset
from fsdp_sft.collate.encoded.store import EncodedDataset

__all__ = ["EncodedDataset", "encode_dataset"]
