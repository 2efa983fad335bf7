"""A rank that dies, hangs or falls out of step is named on every rank that lives, within the set time."""

import itertools
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from tests.harness import forks
from tests.harness.device import backend_here, become, device_here, for_ranks
from tests.harness.models import tiny_model
from tests.simulated.device import Simulated

TIMEOUT = 4.0
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


def _acted(folder: Path) -> None:
    (folder / "acted").write_text(str(time.time()))


def _act(folder: Path, action: Callable[[], Any], step: int = 3) -> None:
    """What the victim does in step 3."""
    if step == 3:
        time.sleep(HEARD)
        _acted(folder)
        action()


def _signalled(number: int, watchdog: fs.Watchdog, folder: Path, is_victim: bool) -> None:
    act = partial(_act, folder, partial(signal.raise_signal, number))
    _lockstep(watchdog, 8, act if is_victim else lambda step: None)


def _apart(action: Callable[[], Any], watchdog: fs.Watchdog, folder: Path, is_victim: bool) -> None:
    """The others wait where no broken connection wakes them, as under NCCL."""
    watchdog.step(3)
    if is_victim:
        _act(folder, action)
    time.sleep(60)


def _raises() -> None:
    raise ValueError("the data ends here")


def _lockstep_for_ever(watchdog: fs.Watchdog, folder: Path, is_victim: bool) -> None:
    _lockstep(watchdog, 1_000_000)


def _ahead(watchdog: fs.Watchdog, folder: Path, is_victim: bool) -> None:
    """One rank is alone in a collective, and the others are elsewhere."""
    _lockstep(watchdog, 4)
    if is_victim:
        _acted(folder)
        watchdog.step(5)
        _sum()
    time.sleep(60)


def _exchange(watchdog: fs.Watchdog, folder: Path, is_victim: bool) -> None:
    """Ranks that share rows: one does not come to the exchange around the second layer's attention."""
    ids = torch.arange(3, 19).view(1, 16)
    with watchdog.phase("warm-up", timeout=60):
        mesh = fs.build_mesh(cp=dist.get_world_size(), device_type=device_here().type)
        model = fs.shard_model(tiny_model("llama"), mesh=mesh).to(device_here()).train()
        fs.use_context_parallel(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step, act = 0, partial(_act, folder, lambda: time.sleep(60))
        if is_victim:
            model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: act(step))
        for step in (1, 2):
            watchdog.step(step)
            fs.train_step(model, [{"input_ids": ids, "labels": ids}], optimizer)
    step = 3
    watchdog.step(step)
    fs.train_step(model, [{"input_ids": ids, "labels": ids}], optimizer)


def _save(watchdog: fs.Watchdog, folder: Path, is_victim: bool) -> None:
    model = torch.nn.Linear(4, 4)
    watchdog.step(3)
    if is_victim:
        model.register_state_dict_pre_hook(lambda *_: _act(folder, lambda: time.sleep(60)))
    with watchdog.phase("save", timeout=TIMEOUT):
        fs.save_checkpoint(folder / "checkpoints", 3, model=model)


def _healthy(watchdog: fs.Watchdog, folder: Path, is_victim: bool) -> None:
    """A step of half the time-out, a long save and a long pause of one rank, and unequal ends."""
    _lockstep(watchdog, 6, lambda step: time.sleep(0.5 * TIMEOUT * (is_victim and step in (2, 3))))
    for name, timeout in (("save", 30), ("pause", math.inf)):
        if is_victim:
            with watchdog.phase(name, timeout=timeout):
                time.sleep(1.2 * TIMEOUT)
        dist.barrier()
    for step in range(7, 10 if is_victim else 7):
        watchdog.step(step)
        time.sleep(0.5 * TIMEOUT)


