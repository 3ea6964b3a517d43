"""A trainer that is told to go, or that fails, leaves the swarm: at once, whole, and its group mates are told.

The mates' patience is longer than these tests may last: what ends their waiting is the leave, never a time-out.
"""

from __future__ import annotations

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
from leaving_worker import ELEMENTS, TIMEOUT, options

from swarmavg.control import AveragingStage
from swarmavg.identifiers import PeerId
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.sync import Averager, Peer, StepControl

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="no signals to another process")]

LEFT = {ExclusionCode.CANCELLED, ExclusionCode.CONNECTION_LOST, ExclusionCode.REFUSED}
ENDINGS = ("error", "SIGINT", "SIGTERM", "as-exit", "as-ctrl-c")
PLACES = ("searching", "waiting", "averaging", "training")
CASES = [(facade, place, ending) for facade in ("sync", "async") for place in PLACES for ending in ENDINGS]


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not condition():
        pause.wait(0.01)


@dataclass
class Mate:
    """A member of the trainer's group, in this process."""

    peer: Peer
    averager: Averager
    tensor: torch.Tensor
    control: StepControl

    def has_come_as_far(self, place: str) -> bool:
        wanted = AveragingStage.LOOKING_FOR_GROUP if place == "searching" else AveragingStage.AWAITING_TRIGGER
        return self.control.stage is wanted


@contextmanager
def mate(place: str, value: float, bootstrap: list[str]) -> Iterator[Mate]:
    tensor = torch.full((ELEMENTS,), value)
    with (
        Peer(listen=["tcp://127.0.0.1:0"], bootstrap=bootstrap) as peer,
        Averager([tensor], peer=peer, **options(place)) as averager,
    ):
        control = averager.step(wait=False, require_trigger=True, timeout=TIMEOUT, allow_retries=False)
        yield Mate(peer, averager, tensor, control)


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


@pytest.mark.parametrize(("facade", "place", "ending"), CASES)
def test_a_trainer_leaves(facade: str, place: str, ending: str) -> None:
    with mate(place, 2.0, []) as first, mate(place, 4.0, [first.peer.join_line]) as second:
        with trainer(facade, place, ending, first.peer.join_line) as leaver:
            wait_for(lambda: all(one.has_come_as_far(place) for one in (first, second)))
            seconds, errors = leaver.leave(ending)
        print(f"\n{facade:10} {place:10} {ending:10} {seconds:.2f} s")
        check_last_words(ending, leaver.process.returncode, errors)
        wait_for(lambda: not open_sockets_of(leaver.port))
        if place == "searching":
            wait_for(lambda: str(leaver.peer_id) not in first.peer.status()["peers"])
        else:
            check_that_the_mates_go_on([first, second], leaver.peer_id)


def check_that_the_mates_go_on(mates: list[Mate], leaver: PeerId) -> None:
    values = {mate.peer.id: float(mate.tensor[0]) for mate in mates} | {leaver: 1.0}
    for one in mates:
        one.control.allow_allreduce()
    for one in mates:
        result = one.control.result(60)
        assert result.excluded[leaver].code in LEFT
        assert result.excluded[leaver].detail
        assert set(result.excluded) == {leaver}
        assert result.fraction == 1.0
        for span, members in result.contributors:
            expected = sum(values[member] for member in members) / len(members)
            assert one.tensor[span.start : span.stop].sub(expected).abs().max() < 1e-6
    assert torch.equal(mates[0].tensor, mates[1].tensor)
