"""A rank that dies, hangs or falls out of step is named on every rank that lives, within the set time."""

import math
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from fsdp_sft._process.identity import ProcessId, this_process
from fsdp_sft._ranks.words import said_ranks
from fsdp_sft.jobs.watchdog.beat import ENDED, FAILED, Beat
from fsdp_sft.jobs.watchdog.judge import Finding, Judge
from fsdp_sft.jobs.watchdog.report import Report
from tests.harness import forks
from tests.harness.device import backend_here, become, device_here, for_ranks
from tests.harness.models import tiny_model
from tests.harness.once import once
from tests.simulated.device import Simulated

TIMEOUT, INTERVAL = 3.0, 0.2
LONG_TIMEOUT = 30.0  # where what happens must show long before it
HEARD = 1.5  # seconds after which the others have heard the last beat
SLACK = 10.0  # for a machine that other work keeps busy


# --- what the ranks do ------------------------------------------------------------------------------------


def _lockstep(watchdog: fs.Watchdog, steps: int, act: Callable[[int], None] = lambda step: None) -> None:
    for step in range(1, steps + 1):
        watchdog.step(step)
        act(step)
        _sum()
        time.sleep(0.01)


def _sum() -> None:
    """As in ``train_step``: a sum of counts on the host, then one on the device, which the host waits for."""
    dist.all_reduce(torch.ones(1))
    total = torch.ones(1, device=device_here())
    dist.all_reduce(total)
    total.item()


def _at(step: int, folder: Path, action: Callable[[], Any]) -> Callable[[int], None]:
    def act(now: int) -> None:
        if now == step:
            time.sleep(HEARD)
            (folder / "acted").write_text(str(time.time()))
            action()

    return act


def _signalled(number: int) -> Callable[[fs.Watchdog, Path, bool], None]:
    def scene(watchdog: fs.Watchdog, folder: Path, is_victim: bool) -> None:
        act = _at(3, folder, lambda: os.kill(os.getpid(), number))
        _lockstep(watchdog, 8, act if is_victim else lambda step: None)

    return scene


def _dies_apart(watchdog: fs.Watchdog, folder: Path, is_victim: bool) -> None:
    # The others wait where no broken connection wakes them, as under NCCL.
    watchdog.step(3)
    if is_victim:
        _at(3, folder, lambda: os.kill(os.getpid(), signal.SIGKILL))(3)
    time.sleep(60)


def _ahead(watchdog: fs.Watchdog, folder: Path, is_victim: bool) -> None:
    _lockstep(watchdog, 4)
    if is_victim:
        (folder / "acted").write_text(str(time.time()))
        _lockstep(watchdog, 0)
        watchdog.step(5)
        _sum()


def _slow_loader(watchdog: fs.Watchdog, folder: Path, is_victim: bool) -> None:
    act = _at(3, folder, lambda: time.sleep(60))
    with watchdog.phase("warm-up", timeout=30):
        _lockstep(watchdog, 2)
    _lockstep(watchdog, 8, act if is_victim else lambda step: None)


def _exchange(watchdog: fs.Watchdog, folder: Path, is_victim: bool) -> None:
    """Ranks that share rows: one does not come to the exchange around the second layer's attention."""
    ids = torch.arange(3, 19).view(1, 16)
    with watchdog.phase("warm-up", timeout=60):
        mesh = fs.build_mesh(cp=dist.get_world_size(), device_type=device_here().type)
        model = fs.shard_model(tiny_model("llama"), mesh=mesh).to(device_here()).train()
        fs.use_context_parallel(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step, act = 0, _at(3, folder, lambda: time.sleep(60))
        if is_victim:
            model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: act(step))
        for step in (1, 2):
            watchdog.step(step)
            fs.train_step(model, [{"input_ids": ids, "labels": ids}], optimizer)
    step = 3
    watchdog.step(step)
    fs.train_step(model, [{"input_ids": ids, "labels": ids}], optimizer)


def _raises(watchdog: fs.Watchdog, folder: Path, is_victim: bool) -> None:
    def fail() -> None:
        raise ValueError("the data ends here")

    _lockstep(watchdog, 8, _at(3, folder, fail) if is_victim else lambda step: None)


