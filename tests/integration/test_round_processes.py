"""Five real processes average; one is killed, or stopped and woken again, at a random moment: the others are equal and right.

`make test` plays three rounds of 2 MB. With SWARMAVG_SIMULATE=all, as in `make simulate`, there are more, and 20 of 128 MB.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import swarmavg

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL and SIGSTOP")]

WORKER = Path(__file__).with_name("round_worker.py")
PROCESSES = 5
SMALL = 500_000
"""Elements of 2 MB."""
LARGE = 32_000_000
EVERYTHING = os.environ.get("SWARMAVG_SIMULATE") == "all"
PATIENT = 100.0
"""Seconds after which one that does not answer hangs."""

IMPATIENT: dict[str, Any] = {"sender_timeout": 1.0, "reducer_timeout": 2.0, "request_timeout": 1.0}
LONG_STOP = 6.0
"""Seconds; the others exclude a process that stands still for this long when they are `IMPATIENT`."""
SHORT_STOP = 0.4


@dataclass(frozen=True)
class Case:
    """What happens to whom and when. All of it follows from the seed."""

    seed: int
    kind: str
    elements: int
    victim: int
    point: float
    """Fraction of the results that the victim has when it happens; over 1: its step is over."""
    delay: float
    """Seconds later than that; 0 = there at once, by its own hand."""

    @classmethod
    def drawn(cls, seed: int, kind: str, elements: int) -> Case:
        rng = random.Random(seed)
        delay = rng.uniform(0.0, 0.05) if elements == LARGE else 0.0
        return cls(seed, kind, elements, rng.randrange(PROCESSES), rng.choice([0.0, rng.random(), rng.random(), 1.1]), delay)

    @property
    def signal(self) -> signal.Signals:
        return signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP

    @property
    def options(self) -> dict[str, Any]:
        options = dict(IMPATIENT) if self.kind == "long stop" else {}
        if self.elements == SMALL:
            options["part_size_bytes"] = 16_384
        return options

    def __str__(self) -> str:
        moment = f"{self.point:.2f} + {self.delay:.3f} s"
        return f"seed {self.seed}, {self.elements / 250_000:g} MB: {self.kind} of {self.victim} at {moment}"


class Process:
    """One worker, as seen from here."""

    def __init__(self, rank: int, process: asyncio.subprocess.Process) -> None:
        self.rank = rank
        self.process = process

    def order(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")

    def average(
        self,
        prefix: str,
        group: int,
        elements: int,
        *,
        point: float | None = None,
        own_signal: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        settings = {"point": point, "own_signal": own_signal, "options": options or {}}
        self.order(do="average", prefix=prefix, group=group, elements=elements, **settings)

    @property
    def lives(self) -> bool:
        return self.process.returncode is None

    async def answer(self) -> dict[str, Any]:
        """Its next line. An empty one where it has ended."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENT):
            line = await self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {}
        return answer

    async def end(self) -> int:
        """Let it close, and wait for that; returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        async with asyncio.timeout(PATIENT):
            return await self.process.wait()


@asynccontextmanager
async def swarm(elements: int) -> AsyncIterator[list[Process]]:
    """Processes that know each other. None outlives the block."""
    token, bootstrap = swarmavg.generate_token(), ""
    processes: list[Process] = []
    try:
        for rank in range(PROCESSES):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-W", "error", WORKER, str(rank), str(elements), token, bootstrap),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                limit=2**24,
            )
            processes.append(Process(rank, process))
            if rank == 0:
                bootstrap = (await processes[0].answer())["join_line"]
        for one in processes[1:]:
            assert await one.answer()
        yield processes
    finally:
        for one in processes:
            if one.process.returncode is None:
                one.process.kill()
            await one.process.communicate()


async def play(*cases: Case) -> None:
    """One after another with the same processes, so that only the last one may be a kill."""
    async with swarm(max(case.elements for case in cases)) as processes:
        for case in cases:
            print(await play_round(case, processes))
        assert {await one.end() for one in processes if one.lives} == {0}


async def play_round(case: Case, processes: list[Process]) -> str:
    """Returns a line about what happened."""
    victim = processes[case.victim]
    others = [one for one in processes if one is not victim]
    for one in processes:
        at: dict[str, Any] = {}
        if one is victim:
            at = {"point": case.point, "own_signal": None if case.delay else case.signal}
        one.average(f"round-{case.seed}", len(processes), case.elements, **at, options=case.options)
    for one in processes:
        assert (await one.answer())["ready"]
    assert "there" in await victim.answer()
    began = time.monotonic()
    if case.delay:
        await asyncio.sleep(case.delay)
        victim.process.send_signal(case.signal)
    async with asyncio.TaskGroup() as group:
        tellings = [group.create_task(one.answer()) for one in others]
        fate = await fate_of(victim, case)
    outcomes = [telling.result() for telling in tellings]
    took = time.monotonic() - began
    check_survivors(case, outcomes)
    if victim.lives:
        await check_woken(case, victim, fate, outcomes[0])
    await check_that_they_go_on(case, [one for one in processes if one.lives])
    slowest = max(outcome["seconds"] for outcome in outcomes)
    return f"{case}: {describe(fate)}; survivors: {describe(outcomes[0])}, {slowest:.1f} s; all told after {took:.1f} s"


async def fate_of(victim: Process, case: Case) -> dict[str, Any]:
    """What the victim says of its step, in the end; nothing if it was killed before that."""
    if case.kind == "kill":
        fate = await victim.answer()
        await victim.process.wait()
        return fate
    await asyncio.sleep(LONG_STOP if case.kind == "long stop" else SHORT_STOP)
    victim.process.send_signal(signal.SIGCONT)
    return await victim.answer()


def check_survivors(case: Case, outcomes: list[dict[str, Any]]) -> None:
    """All equal and right, and nobody is missing but the victim."""
    for outcome in outcomes:
        assert "error" not in outcome, (str(case), outcomes)
        assert outcome["wrong"] == 0, (str(case), outcomes)
        assert outcome["fraction"] == 1.0
        assert not outcome["diverged"]
        assert set(outcome["excluded"]) <= {str(case.victim)}, (str(case), outcomes)
        for _, _, ranks in outcome["contributors"]:
            assert set(range(PROCESSES)) - set(ranks) <= {case.victim}
    for same in ("digest", "contributors"):
        assert all(outcome[same] == outcomes[0][same] for outcome in outcomes), (str(case), outcomes)


async def check_woken(case: Case, victim: Process, fate: dict[str, Any], outcome: dict[str, Any]) -> None:
    """It has the same averages, or knows that it has not."""
    if "error" in fate:
        assert case.kind == "long stop", (str(case), fate)
        assert fate["error"] == "FencedError", (str(case), fate)
        assert fate["unchanged"]
        return
    assert fate["wrong"] == 0, (str(case), fate)
    if fate["digest"] != outcome["digest"]:
        assert case.kind == "long stop", (str(case), fate)
        await wait_until_diverged(case, victim, fate, outcome)


async def wait_until_diverged(case: Case, victim: Process, fate: dict[str, Any], outcome: dict[str, Any]) -> None:
    for _ in range(100):
        victim.order(do="look")
        if (await victim.answer())["diverged"]:
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"{case}: other averages than the others, and it does not know: {fate}, {outcome}")


async def check_that_they_go_on(case: Case, processes: list[Process]) -> None:
    """All that live average once more, in one group."""
    for one in processes:
        one.average(f"after-{case.seed}", len(processes), 10_000)
    for one in processes:
        assert (await one.answer())["ready"]
    outcomes = [await one.answer() for one in processes]
    for outcome in outcomes:
        assert outcome.get("group") == [one.rank for one in processes], (str(case), outcomes)
        assert (outcome["wrong"], outcome["fraction"]) == (0, 1.0), (str(case), outcomes)
        assert outcome["digest"] == outcomes[0]["digest"], (str(case), outcomes)


def describe(outcome: dict[str, Any]) -> str:
    if not outcome:
        return "the victim had no result"
    if "error" in outcome:
        return str(outcome["error"])
    parts = len({tuple(ranks) for _, _, ranks in outcome["contributors"]})
    return f"excluded {outcome['excluded'] or 'nobody'}, {parts} kinds of spans{', diverged' if outcome['diverged'] else ''}"


KINDS = ("short stop", "long stop", "kill")


def rounds(count: int, elements: int, first: int) -> list[Any]:
    cases = [Case.drawn(first + number, KINDS[number % len(KINDS)], elements) for number in range(count)]
    return [pytest.param(case, id=f"{case.seed}-{case.kind.replace(' ', '-')}") for case in cases]


everything = pytest.mark.skipif(not EVERYTHING, reason="a sample runs always, the rest with `make simulate`")


def test_whatever_happens_to_one_the_others_are_equal_and_right() -> None:
    asyncio.run(play(*(Case.drawn(seed, kind, SMALL) for seed, kind in enumerate(KINDS))))


@everything
@pytest.mark.parametrize("case", rounds(60 if EVERYTHING else 0, SMALL, first=1000))
def test_many_moments(case: Case) -> None:
    asyncio.run(play(case))


@everything
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", rounds(20 if EVERYTHING else 0, LARGE, first=2000))
def test_128_megabytes_each(case: Case) -> None:
    asyncio.run(play(case))


def test_the_cases_cover_every_phase_and_victim() -> None:
    """A guard for whoever changes how cases are drawn."""
    cases = [Case.drawn(2000 + number, KINDS[number % 3], LARGE) for number in range(20)]
    assert {case.victim for case in cases} == set(range(PROCESSES))
    assert {math.floor(3 * case.point) for case in cases} == {0, 1, 2, 3}
