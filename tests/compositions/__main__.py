"""Try what hypothesis draws: ``python -m tests.compositions --number 500 --seed 1``, or with ``--programs``.

A fault is shrunk, printed and kept in ``.hypothesis``, from where it is tried first the next time. The exit
code is the number of workers that have found one.
"""

import argparse
import json
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings

from tests.compositions.axes import differences, full, settled
from tests.compositions.drawing import compositions
from tests.compositions.judge import judge
from tests.harness.architectures import quiet, quiet_for_good
from tests.programs.judge import judge as judge_program
from tests.programs.writing import programs


def search(arguments: argparse.Namespace, worker: int) -> str:
    """One worker's share of the draws: how they ended, or the fault."""
    ends: Counter[str] = Counter()
    strategy = programs() if arguments.programs else compositions(json.loads(arguments.where))

    @hypothesis.seed(arguments.seed * arguments.workers + worker)
    @settings(
        max_examples=-(-arguments.number // arguments.workers),
        deadline=None,
        phases=set(Phase) - ({Phase.shrink, Phase.reuse} if arguments.no_shrink else {Phase.explain}),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @hypothesis.given(strategy)
    def trial(drawn: Any) -> None:
        outcome = judge_program(drawn) if arguments.programs else judge(drawn, arguments.seed)
        ends[f"{outcome.kind} {outcome.reason}".strip() if outcome.kind == "refused" else outcome.kind] += 1
        what = drawn if arguments.programs else json.dumps(differences(drawn))
        assert outcome.kind != "fault", f"FAULT {what}\n{outcome.reason}"

    try:
        trial()
    except AssertionError as fault:
        return f"{fault}\nfound in {ends.total()} draws"
    return "\n".join(f"{count:6} {end}" for end, count in ends.most_common())


@quiet()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=100, help="of draws")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="draws at a time")
    parser.add_argument("--programs", action="store_true", help="steps in random order, and not options")
    parser.add_argument("--no-shrink", action="store_true", help="leave faults as they were drawn")
    parser.add_argument("--where", default="{}", help="only draws with these options, as JSON")
    parser.add_argument("--draw", help="one draw alone: its options that are not the plainest, as JSON")
    arguments = parser.parse_args()
    if arguments.draw:
        outcome = judge(settled(full(json.loads(arguments.draw))), arguments.seed)
        print(f"{arguments.draw}: {outcome.kind} {outcome.reason}")
        raise SystemExit(outcome.kind == "fault")
    full(json.loads(arguments.where))
    # spawn: the workers start ranks of their own, from a fork server of their own
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=spawn, initializer=quiet_for_good) as pool:
        said = list(pool.map(search, [arguments] * arguments.workers, range(arguments.workers)))
    print("\n".join(said))
    raise SystemExit(sum("FAULT" in one for one in said))


if __name__ == "__main__":
    main()
