"""Try compositions: ``python -m tests.compositions --number 500 --seed 1``; it goes on from its log.

The exit code is the number of faults, at most 100.
"""

import argparse
import itertools
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.compositions.axes import Draw, differences, full, settled
from tests.compositions.drawing import draws
from tests.compositions.judge import Outcome, judge
from tests.compositions.log import Log, table, tried
from tests.compositions.shrinking import shrink
from tests.harness.architectures import quiet, quiet_for_good


@quiet()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=100, help="of draws")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="to write, and to go on from; by default of the seed")
    parser.add_argument("--workers", type=int, default=2, help="draws at a time")
    parser.add_argument("--until-fault", action="store_true", help="end at the first fault")
    parser.add_argument("--no-shrink", action="store_true", help="leave faults as they were drawn")
    parser.add_argument("--where", default="{}", help="of the draws only those with these options, as JSON")
    parser.add_argument("--draw", help="one draw alone: its options that are not the plainest, as JSON")
    arguments = parser.parse_args()
    if arguments.draw:
        raise SystemExit(_one(settled(full(json.loads(arguments.draw))), arguments.seed))
    log = Log(arguments.log or Path(f".compositions/{arguments.seed}.jsonl"), arguments.seed)
    numbered = enumerate(itertools.islice(draws(arguments.seed), arguments.number))
    done = {entry.number for entry in log.entries}
    where = full(json.loads(arguments.where)).items() & json.loads(arguments.where).items()
    wanted = [(number, draw) for number, draw in numbered if number not in done and where <= draw.items()]
    tasks = [(number, draw, arguments.seed) for number, draw in wanted]
    # spawn: the workers start ranks of their own, from a fork server of their own
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=spawn, initializer=quiet_for_good) as pool:
        for future in as_completed([pool.submit(tried, task) for task in tasks]):
            entry = future.result()
            log.add(entry)
            if entry.outcome.kind == "fault":
                print(f"{entry.number}: FAULT {json.dumps(differences(entry.draw))}", flush=True)
                print(f"  {entry.outcome.reason}", flush=True)
                if arguments.until_fault:
                    pool.shutdown(wait=False, cancel_futures=True)
                    break
    faults = [entry for entry in log.entries if entry.outcome.kind == "fault"]
    for entry in [] if arguments.no_shrink else faults[:5]:
        smallest, outcome = shrink(entry.draw, lambda draw: judge(draw, arguments.seed))
        print(
            f"{entry.number}, smallest: {json.dumps(differences(smallest))}\n  {outcome.reason}", flush=True
        )
    print(table(log.entries))
    raise SystemExit(min(len(faults), 100))


def _one(draw: Draw, seed: int) -> int:
    outcome: Outcome = judge(draw, seed)
    print(f"{json.dumps(differences(draw))}: {outcome.kind} {outcome.reason}")
    return int(outcome.kind == "fault")


if __name__ == "__main__":
    main()
