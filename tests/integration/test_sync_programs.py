"""Whole programs on the blocking API: interrupted in a round, ended without a close, forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import pytest
import torch

from swarmavg.control import AveragingStage
from swarmavg.errors import AllreduceError
from swarmavg.identifiers import PeerId
from swarmavg.sync import Averager, Peer, StepControl

pytestmark = pytest.mark.slow

PRELUDE = """
import os, sys, threading, warnings
import torch
from swarmavg.errors import ForkedError
from swarmavg.sync import Averager, Peer

LOOPBACK = ["tcp://127.0.0.1:0"]

def say(*words):
    print(*words, flush=True)
"""

JOIN = """
peer = Peer(listen=LOOPBACK, bootstrap=[sys.argv[1]]).start()
tensor = torch.ones(1000)
averager = Averager([tensor], peer=peer, prefix="run", target_group_size=2).start()
say(peer.id)
"""


def start(body: str, *arguments: str) -> subprocess.Popen[str]:
    program = PRELUDE + textwrap.dedent(body)
    command = [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning", "-c", program, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not condition():
        pause.wait(0.01)


def left_out(control: StepControl) -> dict[PeerId, str]:
    """Those that did not finish the round and why, whether or not anything could be averaged without them."""
    try:
        return {peer: str(exclusion) for peer, exclusion in control.result(60).excluded.items()}
    except AllreduceError as error:
        return error.reasons


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to another process")
@pytest.mark.parametrize("style", ["with", "forgotten"])
def test_ctrl_c_in_a_step_ends_the_program_and_the_group_is_told(style: str) -> None:
    step = "averager.step(timeout=100)"
    body = JOIN + (f"with peer, averager:\n    {step}" if style == "with" else step)
    tensor = torch.zeros(1000)
    with (
        Peer(listen=["tcp://127.0.0.1:0"]) as peer,
        Averager([tensor], peer=peer, prefix="run", target_group_size=2) as averager,
    ):
        control = averager.step(wait=False, require_trigger=True, timeout=100, allow_retries=False)
        with start(body, peer.join_line) as program:
            wait_for(lambda: control.stage is AveragingStage.AWAITING_TRIGGER or program.poll() is not None)
            program.send_signal(signal.SIGINT)
            out, errors = program.communicate(timeout=60)
        assert program.returncode == -signal.SIGINT, errors
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert errors.count("Traceback") == 1
        control.allow_allreduce()
        # Not "silent", "stalled" or "connection-lost": it has said that it leaves.
        assert left_out(control)[PeerId.parse(out.strip())].startswith(("cancelled", "refused"))
        assert set(tensor.tolist()) <= {0.0, 0.5}  # what had arrived before the goodbye may count


@pytest.mark.parametrize(
    ("ending", "status", "last_words"),
    [("", 0, ""), ("sys.exit(3)", 3, ""), ("raise LookupError('mine')", 1, "LookupError: mine")],
)
def test_a_program_that_never_closes_leaves_the_swarm_and_ends(ending: str, status: int, last_words: str) -> None:
    with Peer(listen=["tcp://127.0.0.1:0"]) as peer:
        with Averager([torch.zeros(1000)], peer=peer, prefix="run", target_group_size=2) as averager:
            with start(f"{JOIN}averager.step(timeout=60)\n{ending}", peer.join_line) as program:
                assert averager.step(timeout=60).group_size == 2
                out, errors = program.communicate(timeout=60)
            assert program.returncode == status, errors
            assert errors.rstrip().splitlines()[-1:] == ([last_words] if last_words else [])
        # Records live for a minute or more: what empties this list is a goodbye.
        wait_for(lambda: out.strip() not in peer.status()["peers"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    body = """
    with (
        Peer(listen=LOOPBACK) as first,
        Peer(listen=LOOPBACK, bootstrap=first.addresses) as second,
        Averager([torch.zeros(10)], peer=first, prefix="run", target_group_size=2) as zeros,
        Averager([torch.ones(10)], peer=second, prefix="run", target_group_size=2) as ones,
    ):
        def average():
            other = ones.step(wait=False, timeout=60)
            zeros.step(timeout=60)
            return other.result().group_size
        say(average())
        child = os.fork()
        if child == 0:
            for use in (zeros.step, zeros.start, zeros.get_tensors().__enter__, lambda: zeros.load_state(wait=False)):
                try:
                    use()
                except ForkedError:
                    say("refused")
            zeros.close()
            with Peer(listen=LOOPBACK) as own:
                say(own.id != first.id)
            sys.exit(4)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        say(average())
    """
    with start(body) as program:
        out, errors = program.communicate(timeout=100)
    assert (program.returncode, errors) == (0, "")
    assert out.split() == ["2", "refused", "refused", "refused", "refused", "True", "4", "2"]
