"""A process that encodes rows: ``python -m fsdp_sft.encoded.worker JOB``; it prints what it has done."""

import pickle
import sys
from pathlib import Path

from fsdp_sft.encoded.build import encode_pieces


def main() -> None:
    """Do what the file of the job says, and leave the result beside it."""
    job = Path(sys.argv[1])
    pieces, work, folder = pickle.loads(job.read_bytes())  # written by the process that started this one
    result = encode_pieces(pieces, work, folder, lambda size: print(size, flush=True))
    folder.with_suffix(".result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