def _healthy(watchdog: fs.Watchdog, folder: Path, is_victim: bool) -> None:
    """A step of half the time-out, a long save and a long pause of one rank, and unequal ends."""
    _lockstep(watchdog, 6, lambda step: time.sleep(0.5 * TIMEOUT * (is_victim and step in (2, 3))))
    if is_victim:
        with watchdog.phase("save", timeout=30):
            time.sleep(1.2 * TIMEOUT)
    dist.barrier()
    if is_victim:
        with watchdog.pause():
            time.sleep(1.2 * TIMEOUT)
    dist.barrier()
    for step in range(7, 10 if is_victim else 7):
        watchdog.step(step)
        time.sleep(0.5 * TIMEOUT)


# name -> (function, ranks, victim, who hosts the store, what the report says of the victim)
SCENES: dict[str, tuple[Callable[[fs.Watchdog, Path, bool], None], int, int, str, str]] = {
    "stop-2": (_signalled(signal.SIGSTOP), 2, 1, "agent", r"is stopped .*in step 3, phase train"),
    "stop-3": (_signalled(signal.SIGSTOP), 3, 1, "agent", r"is stopped .*in step 3, phase train"),
    "stop-host": (_signalled(signal.SIGSTOP), 2, 0, "rank 0", r"is stopped .*in step 3, phase train"),
    "die-2": (_dies_apart, 2, 1, "agent", r"is dead.*in step 3, phase train"),
    "die-3": (_dies_apart, 3, 0, "agent", r"is dead.*in step 3, phase train"),
    "die-host": (_dies_apart, 2, 0, "rank 0", r"is dead.*in step 3, phase train"),
    "ahead-2": (_ahead, 2, 1, "agent", r"is 1 step ahead: in step 5, phase train, waiting in all_reduce"),
    "ahead-3": (_ahead, 3, 0, "rank 0", r"is 1 step ahead: in step 5, phase train, waiting in all_reduce"),
    "loader-3": (_slow_loader, 3, 2, "agent", r"hangs outside of a collective: in step 3, .*test_watch"),
    "exchange-2": (_exchange, 2, 1, "agent", r"hangs outside of a collective: in step 3, .*test_watch"),
    "kill-3": (_signalled(signal.SIGKILL), 3, 2, "agent", r"rank 2( on \S+)? died( in step 3, phase train)?"),
    "raise-3": (_raises, 3, 1, "agent", r"rank 1 on \S+ failed first, in step 3, .*the data ends here"),
    # Rank 5 watches the first four, itself and rank 0, and not rank 4.
    "kill-6": (_signalled(signal.SIGKILL), 6, 4, "agent", r"rank 4( on \S+)? died( in step 3, phase train)?"),
    "raise-6": (_raises, 6, 4, "agent", r"rank 4 on \S+ failed first, in step 3, .*the data ends here"),
    "healthy-3": (_healthy, 3, 1, "agent", ""),
}
SHOWS_AT_ONCE = {"die-2", "die-3"}
BY_EXCEPTION = {
    "kill-3",
    "raise-3",
    "kill-6",
    "raise-6",
}  # gloo wakes the others: they raise, and a note names the first


@dataclass
class Outcome:
    """What is left of one rank."""

    exit_code: int | None
    stderr: str
    seconds: float  # from the victim's act to the last line


def _run_rank(name: str, folder: Path, rank: int, port: int, own: Simulated | None) -> None:
    function, world_size, victim, host, _ = SCENES[name]
    become(own)
    descriptor = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    hosts = host == "rank 0" and rank == 0
    if host == "rank 0" and not hosts:
        while not (folder / "port").exists():
            time.sleep(0.01)
        port = int((folder / "port").read_text())
    place = 0 if hosts else port  # the given one is the agent's
    store = dist.TCPStore("127.0.0.1", place, is_master=hosts, timeout=timedelta(seconds=60))
    if hosts:
        (folder / "port.tmp").write_text(str(store.port))
        (folder / "port.tmp").rename(folder / "port")
    dist.init_process_group(backend_here(), store=store, rank=rank, world_size=world_size)
    timeout = LONG_TIMEOUT if name in SHOWS_AT_ONCE else TIMEOUT
    with fs.Watchdog(timeout=timeout, interval=INTERVAL) as watchdog:
        with watchdog.phase("start", timeout=30):  # until all have begun, on a machine that is busy
            dist.barrier()
            time.sleep(3 * INTERVAL)
        function(watchdog, folder, rank == victim)
    if hosts:
        time.sleep(1)  # gloo's own farewell goes through the store as well


