"""Try programs: ``python -m tests.programs --number 300 --seed 1``; it goes on from its log.

The exit code is the number of faults, at most 100.
"""

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.harness.architectures import quiet, quiet_for_good
from tests.programs.judge import judge
from tests.programs.log import table, tried
from tests.programs.writing import drawn


@quiet()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=100, help="of programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--log", type=Path, help="to write, and to go on from; by default of the seed")
    parser.add_argument("--workers", type=int, default=2, help="programs at a time")
    parser.add_argument("--until-fault", action="store_true", help="end at the first fault")
    parser.add_argument("--only", type=int, help="one program alone: its seed")
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(drawn(arguments.only))
        outcome = judge(drawn(arguments.only))
        print(outcome.kind, outcome.reason)
        raise SystemExit(outcome.kind == "fault")
    path = arguments.log or Path(f".programs/{arguments.seed}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {entry["seed"] for entry in entries}
    seeds = [s for s in range(arguments.seed, arguments.seed + arguments.number) if s not in done]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=spawn, initializer=quiet_for_good) as pool:
        for future in as_completed([pool.submit(tried, seed) for seed in seeds]):
            entry = future.result()
            entries.append(entry)
            with path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            if entry["kind"] == "fault":
                print(f"{entry['seed']}: FAULT {entry['reason']}", flush=True)
                if arguments.until_fault:
                    pool.shutdown(wait=False, cancel_futures=True)
                    break
    print(table(entries))
    raise SystemExit(min(sum(entry["kind"] == "fault" for entry in entries), 100))


if __name__ == "__main__":
    main()
