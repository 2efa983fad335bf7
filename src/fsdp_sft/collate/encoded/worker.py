"""A process that encodes rows: ``python -P -m fsdp_sft.collate.encoded.worker``.

The job comes through its standard input, and through its standard output go the size of each encoded block,
a line each, an empty line, and the result. What others print goes to its standard error.
"""

import os
import pickle
import sys

from fsdp_sft.collate.encoded.build import encode_share


def main() -> None:
    """Encode the rows of the job."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answer:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        share, work, folder = pickle.load(sys.stdin.buffer)  # from the process that started this one

        def tick(size: int) -> None:
            answer.write(b"%d\n" % size)
            answer.flush()

        result = encode_share(share, work, folder, tick)
        answer.write(b"\n" + pickle.dumps(result))


if __name__ == "__main__":
    main()