def _start(name: str, folder: Path, port: int) -> list[Any]:
    folder.mkdir()
    devices = enumerate(for_ranks(SCENES[name][1]))
    processes = [forks.process(_run_rank, name, folder, rank, port, own) for rank, own in devices]
    for process in processes:
        process.start()
    return processes


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Outcome]]:
    """Of the scenes that are asked for."""
    users = [item for item in request.session.items if "outcomes" in getattr(item, "fixturenames", ())]
    wanted = {item.callspec.params["name"] for item in users}  # type: ignore[attr-defined]
    names = [name for name in sorted(SCENES, key="healthy-3".__ne__) if name in wanted]
    return once(tmp_path_factory, "watchdog", lambda: _play(names))


def _play(names: Sequence[str]) -> dict[str, list[Outcome]]:
    """A few scenes at a time, for they mostly wait."""
    results: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="watchdog-") as place:
        stores = {name: dist.TCPStore("127.0.0.1", 0, is_master=True) for name in names}
        started: dict[str, list[Any]] = {}
        for batch in (names[:8], names[8:]):
            started |= {n: _start(n, Path(place) / n, stores[n].port) for n in batch if n not in started}
            for name in batch:
                results[name] = _outcomes(name, Path(place) / name, started[name])
    return results


def _outcomes(name: str, folder: Path, processes: list[Any]) -> list[Outcome]:
    deadline = time.monotonic() + 60
    stopped = SCENES[name][2] if name.startswith("stop") else None
    for rank, process in enumerate(processes):
        if rank != stopped:
            process.join(max(deadline - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    acted = float((folder / "acted").read_text()) if (folder / "acted").exists() else math.nan
    files = [folder / f"stderr-{rank}" for rank in range(len(processes))]
    return [
        Outcome(code, file.read_text(), file.stat().st_mtime - acted)
        for code, file in zip(codes, files, strict=True)
    ]


@pytest.mark.parametrize("name", [name for name in SCENES if name not in BY_EXCEPTION | {"healthy-3"}])
def test_the_rank_is_named_on_all_that_live_within_the_set_time(
    name: str, outcomes: dict[str, list[Outcome]]
) -> None:
    _, world_size, victim, host, says = SCENES[name]
    is_gone = name.startswith(("stop", "die"))
    for rank, outcome in enumerate(outcomes[name]):
        if rank == victim and is_gone:
            assert outcome.exit_code == (-signal.SIGKILL if name.startswith("die") else None)
            continue
        assert outcome.exit_code == fs.STALL_EXIT_CODE == 86, outcome.stderr
        assert re.search(rf"rank {victim} \(host \S+, process \d+\) {says}", outcome.stderr), outcome.stderr
        assert f"[watchdog, rank {rank} of {world_size} on " in outcome.stderr
        assert "test_watch.py" in outcome.stderr.partition("was here:")[2], "its own stack"
        assert outcome.seconds <= (0 if name in SHOWS_AT_ONCE else TIMEOUT) + 4 * INTERVAL + SLACK, (
            outcome.stderr
        )
        if name == "exchange-2" and rank != victim:
            assert re.search("rank 0 in step 3, phase train, waiting in to_heads", outcome.stderr), (
                outcome.stderr
            )
        if host == "rank 0" and is_gone:
            assert re.search(r"the store at 127.0.0.1:\d+, .* has not answered for", outcome.stderr)


@pytest.mark.parametrize("name", sorted(BY_EXCEPTION))
def test_an_exception_says_who_was_first(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    _, _, victim, _, says = SCENES[name]
    for rank, outcome in enumerate(outcomes[name]):
        if rank != victim:
            # Where gloo takes its time the watchdog, which sees the same, is first.
            code, told = outcome.exit_code, "watchdog: "
            expected = says
            if code == fs.STALL_EXIT_CODE:
                told = rf"\[watchdog, rank {rank} of {SCENES[name][1]} on \S+\] "
                expected = says if name.startswith("kill") else f"rank {victim} failed, and no progress"
            else:
                assert code == 1, outcome.stderr
            assert re.search(f"{told}{expected}", outcome.stderr), outcome.stderr
            assert "KeyError" not in outcome.stderr
            assert outcome.seconds <= TIMEOUT + SLACK, outcome.stderr
    if name.startswith("raise"):
        assert "watchdog:" not in outcomes[name][victim].stderr, "the first has nothing to add"


@pytest.mark.parametrize("name", ["healthy-3"])
def test_a_healthy_run_raises_no_alarm(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    assert [outcome.exit_code for outcome in outcomes[name]] == [0, 0, 0]
    assert not any("watchdog" in outcome.stderr for outcome in outcomes[name])


class _SlowExchange:
    """An exchange whose store answers with the second question, asked after the other processes ended."""

    def __init__(self, stale: dict[int, Beat], fresh: dict[int, Beat], first: Beat) -> None:
        self.beats, self._fresh, self._first = stale, fresh, first
        self.first_failed: Beat | None = None
        self.answered, self.failed_for, self.error = -math.inf, 0.0, ""
        self.asked = 0

    def fail(self, seconds: float) -> None:
        self.asked += 1  # and not answered

    def refresh(self, seconds: float) -> None:
        self.asked += 1
        self.beats, self.first_failed, self.failed_for = self._fresh, self._first, 1.0
        self.answered = time.monotonic()


@pytest.mark.parametrize("killed", [False, True])
def test_who_failed_and_ended_has_not_died(killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may be slow: a rank learns that processes are gone before it learns why."""
    here = this_process()
    monkeypatch.setattr(
        "fsdp_sft.jobs.watchdog.watch.process_state", lambda process: "" if process == here else "dead"
    )
    stale = _beats({}, {"step": 3}, {"step": 3}, {"step": 3, "saw": ((1, "dead"), (2, "dead"))})
    ended = {"state": FAILED, "error": "KeyError: 'the data'", "step": 3}
    fresh = {0: stale[0], **{rank: replace(stale[rank], **ended) for rank in (1, 2, 3)}}
    if killed:  # and the others have failed because of that
        fresh[2] = stale[2]
    watchdog = fs.Watchdog(timeout=3.0, interval=0.2)
    watchdog._judge = _judge(4)
    watchdog._exchange = exchange = _SlowExchange(stale, fresh, fresh[1])  # type: ignore[assignment]
    if killed:  # known long before the store says what became of rank 2
        exchange.first_failed, exchange.failed_for = fresh[1], 1.0
    error = RuntimeError("Connection closed by peer")
    watchdog._explain(error)
    assert exchange.asked == 2
    died, failed = (
        "rank 2 on n2 died in step 3",
        "rank 1 on n1 failed first, in step 3, phase train: KeyError",
    )
    assert len(error.__notes__) == 1
    assert error.__notes__[0].startswith(f"watchdog: {died if killed else failed}")


# --- the judgement, on a clock of its own -----------------------------------------------------------------


def _beats(*ranks: dict[str, Any], limit: float = 10.0) -> dict[int, Beat]:
    made = [
        Beat(rank=i, host=f"n{i}", process=ProcessId(i + 1, "", ""), limit=limit) for i in range(len(ranks))
    ]
    return {i: replace(beat, **ranks[i]) for i, beat in enumerate(made)}


def _judge(num_ranks: int, *, rank: int = 0, thorough: bool = True) -> Judge:
    return Judge(rank, range(num_ranks), thorough=thorough, timeout=10.0, now=0.0)


def _look(judge: Judge, beats: dict[int, Beat], now: float, **states: str) -> Finding | None:
    dead = {int(name.removeprefix("r")): state for name, state in states.items()}
    return judge.look(beats, now=now, answered=now, states=dead)


def test_a_look_takes_as_long_as_there_are_ranks() -> None:
    """And not the square of it: 10,000 ranks are looked at every second."""

    def seconds(num_ranks: int) -> float:
        judge, beats = _judge(num_ranks), _beats(*({"number": 1} for _ in range(num_ranks)))
        times = []
        for now in (1.0, 2.0, 3.0):
            started = time.thread_time()
            assert _look(judge, beats, now) is None
            times.append(time.thread_time() - started)
        return min(times)

    assert seconds(16_000) < 30 * seconds(2_000)  # 8 times the ranks; their squares are 64 times as many


@pytest.mark.parametrize("state", [FAILED, ENDED])
def test_who_is_not_watched_any_more_judges_itself(state: str) -> None:
    """All that watch all others have left, and rank 5 waits for them where no exception reaches it."""
    judge = Judge(5, range(6), thorough=False, timeout=10.0, now=0.0, lookouts=range(4))
    gone = [{"number": 1, "state": state}] * 4
    for now in (0.0, 9.0, 11.0, 19.0):
        assert _look(judge, _beats(*gone, {"number": now}, {"number": now, "progress": 0}), now) is None, now
        if now == 9.0:  # they still say something: they look at the others while they wait to leave
            gone = [{**beat, "number": 2} for beat in gone]
    finding = _look(judge, _beats(*gone, {"number": 30}, {"number": 30, "progress": 0}), 30.0)
    assert finding is not None
    assert (finding.kind, finding.ranks) == ("overdue", (5,))
    watching = [{**beat, "number": 3} for beat in gone[:1]] + gone[1:]
    assert _look(judge, _beats(*watching, {"number": 31}, {"number": 31, "progress": 0}), 31.0) is None


def test_silence_hanging_and_absence_are_told_apart() -> None:
    judge = _judge(3)
    for now in (0.0, 5.0, 11.0):
        finding = _look(judge, _beats({"number": now}, {"number": now}, {"number": 0, "progress": 1}), now)
    assert finding == Finding("silent", (2,))
    judge = _judge(2)
    for now in (0.0, 5.0, 11.0):
        finding = _look(judge, _beats({"number": now, "progress": now}, {"number": now}), now)
    assert finding == Finding("overdue", (1,))
    judge = _judge(2)
    assert _look(judge, _beats({}), 9.0) is None
    assert _look(judge, _beats({}), 11.0) == Finding("absent", (1,))


def test_a_longer_limit_of_one_rank_holds_for_those_that_wait_for_it() -> None:
    judge = _judge(2)
    saving = {"phase": "save", "limit": 100.0, "progress": 1}
    for now in range(0, 60, 2):
        assert _look(judge, _beats({"number": now}, {"number": now, **saving}), float(now)) is None
    for now in range(60, 70, 2):  # the limit of the one that waits counts from the end of the save
        assert _look(judge, _beats({"number": now}, {"number": now, "progress": 2}), float(now)) is None
    late = _beats({"number": 70}, {"number": 70, "progress": 2})
    assert _look(judge, late, 70.0) == Finding("overdue", (0,))
    assert _look(judge, late, 71.0) == Finding("overdue", (0, 1))
    judge = _judge(2)
    for now in range(0, 102, 2):  # and the longer limit itself ends as well
        finding = _look(judge, _beats({"number": now, **saving}, {"number": now, **saving}), float(now))
    assert _look(judge, _beats({"number": 101, **saving}, {"number": 101, **saving}), 101.0) is not None
    assert finding is None


def test_a_dead_process_counts_once_the_store_knows_no_better() -> None:
    judge = _judge(2)
    beats = _beats({}, {})
    assert _look(judge, beats, 1.0, r1="dead") is None  # its last beat may be on its way
    assert _look(judge, _beats({}, {"state": ENDED, "number": 1}), 1.2) is None
    judge = _judge(2)
    assert _look(judge, beats, 1.0, r1="dead") is None
    assert judge.look(beats, now=1.2, answered=0.9, states={1: "dead"}) is None
    assert judge.look(beats, now=1.4, answered=1.1, states={1: "dead"}) == Finding("dead", (1,))


def test_without_a_store_each_rank_judges_itself_only() -> None:
    judge = _judge(2)
    moving = [_beats({"progress": now}, {}) for now in range(0, 40, 5)]
    for i, beats in enumerate(moving):
        assert judge.look(beats, now=5.0 * i, answered=0.0, states={1: "dead"}) is None
    assert judge.look(moving[-1], now=46.0, answered=0.0, states={}) == Finding("overdue", (0,))
    far = _judge(4, rank=3, thorough=False)  # of a large job: not a lookout
    for now in (0.0, 8.0, 16.0):
        beats = _beats(*[{"number": now}] * 4)
        assert far.look(beats, now=now, answered=now, states={}) is None, (
            "waiting is for the lookouts to judge"
        )
    assert far.look(beats, now=27.0, answered=16.0, states={}) == Finding("overdue", (3,))


def test_a_process_that_was_stopped_itself_blames_nobody() -> None:
    judge = _judge(2)
    _look(judge, _beats({}, {}), 1.0)
    judge.shift(100.0)
    assert _look(judge, _beats({}, {}), 101.0) is None


def test_a_report_stays_short_for_a_thousand_ranks() -> None:
    judge = _judge(1000)
    odd = {"number": 0, "step": 6}
    rows = [
        odd if r in range(100, 140) else {"number": 1, "step": 7, "where": "a.py:3 in f"} for r in range(1000)
    ]
    old = _beats(*[{"number": 0, "step": 6}] * 1000)
    _look(judge, old, 0.0)
    beats = _beats(*rows)
    finding = _look(judge, beats, 11.0)
    assert finding == Finding("silent", tuple(range(100, 140)))
    text = Report(beats, judge.stamps, {}, now=11.0, timeout=10.0).text(finding)
    assert len(text.splitlines()) < 25
    assert "rank 100 (host n100, process 101) has been silent for 11 s" in text
    assert "ranks 0-99, 140-999 in step 7, phase train, at a.py:3 in f" in text


def test_words_for_what_ranks_do() -> None:
    rows: list[dict[str, Any]] = [{"step": 5, "number": 1, "collective": "all_reduce"} for _ in range(6)]
    rows[1] |= {"step": 7}
    rows[2] |= {"step": 4}
    rows[3] |= {"state": FAILED, "error": "OSError: disk full"}
    judge, beats = _judge(7), _beats(*rows)
    _look(judge, beats, 0.0)
    text = Report(beats, judge.stamps, {}, now=11.0, timeout=20.0).text(Finding("overdue", (0,)))
    for words in (
        "no progress for 10 s on rank 0",
        "rank 1 (host n1, process 2) is 2 steps ahead: in step 7",
        "rank 2 (host n2, process 3) is 1 step behind: in step 4",
        "rank 3 (host n3, process 4) failed with OSError: disk full: after step 5",
        "rank 6 has not entered its watchdog",
        "ranks 0, 4-5 in step 5, phase train, waiting in all_reduce",
    ):
        assert words in text, text
    assert said_ranks([7, 0, 1, 2, 5, 8]) == "ranks 0-2, 5, 7-8"


def test_a_beat_survives_the_store() -> None:
    beat = Beat(3, "n0", this_process(), limit=math.inf, saw=((2, "dead"),), step=None)
    assert Beat.from_bytes(beat.to_bytes()) == beat
    assert len(beat.to_bytes()) < 500


# --- one process ------------------------------------------------------------------------------------------


def _alone(hang: bool, path: str) -> None:
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
    with fs.Watchdog(timeout=1.0) as watchdog:
        for step in range(4):
            watchdog.step(step)
            time.sleep(0.4)
        with watchdog.phase("eval", timeout=10):
            time.sleep(1.5)
        watchdog.step(9)
        time.sleep(30 if hang else 0)


def test_a_single_process_watches_itself(tmp_path: Path) -> None:
    files = [tmp_path / "healthy", tmp_path / "hangs"]
    processes = [forks.process(_alone, i == 1, str(files[i])) for i in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, fs.STALL_EXIT_CODE]
    assert files[0].read_text() == ""
    report = files[1].read_text()
    assert "no progress for 1 s on rank 0" in report
    assert re.search(r"rank 0 in step 9, phase train, at test_watch.py:\d+ in _alone", report)


def test_wrong_uses_are_named() -> None:
    for seconds in (0, -1.0, math.inf, math.nan, True, "60"):
        with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
            fs.Watchdog(timeout=seconds)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than a third of timeout=3"):
        fs.Watchdog(timeout=3, interval=2)
    with fs.Watchdog(timeout=60) as watchdog:
        with pytest.raises(RuntimeError, match="entered before"):
            watchdog.__enter__()
        with pytest.raises(TypeError, match="step must be an int, got float"):
            watchdog.step(1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timeout must be"), watchdog.phase("save", timeout=0):
            pass
    with pytest.raises(RuntimeError, match="entered before"):
        watchdog.__enter__()
    assert not any(thread.name.startswith("watchdog") and thread.is_alive() for thread in _settled())


def _settled() -> list[threading.Thread]:
    time.sleep(0.1)
    return threading.enumerate()
