"""A process that encodes rows: ``python -m fsdp_sft.collate.encoded.worker JOB``.

It prints the size of each encoded block on a line.
"""

import pickle
import sys
from pathlib import Path

from fsdp_sft.collate.encoded.build import encode_pieces


def main() -> None:
    """Encode the rows of the job's file, and write the result beside the folder."""
    job = Path(sys.argv[1])
    pieces, work, folder = pickle.loads(job.read_bytes())  # written by the process that started this one
    result = encode_pieces(pieces, work, folder, lambda size: print(size, flush=True))
    folder.with_suffix(".result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
