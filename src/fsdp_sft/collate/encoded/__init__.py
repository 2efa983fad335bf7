"""A data set, tokenised once into files that every rank memory-maps.

- source.py reads rows, from memory, a Hugging Face data set or files.
- store.py has the file format.
- build.py writes the files, with any number of processes.
- dataset.py has the public function: when two encodings are the same, which rank encodes, and which wait.
"""

from fsdp_sft.collate.encoded.dataset import encode_dataset
from fsdp_sft.collate.encoded.store import EncodedDataset

__all__ = ["EncodedDataset", "encode_dataset"]