# name -> (function, ranks, victim, who hosts the store, what the report says of the victim)
SCENES: dict[str, tuple[Callable[[fs.Watchdog, Path, bool], None], int, int, str, str]] = {
    "stop-host": (
        partial(_signalled, signal.SIGSTOP),
        2,
        0,
        "rank 0",
        "stopped, was .* in step 3, phase train",
    ),
    "die-host": (
        partial(_apart, partial(signal.raise_signal, signal.SIGKILL)),
        2,
        0,
        "rank 0",
        "dead, was .* in step 3, phase train",
    ),
    "ahead-2": (_ahead, 2, 0, "rank 0", "waiting in all_reduce in step 5, phase train"),
    "save-3": (_save, 3, 2, "agent", "outside of a collective in step 3, phase save, .*test_watchdog"),
    "exchange-2": (_exchange, 2, 1, "agent", "outside of a collective in step 3, .*test_watchdog"),
    "raise-2": (
        partial(_apart, _raises),
        2,
        1,
        "agent",
        r"failed with ValueError\('the data ends here'\) in step 3",
    ),
    # gloo wakes the others, who raise: the report comes in place of their exceptions. Rank 5 looks at its
    # neighbour, rank 0, and not at rank 4.
    "kill-6": (partial(_signalled, signal.SIGKILL), 6, 4, "agent", "dead, was .*, phase (train|start)"),
    "absent-2": (_lockstep_for_ever, 2, 1, "agent", "not heard of: it has not entered its watchdog"),
    "healthy-3": (_healthy, 3, 1, "agent", ""),
}


class Outcome(NamedTuple):
    """What is left of one rank."""

    exit_code: int | None
    stderr: str
    seconds: float  # from the victim's act to the last line


def _run_rank(name: str, folder: Path, rank: int, port: int, own: Simulated | None) -> None:
    function, world_size, victim, host, _ = SCENES[name]
    become(own)
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(1)
    hosts = host == "rank 0" and rank == 0
    if host == "rank 0":  # the given one is the agent's
        while not hosts and not (folder / "port").exists():
            time.sleep(0.01)
        port = 0 if hosts else int((folder / "port").read_text())
    store = dist.TCPStore("127.0.0.1", port, is_master=hosts, timeout=timedelta(seconds=60))
    if hosts:
        (folder / "port.tmp").write_text(str(store.port))
        (folder / "port.tmp").rename(folder / "port")
    dist.init_process_group(backend_here(), store=store, rank=rank, world_size=world_size)
    if name.startswith("absent") and rank == victim:
        _acted(folder)
        time.sleep(600)
    with fs.Watchdog(timeout=LONG_TIMEOUT if name == "kill-6" else TIMEOUT) as watchdog:
        with watchdog.phase("start", timeout=60):  # until all have begun, on a machine that is busy
            if not name.startswith("absent"):
                dist.barrier()
            time.sleep(3 * watchdog.interval)
        function(watchdog, folder, rank == victim)
    if hosts:
        time.sleep(1)  # gloo's own farewell goes through the store as well


def _started(function: Callable[..., Any], *args: Any) -> Any:
    process = forks.process(function, *args)
    process.start()
    return process


