"""A trainer that is told to go, or that fails, leaves the swarm: at once, whole, and its group mates are told.

The mates' patience is longer than these tests may last: what ends their waiting is the leave, never a time-out. With
SWARMAVG_SIMULATE=all, as in `make simulate`, all combinations are played, and the two seconds of the promise are measured.
"""

from __future__ import annotations

import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import leaving_worker  # type: ignore[import-not-found]  # beside this file
import pytest
import torch
from leaving_worker import ELEMENTS, OPTIONS, TIMEOUT
from test_demo import ENDLESS, demo, wait_until_ended, workers_of  # type: ignore[import-not-found]

from swarmavg.control import AveragingStage
from swarmavg.identifiers import PeerId
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.sync import Averager, Peer, StepControl, TrainingStateAverager

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="no signals to another process")]

LEFT = {ExclusionCode.CANCELLED, ExclusionCode.CONNECTION_LOST, ExclusionCode.UNREACHABLE}
ENDINGS = ("error", "SIGINT", "SIGTERM", "as-exit", "as-ctrl-c")
EVERYTHING = os.environ.get("SWARMAVG_SIMULATE") == "all"
BOUND = 2.0
"""Seconds from the signal to the end of the last socket. What an interpreter takes to end after that is not the library's."""


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not condition():
        pause.wait(0.01)


@dataclass
class Mate:
    """A member of the trainer's group, in this process."""

    peer: Peer
    tensor: torch.Tensor
    control: StepControl
    averager: Averager

    def check_result(self, inputs: dict[PeerId, float]) -> None:
        """What its step ends with is right, element by element."""
        try:
            result = self.control.result(60)
        except TimeoutError:
            pytest.fail(f"the step does not end:\n{self.averager.story()}")
        assert result.fraction == 1.0
        for span, members in result.contributors:
            expected = sum(inputs[member] for member in members) / len(members)
            assert self.tensor[span.start : span.stop].sub(expected).abs().max() < 1e-6


@contextmanager
def mate(value: float, bootstrap: list[str]) -> Iterator[Mate]:
    """Looks for a group at once, and begins no all-reduce until it is allowed to."""
    tensor = torch.full((ELEMENTS,), value)
    with (
        Peer(listen=["tcp://127.0.0.1:0"], bootstrap=bootstrap) as peer,
        Averager([tensor], peer=peer, **OPTIONS) as averager,
    ):
        control = averager.step(wait=False, require_trigger=True, timeout=TIMEOUT, allow_retries=False)
        yield Mate(peer, tensor, control, averager)


