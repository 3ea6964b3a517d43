"""The exhaustive and the random simulation, all of it, on several cores: ``make simulate``.

python -m swarmavg.testing.simulate                  everything
python -m swarmavg.testing.simulate kills            every kill, and pairs of kills
python -m swarmavg.testing.simulate random           random faults
python -m swarmavg.testing.simulate replay CASE      one case again, with what came of it
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from swarmavg.testing.event_log import EventLog, Failed
from swarmavg.testing.round_cases import GROUPS, PAIR_STRIDES, GroupSpec, Kill, bound, pairs_after, parse, play, singles
from swarmavg.testing.round_random import play_seed

SEEDS: Final = 2000
_PROGRESS_SECONDS: Final = 10.0
_CHUNK: Final = 20
_SHOWN: Final = 20


@dataclass(kw_only=True)
class Tally:
    """What came of some cases. Plain, so that it travels between processes."""

    what: str
    cases: int = 0
    finished: int = 0
    """Steps of survivors that returned an average."""
    alone: int = 0
    """Steps of survivors that found nobody left to average with, and raised."""
    longest: float = 0.0
    """Virtual seconds that the slowest of the steps took which returned an average."""
    failures: list[tuple[str, list[str]]] = field(default_factory=list)
    """Cases that broke the promise, and how."""

    def count(self, case: str, log: EventLog, violations: list[str]) -> None:
        self.cases += 1
        starts = {(start.peer, start.step): start.time for start in log.starts}
        for end in log.ends:
            if isinstance(end.outcome, Failed):
                self.alone += 1
            else:
                self.finished += 1
                self.longest = max(self.longest, end.time - starts[end.peer, end.step])
        if violations:
            self.failures.append((case, violations))

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        self.finished += other.finished
        self.alone += other.alone
        self.longest = max(self.longest, other.longest)
        self.failures += other.failures


# ---- jobs: what one process does at a time


@dataclass(frozen=True, kw_only=True)
class Job:
    """Some cases that one process plays one after another."""

    what: str
    cases: tuple[str, ...] = ()
    pairs_of: str | None = None
    """The first of two kills; the second ones are found on the way."""
    stride: int = 1
    seeds: tuple[int, ...] = ()


def run_job(job: Job) -> Tally:
    """Play the cases of a job."""
    torch.set_num_threads(1)
    tally = Tally(what=job.what)
    for case in job.cases:
        group, kills = parse(case)
        _play(tally, group, kills)
    if job.pairs_of is not None:
        group, kills = parse(job.pairs_of)
        for pair in pairs_after(group, kills[0], stride=job.stride):
            _play(tally, group, pair)
    for seed in job.seeds:
        report = play_seed(seed)
        tally.count(f"random {seed}", report.log, [*report.violations, *_plan(report.violations, report.plan)])
    return tally


def _play(tally: Tally, group: GroupSpec, kills: Sequence[Kill]) -> None:
    report = play(group, kills)
    tally.count(report.case, report.log, report.violations)


def _plan(violations: list[str], plan: object) -> list[str]:
    return [f"the faults: {plan!r}"] if violations else []


def kill_jobs(*, full: bool) -> Iterator[Job]:
    """Every peer of every group killed at every boundary, in two ways; and pairs of kills in the groups of four."""
    for group in GROUPS.values():
        for lossy in (False, True):
            cases = [" ".join([group.name, *map(str, kills)]) for kills in singles(group, lossy=lossy)]
            what = f"{group.name}, one {'abrupt ' if lossy else ''}kill"
            yield from (Job(what=what, cases=tuple(cases[at : at + _CHUNK])) for at in range(0, len(cases), _CHUNK))
    for name, stride in PAIR_STRIDES.items():
        firsts = [f"{name} {boundary.kill}" for boundary in play(GROUPS[name]).boundaries if boundary.protocol]
        used = 1 if full else stride
        what = f"{name}, two kills" + (f", each {used}th of the second ones" if used > 1 else "")
        yield from (Job(what=what, pairs_of=first, stride=used) for first in firsts)


def random_jobs(seeds: int) -> Iterator[Job]:
    """Mixed faults."""
    numbers = range(seeds)
    for at in range(0, seeds, _CHUNK):
        yield Job(what="random faults", seeds=tuple(numbers[at : at + _CHUNK]))


# ---- running and telling


def run(jobs: Iterable[Job], processes: int) -> dict[str, Tally]:
    """Run jobs on several cores, telling of progress. Returns a tally per kind of case.

    In a shuffled order, so that what is told early stands for the whole.
    """
    waiting = list(jobs)
    random.Random(0).shuffle(waiting)  # noqa: S311  (repeatable, not secret)
    tallies: dict[str, Tally] = {}
    began = told = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for number, tally in enumerate(pool.imap_unordered(run_job, waiting), 1):
            for case, violations in tally.failures:
                _tell_failure(case, violations)
            tallies.setdefault(tally.what, Tally(what=tally.what)).add(tally)
            if time.monotonic() - told >= _PROGRESS_SECONDS or number == len(waiting):
                told = time.monotonic()
                cases = sum(each.cases for each in tallies.values())
                failed = sum(len(each.failures) for each in tallies.values())
                _tell(f"{number}/{len(waiting)} jobs, {cases} cases, {failed} failed, {told - began:.0f} s")
    return tallies


def _tell_failure(case: str, violations: list[str]) -> None:
    _tell(f"FAILED  {case}")
    for line in violations[:_SHOWN]:
        _tell(f"    {line}")
    _tell(f"    again: {sys.executable} -m swarmavg.testing.simulate replay {case}")


def summary(tallies: dict[str, Tally]) -> str:
    """A line per kind of case, and the total."""
    lines = [f"{'cases':>7} {'failed':>6} {'averaged':>9} {'alone':>6} {'slowest':>9}  what"]
    total = Tally(what="all")
    for tally in tallies.values():
        total.add(tally)
        lines.append(_line(tally))
    return "\n".join([*lines, _line(total)])


def _line(tally: Tally) -> str:
    failed = len(tally.failures)
    return f"{tally.cases:>7} {failed:>6} {tally.finished:>9} {tally.alone:>6} {tally.longest:>7.2f} s  {tally.what}"


def replay(case: str) -> list[str]:
    """Play one case again and tell what came of it. Returns the violations. Raises `ValueError` for what is no case."""
    if case.startswith("random "):
        report = play_seed(int(case.split()[1]))
        _tell(report.plan.describe())
        log, violations = report.log, report.violations
    else:
        group, kills = parse(case)
        again = play(group, kills)
        log, violations = again.log, again.violations
    for fault in log.faults:
        _tell(
            f"{fault.time:8.3f}  {fault.kind} {' '.join(fault.peers)}"
            + (f" for {fault.seconds:g} s" if fault.seconds < 1e9 else "")
        )
    for end in sorted(log.ends, key=lambda end: end.time):
        _tell(f"{end.time:8.3f}  {end.peer}, step {end.step}: {_outcome(end.outcome)}")
    for line in violations:
        _tell(f"- {line}")
    return violations


def _outcome(outcome: object) -> str:
    if isinstance(outcome, Failed):
        return f"{outcome.error}: {outcome.message}"
    return str(outcome)


def _tell(line: str) -> None:
    print(line, flush=True)  # noqa: T201  (a command)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns 1 if any case broke the promise."""
    parser = argparse.ArgumentParser(prog="python -m swarmavg.testing.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", default="all", choices=["all", "kills", "random", "replay"])
    parser.add_argument("case", nargs="*", help="with replay: a case as it was told, such as nodes4 1b17 0r9, or random 42")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds of random faults")
    parser.add_argument("--full", action="store_true", help="every pair of kills, where a part is played otherwise")
    chosen = parser.parse_args(arguments)
    if chosen.what == "replay":
        return 1 if replay(" ".join(chosen.case)) else 0
    jobs: list[Job] = []
    if chosen.what in ("all", "kills"):
        jobs += kill_jobs(full=chosen.full)
        _tell(f"a survivor's step may take {bound(1):g} virtual seconds after one death, {bound(2):g} after two")
    if chosen.what in ("all", "random"):
        jobs += random_jobs(chosen.seeds)
    tallies = run(jobs, chosen.processes)
    _tell(summary(tallies))
    return 1 if any(tally.failures for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
