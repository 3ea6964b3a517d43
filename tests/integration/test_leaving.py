"""A trainer that is told to go, or that fails, leaves the swarm: at once, whole, and its group mates are told.

The mates' patience is longer than these tests may last: what ends their waiting is the leave, never a time-out. With
SWARMAVG_SIMULATE=all, as in `make simulate`, all combinations are played, and the two seconds of the promise are measured.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import leaving_worker
import pytest
import torch
from leaving_worker import ELEMENTS, OPTIONS, TIMEOUT

from swarmavg.control import AveragingStage
from swarmavg.identifiers import PeerId
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.sync import Averager, Peer, StepControl

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="no signals to another process")]

LEFT = {ExclusionCode.CANCELLED, ExclusionCode.CONNECTION_LOST, ExclusionCode.UNREACHABLE}
ENDINGS = ("error", "SIGINT", "SIGTERM", "as-exit", "as-ctrl-c")
EVERYTHING = os.environ.get("SWARMAVG_SIMULATE") == "all"
BOUND = 2.0
"""Seconds from the signal to the end of the process."""


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

    def check_result(self, inputs: dict[PeerId, float]) -> None:
        """What its step ends with is right, element by element."""
        result = self.control.result(60)
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
        yield Mate(peer, tensor, control)


class Trainer:
    """The process that leaves."""

    def __init__(self, process: subprocess.Popen[str], ending: str) -> None:
        self.process = process
        self.ending = ending

    def arrive(self) -> tuple[PeerId, int]:
        """Wait until it is in its place; returns its id and the port on which it listens."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(f"the trainer did not get as far: {self.process.communicate()[1]}")
        said = json.loads(line)
        return PeerId.parse(said["id"]), said["port"]

    def leave(self) -> tuple[float, str]:
        """Make it leave; returns how many seconds that took, and what it had to say."""
        began = time.monotonic()
        if self.ending == "error":
            assert self.process.stdin is not None
            self.process.stdin.write("!")
            self.process.stdin.flush()
        else:
            self.process.send_signal(signal.SIGINT if self.ending == "SIGINT" else signal.SIGTERM)
        self.process.wait(60)
        seconds = time.monotonic() - began
        return seconds, self.process.communicate()[1]


@contextmanager
def trainer(facade: str, place: str, ending: str, bootstrap: str) -> Iterator[Trainer]:
    command = [sys.executable, "-W", "error", leaving_worker.__file__, facade, place, ending, bootstrap]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        try:
            yield Trainer(process, ending)
        finally:
            process.kill()


def check_last_words(ending: str, status: int, errors: str) -> None:
    """It dies of what it was made to die of, with nothing else to complain about."""
    if ending == "SIGTERM":
        assert (status, errors) == (-signal.SIGTERM, "")
    elif ending == "as-exit":
        assert (status, errors) == (143, "")
    else:
        assert status == (1 if ending == "error" else -signal.SIGINT), errors
        assert errors.count("Traceback (most recent") == (2 if "CancelledError" in errors else 1), errors
        assert errors.rstrip().splitlines()[-1].startswith("LookupError" if ending == "error" else "KeyboardInterrupt"), errors


def open_sockets_of(port: int) -> list[str]:
    """Sockets of this machine that listen on the port or are connected to it; those in TIME_WAIT belong to nobody."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if Path(table).exists():
            for row in Path(table).read_text().splitlines()[1:]:
                _, local, remote, state, *_ = row.split()
                if f"{port:04X}" in {local.split(":")[1], remote.split(":")[1]} and state != "06":
                    found.append(row)
    return found


def leave(leaver: Trainer, port: int) -> None:
    """Make it leave, and check how it goes."""
    seconds, errors = leaver.leave()
    check_last_words(leaver.ending, leaver.process.returncode, errors)
    wait_for(lambda: not open_sockets_of(port))
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
            leaver_id, port = leaver.arrive()
            wait_for(lambda: {first.control.stage, second.control.stage} == {AveragingStage.AWAITING_TRIGGER})
            leave(leaver, port)
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
            leaver_id, port = leaver.arrive()
            wait_for(lambda: str(leaver_id) in first.peer.status()["peers"])
            leave(leaver, port)
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
        seconds, errors = leaver.leave()
        check_last_words(ending, leaver.process.returncode, errors)
        assert seconds < BOUND
