"""Mistakes in what is said of machines before a job, and in plans from it."""

from benchmarks.checks.mistakes.mistake import Mistake

_PLANTED = ("tests/check/test_planted.py",)
MISTAKES = [
    Mistake(
        "a slow rank is not named",
        "check/pace.py",
        "if share < fails]",
        "if False]",
        _PLANTED,
    ),
    Mistake(
        "links between nodes are not looked at",
        "check/checks/network.py",
        'kinds = {"": of_host.values(), " to other nodes": of_place.values()}',
        'kinds = {"": of_host.values()}',
        _PLANTED,
    ),
    Mistake(
        "a check begins after the seconds have passed",
        "check/sequence.py",
        "has_time = share(start < until)",
        "has_time = True",
        ("tests/check/test_command.py",),
    ),
    Mistake(
        "hosts need not reach each other",
        "_ranks/reach.py",
        "    if not problem:\n        return\n",
        "    return\n",
        ("tests/ranks/test_reach.py",),
    ),
    Mistake(
        "whatever answers at a rank's address is taken for it",
        "_ranks/reach.py",
        'problem = "" if answer == offer.token else "something else answers there"',
        'problem = ""',
        ("tests/ranks/test_reach.py",),
    ),
    Mistake(
        "any result of a reduction is right",
        "check/checks/reductions.py",
        "        return bool(torch.equal(wide, total))\n",
        "        return True\n",
        _PLANTED,
    ),
    Mistake(
        "a rename need not be seen",
        "check/checks/folder.py",
        "unseen = {rank for rank in ranks if",
        "unseen = {rank for rank in () if",
        _PLANTED,
    ),
    Mistake(
        "two layers may train otherwise than in one process",
        "check/checks/parity.py",
        "            if not abs(one - other) <= at_most * abs(other):\n",
        "            if False:\n",
        _PLANTED,
    ),
    Mistake(
        "the value of a token is shown",
        "check/environment.py",
        "if _SECRET.search(name):",
        "if False:",
        ("tests/check/test_command.py",),
    ),
    Mistake(
        "a rank that waits for a control message hangs as much as the one that it waits for",
        "jobs/watchdog/beat.py",
        "    if frame is not None and frame.f_code.co_filename == _TREE:\n",
        "    if False:\n",
        ("tests/check/test_lost.py",),
    ),
    Mistake(
        "a plan does not use what was measured",
        "planner/search.py",
        "first if known is None else known.applied(first)",
        "first",
        ("tests/planner/test_measured.py",),
    ),
]
