"""Mistakes in what is said of machines before a job."""

from tests.mistakes.mistake import Mistake

_PLANTED = ("tests/check/test_planted.py",)
MISTAKES = [
    Mistake(
        "a slow rank is not named",
        "check/machines.py",
        "        if rate < _RATE_WARNS * usual:\n",
        "        if False:\n",
        _PLANTED,
    ),
    Mistake(
        "links between nodes are not looked at",
        "check/machines.py",
        'kinds = {"": _rings(job.hosts), " to other nodes": _rings(places)}',
        'kinds = {"": _rings(job.hosts)}',
        _PLANTED,
    ),
    Mistake(
        "a folder may be missing on a rank",
        "check/machines.py",
        "    if any(told):\n",
        "    if False:\n",
        ("tests/check/test_command.py",),
    ),
    Mistake(
        "the panels of a picture have no room",
        "metrics/plot.py",
        "    if bad:  #",
        "    if True:  #",
        ("tests/metrics/test_metrics.py::TestPlotRun::test_four_panels_and_an_axis_beside_two",),
    ),
    Mistake(
        "a password in an address is shown",
        "check/__init__.py",
        "_BEFORE_HOST.sub(lambda found: f\"{found[1] or ''}***@\", value)",
        "value",
        ("tests/check/test_command.py",),
    ),
    Mistake(
        "any result of a reduction is right",
        "check/machines.py",
        "if not (part.cpu().double() - expected.view(ranks, each)[rank]).abs().max() <= most:",
        "if False:",
        _PLANTED,
    ),
    Mistake(
        "a rename need not be seen",
        "check/machines.py",
        "for rank in range(job.context.world_size)}, False",
        "for rank in range(job.context.world_size)}, True",
        _PLANTED,
    ),
    Mistake(
        "two layers may train otherwise than in one process",
        "check/parity.py",
        "            if not abs(mine[place] / wide[place] - 1) <= max(_TIMES * off, least[place]):\n",
        "            if False:\n",
        _PLANTED,
    ),
    Mistake(
        "the layers that are tried are the first two",
        "check/parity.py",
        "_FEWEST if len(first) == len(kinds) else max(_FEWEST, max(first) + 1)",
        "_FEWEST",
        ("tests/check/test_planted.py::test_a_layer_truncated_config",),
    ),
    Mistake(
        "rounding may be any in bfloat16",
        "check/parity.py",
        "<= max(_TIMES * off, least[place]):\n",
        "<= max(_TIMES, least[place]):\n",
        ("tests/check/test_planted.py::test_rounding_is_what_one_process_has",),
    ),
    Mistake(
        "routers are random where two trainings are compared",
        "check/parity.py",
        "layerdrop|jitter)",
        "layerdrop)",
        _PLANTED,
    ),
    Mistake(
        "what was seen before a rank died is not told",
        "check/command.py",
        "        suppress(_RankLostError),\n",
        "        suppress(ZeroDivisionError),\n",
        ("tests/check/test_command.py::test_a_rank_that_dies_is_in_the_table",),
    ),
    Mistake(
        "a process's own count of meetings tells them apart",
        "_ranks/init.py",
        'meeting = restart.add(f"meetings-of-{rank}", 1)',
        'meeting = _own_keys.__dict__["met"] = _own_keys.__dict__.get("met", 0) + 1',
        ("tests/ranks/test_distributed.py",),
    ),
    Mistake(
        "the value of a token is shown",
        "check/__init__.py",
        "if _SECRET.search(name):",
        "if False:",
        ("tests/check/test_command.py",),
    ),
    Mistake(
        "a rank that waits for a control message hangs as much as the one that it waits for",
        "jobs/watchdog.py",
        '"torch/distributed/fsdp/", "fsdp_sft/_ranks/", ',
        '"torch/distributed/fsdp/", ',
        ("tests/check/test_command.py::test_the_watchdog_names_a_rank_that_hangs_in_a_check",),
    ),
    Mistake(
        "a process that was stopped takes the others for silent",
        "jobs/watchdog.py",
        "            self._moved += late\n",
        "",
        ("tests/jobs/test_watchdog.py::test_a_process_that_was_stopped_blames_nobody",),
    ),
]
