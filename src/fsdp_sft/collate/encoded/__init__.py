"""A data set, tokenised once into files that every rank memory-maps.

- source.py reads rows, from memory, a Hugging Face data set or files.
- key.py says when two encodings are the same.
- store.py has the file format.
- build.py writes the files, with any number of processes, which run worker.py.
- dataset.py has the public function: which rank encodes, and which ranks wait.
"""

from fsdp_sft.collate.encoded.dataset import encode_dataset
from fsdp_sft.collate.encoded.store import EncodedDataset

__all__ = ["EncodedDataset", "encode_dataset"]