def _play(name: str, folder: Path) -> list[Outcome]:
    """Let the ranks of a scene play it to its end; those that are stopped, or never begin, are killed."""
    _, world_size, victim, _, _ = SCENES[name]
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True)
    devices = enumerate(for_ranks(world_size))
    processes = [_started(_run_rank, name, folder, rank, agent.port, own) for rank, own in devices]
    deadline = time.monotonic() + 60
    for rank, process in enumerate(processes):
        if rank != victim or not name.startswith(("stop", "absent")):
            process.join(max(deadline - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    acted = float((folder / "acted").read_text()) if (folder / "acted").exists() else math.nan
    files = (folder / f"stderr-{rank}" for rank in range(world_size))
    return [
        Outcome(code, file.read_text(), file.stat().st_mtime - acted)
        for code, file in zip(codes, files, strict=True)
    ]


@pytest.mark.parametrize("name", [name for name in SCENES if name != "healthy-3"])
def test_the_rank_is_named_on_all_that_live_within_the_set_time(name: str, tmp_path: Path) -> None:
    (_, _, victim, _, says), what = SCENES[name], name.partition("-")[0]
    ends = {"stop": None, "die": -signal.SIGKILL, "kill": -signal.SIGKILL, "raise": 1, "absent": None}
    for rank, outcome in enumerate(_play(name, tmp_path)):
        if rank == victim and what in ends:
            assert outcome.exit_code == ends[what], outcome.stderr
            continue
        assert outcome.exit_code == fs.STALL_EXIT_CODE == 86, outcome.stderr
        process = "" if what == "absent" else r" \(host \S+, process \d+\)"
        assert re.search(rf"  rank {victim}{process}: {says}", outcome.stderr), outcome.stderr
        assert f"[watchdog, rank {rank} (host " in outcome.stderr
        assert "test_watchdog.py" in outcome.stderr.partition("was here:")[2], "its own stack"
        limit = 4 * LONG_TIMEOUT / 10 if what == "kill" else 1.4 * TIMEOUT
        assert outcome.seconds <= limit + SLACK, outcome.stderr
        if what == "exchange" and rank != victim:
            assert "waiting in to_heads in step 3, phase train" in outcome.stderr, outcome.stderr
        if what in ("stop", "die"):
            assert "the store does not answer" in outcome.stderr


def test_a_healthy_run_raises_no_alarm(tmp_path: Path) -> None:
    for outcome in _play("healthy-3", tmp_path):
        assert (outcome.exit_code, "watchdog" in outcome.stderr) == (0, False)


# --- one process ------------------------------------------------------------------------------------------


def _alone(hang: bool, path: str) -> None:
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
    with fs.Watchdog(timeout=1.0) as watchdog:
        for step in range(4):
            watchdog.step(step)
            for _ in range(4):  # of one sleep nothing would be left after a stop
                time.sleep(0.1)
        with watchdog.phase("eval", timeout=10):
            time.sleep(1.5)
        watchdog.step(9)
        time.sleep(30 if hang else 0)


def test_a_single_process_watches_itself(tmp_path: Path) -> None:
    processes = [_started(_alone, hang, str(tmp_path / str(hang))) for hang in (False, True)]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, fs.STALL_EXIT_CODE]
    healthy, report = ((tmp_path / str(hang)).read_text() for hang in (False, True))
    assert (healthy, "no progress for 1 s on rank 0" in report) == ("", True), report
    assert re.search(r"in step 9, phase train, at test_watchdog.py:\d+ in _alone", report)


def _stopped_in_a_look(path: str) -> None:
    real, looks = fs.Watchdog._finding, itertools.count(1)

    def stopped_first(*given: Any) -> str:
        if next(looks) == 5:  # longer before the next step than before the next look
            # Whoever sends it to the thread itself goes on first, before the thread that waits for this one.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return real(*given)

    fs.Watchdog._finding = stopped_first
    _alone(False, path)


def _hangs_beside_a_slow_store() -> None:
    real = fs.Watchdog._fetch

    def slowly(*given: Any) -> list[int]:
        time.sleep(2.2)
        return real(*given)

    fs.Watchdog._fetch = slowly
    with fs.Watchdog(timeout=9):
        time.sleep(22)


def test_a_store_that_is_slow_is_not_taken_for_a_stop() -> None:
    process = _started(_hangs_beside_a_slow_store)
    process.join(40)
    assert process.exitcode == fs.STALL_EXIT_CODE


@pytest.mark.parametrize("asleep", [True, False])
def test_a_process_that_was_stopped_blames_nobody(asleep: bool, tmp_path: Path) -> None:
    run = partial(_alone, False) if asleep else _stopped_in_a_look
    process = _started(run, str(tmp_path / "report"))
    while not (tmp_path / "report").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    if asleep:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(process.pid, signal.SIGCONT)
    process.join(30)
    assert process.exitcode == 0, (tmp_path / "report").read_text()


@pytest.mark.parametrize("timeout", [0, -1.0, math.inf, math.nan])
def test_a_time_out_in_which_nobody_is_watched_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match=rf"above 0 and finite, got {timeout!r}; .*math\.inf"):
        fs.Watchdog(timeout=timeout)


def test_a_watchdog_is_entered_once() -> None:
    with fs.Watchdog(timeout=60) as watchdog:
        pass
    with pytest.raises(RuntimeError, match="started once"), watchdog:
        pass
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())
