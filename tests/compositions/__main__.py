"""Try what hypothesis draws: ``python -m tests.compositions --number 500 --seed 1``.

A fault is shrunk, printed and kept in ``.hypothesis``, from where it is tried first the next time. The exit
code is the number of workers that have found one.
"""

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from tests.compositions.axes import full, settled
from tests.compositions.drawing import search
from tests.compositions.judge import judge
from tests.harness.architectures import quiet, quiet_for_good


@quiet()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=100, help="of draws")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="draws at a time")
    parser.add_argument("--draw", help="one draw alone: its options that are not the plainest, as JSON")
    arguments = parser.parse_args()
    if arguments.draw:
        outcome = judge(settled(full(json.loads(arguments.draw))), arguments.seed)
        print(f"{arguments.draw}: {outcome.kind} {outcome.reason}")
        raise SystemExit(outcome.kind == "fault")
    # spawn: the workers start ranks of their own, from a fork server of their own
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=spawn, initializer=quiet_for_good) as pool:
        said = list(pool.map(search, [arguments] * arguments.workers, range(arguments.workers)))
    print("\n".join(said))
    raise SystemExit(sum("FAULT" in one for one in said))


if __name__ == "__main__":
    main()