class Trainer:
    """The process that leaves."""

    def __init__(self, process: subprocess.Popen[str], ending: str) -> None:
        self.process = process
        self.ending = ending

    def arrive(self) -> PeerId:
        """Wait until it is in its place; returns its id."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(f"the trainer did not get as far: {self.process.communicate()[1]}")
        return PeerId.parse(line.strip())

    def leave(self) -> float:
        """Make it leave; returns the seconds until it had closed all its sockets."""
        began = time.monotonic()
        if self.ending == "error":
            assert self.process.stdin is not None
            self.process.stdin.write("!")
            self.process.stdin.flush()
        else:
            self.process.send_signal(signal.SIGINT if self.ending == "SIGINT" else signal.SIGTERM)
        wait_for(lambda: not sockets_of(self.process.pid))
        return time.monotonic() - began

    def check_last_words(self) -> None:
        """It dies of what it was made to die of, with nothing else to complain about."""
        _, errors = self.process.communicate(timeout=60)
        status = self.process.returncode
        if self.ending == "SIGTERM":
            assert (status, errors) == (-signal.SIGTERM, "")
        elif self.ending == "as-exit":
            assert (status, errors) == (143, "")
        else:
            error = "LookupError" if self.ending == "error" else "KeyboardInterrupt"
            assert status == (1 if self.ending == "error" else -signal.SIGINT), errors
            assert errors.rstrip().splitlines()[-1].startswith(error), errors
            assert errors.count("Traceback (most recent") == 1 + errors.count("CancelledError\n"), errors


@contextmanager
def trainer(facade: str, place: str, ending: str, bootstrap: str) -> Iterator[Trainer]:
    command = [sys.executable, "-W", "error", leaving_worker.__file__, facade, place, ending, bootstrap]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            yield Trainer(process, ending)
        finally:
            process.kill()


def sockets_of(pid: int) -> list[tuple[int, int]]:
    """The ports at both ends, the own one first, of every TCP socket that a process holds. Empty but on Linux."""
    held = set()
    with suppress(OSError):  # it has ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                held.add(str(descriptor.readlink()))
    found = []
    for table in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")):
        for row in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = row.split()
            if f"socket:[{fields[9]}]" in held:
                found.append((int(fields[1].split(":")[1], 16), int(fields[2].split(":")[1], 16)))
    return found


def leave(leaver: Trainer) -> None:
    """Make it leave, and check how it goes. On this side, too, no connection with it stays open."""
    its_ports = {port for port, _ in sockets_of(leaver.process.pid)}
    seconds = leaver.leave()
    leaver.check_last_words()
    wait_for(lambda: not its_ports & {port for _, port in sockets_of(os.getpid())})
    assert not EVERYTHING or seconds < BOUND


def cases(sample: list[tuple[str, ...]], *choices: tuple[str, ...]) -> list[tuple[str, ...]]:
    return list(itertools.product(*choices)) if EVERYTHING else sample


@pytest.mark.parametrize(
    ("facade", "place", "ending"),
    cases(
        [
            ("sync", "waiting", "error"),
            ("sync", "averaging", "SIGINT"),
            ("sync", "training", "as-exit"),
            ("async", "waiting", "as-ctrl-c"),
            ("async", "averaging", "SIGTERM"),
            ("async", "training", "error"),
        ],
        ("sync", "async"),
        ("waiting", "averaging", "training"),
        ENDINGS,
    )
    + cases([("forgetful", "averaging", "error")], ("forgetful",), ("waiting", "averaging"), ENDINGS),
)
def test_out_of_a_round(facade: str, place: str, ending: str) -> None:
    with mate(2.0, []) as first, mate(4.0, [first.peer.join_line]) as second:
        with trainer(facade, place, ending, first.peer.join_line) as leaver:
            leaver_id = leaver.arrive()
            wait_for(lambda: {first.control.stage, second.control.stage} == {AveragingStage.AWAITING_TRIGGER})
            leave(leaver)
        inputs = {first.peer.id: 2.0, second.peer.id: 4.0, leaver_id: 1.0}
        for one in (first, second):
            one.control.allow_allreduce()
        for one in (first, second):
            one.check_result(inputs)
            exclusion = one.control.result().excluded[leaver_id]
            assert exclusion.code in LEFT
            assert exclusion.detail
        assert torch.equal(first.tensor, second.tensor)


@pytest.mark.parametrize(
    ("facade", "ending"), cases([("sync", "SIGTERM"), ("async", "SIGINT")], ("sync", "async", "forgetful"), ENDINGS)
)
def test_out_of_a_search(facade: str, ending: str) -> None:
    """A group is formed by those who come later, without the one that has left."""
    with mate(2.0, []) as first:
        with trainer(facade, "searching", ending, first.peer.join_line) as leaver:
            leaver_id = leaver.arrive()
            wait_for(lambda: str(leaver_id) in first.peer.status()["peers"])
            leave(leaver)
        if said_goodbye(facade, ending):
            wait_for(lambda: str(leaver_id) not in first.peer.status()["peers"])
        with mate(4.0, [first.peer.join_line]) as second, mate(9.0, [first.peer.join_line]) as third:
            for one in (first, second, third):
                one.control.allow_allreduce()
            for one in (first, second, third):
                assert not one.control.result(60).excluded
                assert one.tensor.eq(5.0).all()


def said_goodbye(facade: str, ending: str) -> bool:
    """Not a process that just dies, nor an event loop that an exit breaks off in mid-air."""
    return ending != "SIGTERM" and (facade, ending) != ("async", "as-exit")


def test_a_flag_that_stops_between_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(1, 1)
    steps = []

    def step(**options: object) -> None:
        inspect.signature(TrainingStateAverager.step).bind(None, **options)
        steps.append(options)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    names = {"torch": torch, "model": model, "inputs": torch.ones(1, 1), "targets": torch.ones(1, 1)}
    names |= {"loss_function": torch.nn.functional.mse_loss, "averager": SimpleNamespace(step=step)}
    try:
        exec(leaving_worker.documented_code()[3], names)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(steps) == 2
    assert torch.equal(torch.load("checkpoint.pt")["weight"], model.weight)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="looks at processes that are not its children: Linux")
def test_the_demo_takes_sigterm_like_ctrl_c() -> None:
    with demo("--peers", "2", "--steps", ENDLESS) as process:
        workers = workers_of(process, 3)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
        assert (process.returncode, errors) == (143, "")
        assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
        wait_until_ended(workers)


@pytest.mark.skipif(not EVERYTHING, reason="measures seconds: make simulate")
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("facade", ["sync", "async", "forgetful"])
def test_a_mate_that_stands_still_does_not_hold_up_a_leave(facade: str, ending: str) -> None:
    with (
        mate(2.0, []) as first,
        trainer("sync", "averaging", "SIGTERM", first.peer.join_line) as frozen,
        trainer(facade, "averaging", ending, first.peer.join_line) as leaver,
    ):
        frozen.arrive()
        leaver.arrive()
        frozen.process.send_signal(signal.SIGSTOP)
        seconds = leaver.leave()
        leaver.check_last_words()
        assert seconds < BOUND
