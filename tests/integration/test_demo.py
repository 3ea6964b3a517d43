"""The demo as a person starts it: real processes, real sockets, its verdict, and no process left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="looks at processes that are not its children: Linux")

ENOUGH_STEPS = "40"
MANY_STEPS = "150"
ENDLESS = "1000000"


@contextmanager
def demo(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "swarmavg.cli.main", "demo", "--plain", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:  # which waits for the end, so it must come to one whatever happens inside
        try:
            yield process
            process.communicate()
        finally:
            process.kill()


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and output of a whole run."""
    with demo(*arguments) as process:
        output, errors = process.communicate()
    assert errors == ""
    return process.returncode, output


def workers_of(process: subprocess.Popen[str], count: int, stage: str = "alone") -> dict[int, int]:
    """The demo's child processes, once so many are in this stage: pid -> a descriptor that turns readable at its end."""
    assert process.stdout is not None
    names: set[str] = set()
    while len(names) < count:
        line = process.stdout.readline()
        assert line, "the demo ended early"
        if f"  {stage}" in line:
            names.add(line.split("  ")[0])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 3
    return {int(pid): os.pidfd_open(int(pid)) for pid in children}


def wait_until_ended(workers: dict[int, int]) -> None:
    for descriptor in workers.values():
        ended, _, _ = select.select([descriptor], [], [], 30)
        os.close(descriptor)
        assert ended


def test_peers_end_as_one_and_beat_the_best_lone_one() -> None:
    status, output = run("--peers", "2", "--steps", ENOUGH_STEPS)
    *lines, last = output.splitlines()
    assert last.startswith("verdict: passed: 2 peers hold identical parameters"), output
    assert status == 0
    assert any("peer 1" in line and "together" in line and "group 2" in line and "MB/s" in line for line in lines)
    assert any("one process on all data" in line for line in lines)


def test_too_little_training_is_a_failure() -> None:
    status, output = run("--peers", "2", "--steps", "1")
    assert output.splitlines()[-1].startswith("verdict: failed: the averaged model ("), output
    assert status == 1


def test_unknown_transport_lists_the_installed_ones() -> None:
    with demo("--transport", "pigeon") as process:
        _, errors = process.communicate()
    assert process.returncode == 2
    assert "'pigeon'" in errors
    assert "tcp" in errors


@needs_pidfd
@pytest.mark.parametrize(("stage", "in_it", "steps"), [("alone", 3, ENDLESS), ("together", 2, MANY_STEPS)])
def test_ctrl_c_ends_all_processes(stage: str, in_it: int, steps: str) -> None:
    with demo("--peers", "2", "--steps", steps) as process:
        workers = workers_of(process, in_it, stage)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        assert process.returncode == 130
        assert errors == ""
        assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
        wait_until_ended(workers)


@needs_pidfd
def test_workers_do_not_outlive_a_parent_that_is_killed() -> None:
    with demo("--peers", "2", "--steps", ENDLESS) as process:
        workers = workers_of(process, 3)
        process.kill()
        wait_until_ended(workers)


@needs_pidfd
def test_a_worker_that_dies_fails_the_demo_and_ends_the_others() -> None:
    with demo("--peers", "2", "--steps", ENDLESS) as process:
        workers = workers_of(process, 3)
        os.kill(min(workers), signal.SIGKILL)
        output, _ = process.communicate()
        assert process.returncode == 1
        assert "ended with exit status -9" in output.splitlines()[-1]
        wait_until_ended(workers)
