"""What must have come out of a simulated run, computed from its event log alone: numpy, and no code of the product.

The promise of a round: all members that finish it hold the same averages and tell the same outcome, which is the weighted mean
over the contributors that they state; who fails holds what it held before; the dead cost time only. Each violation is a line
that says who, what and where.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from swarmavg.testing.event_log import FREEZE, KILL, EventLog, Failed, Finished, StepEnded, StepStarted
from swarmavg.testing.oracle_values import flat, mean, same_bits
from swarmavg.testing.troubles import Troubles

_EXPLAINABLE: Final = 5
"""Most contributors with which a wrong value is compared."""
_LOG_EPSILON: Final = 1e-9
"""Slack in comparisons of moments, and of fractions."""


class OracleError(AssertionError):
    """The run broke the promise; the message lists how."""


def check(log: EventLog) -> None:
    """Raise `OracleError` unless the run kept every promise."""
    found = violations(log)
    if found:
        raise OracleError(f"{len(found)} violations:\n" + "\n".join(f"- {line}" for line in found))


def violations(log: EventLog) -> list[str]:
    """All of them, one line each."""
    steps = _steps(log)
    rounds = _rounds(steps)
    found = [line for step in steps.values() for line in _returned(log, step)]
    for step in steps.values():
        found += _unchanged(step)
    for members in rounds.values():
        group = _Group(log, members, steps)
        shapes = [line for member in members for line in _spans(member)]
        found += shapes or [line for rule in _RULES for line in rule(group)]
    return [*found, *_found_each_other(log, steps)]


# ---- reading the log


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One call of `step`."""

    start: StepStarted
    end: StepEnded | None

    @property
    def who(self) -> str:
        return f"{self.start.peer}, step {self.start.step}"

    @property
    def key(self) -> tuple[str, int]:
        return self.start.peer, self.start.step

    @property
    def finished(self) -> Finished | None:
        return self.end.outcome if self.end is not None and isinstance(self.end.outcome, Finished) else None

    @property
    def failed(self) -> Failed | None:
        return self.end.outcome if self.end is not None and isinstance(self.end.outcome, Failed) else None

    @property
    def result(self) -> Finished:
        assert self.finished is not None
        return self.finished

    @property
    def until(self) -> float:
        return self.start.deadline if self.end is None else self.end.time

    @property
    def total(self) -> int:
        return sum(array.size for array in self.start.values)


def _steps(log: EventLog) -> dict[tuple[str, int], _Step]:
    ends = {(end.peer, end.step): end for end in log.ends}
    steps = {(start.peer, start.step): _Step(start, ends.pop((start.peer, start.step), None)) for start in log.starts}
    if ends or len(steps) != len(log.starts):
        raise ValueError(f"the log is no log: ends without a start {sorted(ends)}, or two starts of one step")
    return steps


def _rounds(steps: dict[tuple[str, int], _Step]) -> dict[str, list[_Step]]:
    """The members that finished each round."""
    rounds: dict[str, list[_Step]] = defaultdict(list)
    for step in steps.values():
        if step.finished is not None:
            rounds[step.finished.round_id].append(step)
    return rounds


class _Group:
    """A round that at least one member finished."""

    def __init__(self, log: EventLog, finishers: list[_Step], steps: dict[tuple[str, int], _Step]) -> None:
        self.log = log
        self.finishers = finishers
        self.round_id = finishers[0].result.round_id
        self.names = {name: number for step in finishers for name, number in step.result.members.items()}
        self.members = {name: steps[name, number] for name, number in self.names.items() if (name, number) in steps}
        began = min(step.start.time for step in (*self.members.values(), *finishers))
        ended = max(step.until for step in (*self.members.values(), *finishers))
        self.troubles = Troubles(log, began, ended)
        self._troubles_since = Troubles(log, began, float("inf"))

    @property
    def final(self) -> list[_Step]:
        """Members of the last term, as far as a result tells. The dead may have finished before; they prove nothing."""
        return [step for step in self.finishers if not step.result.diverged and step.start.peer not in self.troubles.killed]

    @property
    def untouched(self) -> list[_Step]:
        """Members that nothing happened to. Clients of whom the dead alone knew are not among them."""
        return [step for name, step in self.members.items() if name not in self.troubles.touched and not self._forgotten(step)]

    def out_of_sight(self, member: _Step, auxiliary: _Step) -> bool:
        """A client that has finished and left, of which an auxiliary peer is not told when the coordinator dies then."""
        finished_client = not member.start.reduces and member in self.finishers
        return finished_client and not auxiliary.start.receives and bool(self.troubles.killed & self.names.keys())

    def useless(self, step: _Step) -> bool:
        """An auxiliary peer for whom nobody is left to reduce: its round may end in any way."""
        contributors = {member.start.peer for member in self.members.values() if member.start.receives}
        return not step.start.receives and contributors <= self.troubles.killed

    def diverged_untouched(self) -> list[_Step]:
        """Members that diverged though nothing happened to them, not even while they served others after their step."""
        touched = self._troubles_since.touched
        return [step for step in self.finishers if step.result.diverged and step.start.peer not in touched]

    def _forgotten(self, step: _Step) -> bool:
        """A client that never heard of the group, because the leader died first: nobody else can reach a client to tell it."""
        name, results = step.start.peer, [finisher.result for finisher in self.finishers]
        missed = any(name in result.excluded for result in results)
        appears = any(name in names for result in results for _, _, names in result.spans)
        leaders = {member.start.peer for member in self.members.values() if member.start.reduces}
        return missed and not appears and not step.start.reduces and bool(leaders & self.troubles.killed)

    def together(self, one: _Step, other: _Step) -> bool:
        return self.troubles.together(one.start.peer, other.start.peer, self.names)


# ---- rules about one step


def _returned(log: EventLog, step: _Step) -> Iterator[str]:
    """Everybody alive returns within its bound; time spent frozen does not count."""
    peer, deadline = step.start.peer, step.start.deadline
    killed = min((fault.time for fault in log.faults if fault.kind == KILL and peer in fault.peers), default=float("inf"))
    frozen = sum(fault.seconds for fault in log.faults if fault.kind == FREEZE and peer in fault.peers)
    if step.end is None:
        if killed > deadline + frozen:
            yield f"{step.who} never returned, due by {deadline + frozen:.3f}"
    elif step.end.time > deadline + frozen + _LOG_EPSILON:
        yield f"{step.who} returned at {step.end.time:.3f}, due by {deadline + frozen:.3f}"


def _unchanged(step: _Step) -> Iterator[str]:
    """After a failed step, and in an auxiliary peer, the tensors hold exactly what they held before."""
    if step.end is None or (step.failed is None and step.start.receives):
        return
    same = same_bits(step.start.values, step.end.values)
    if not same.all():
        why = "is auxiliary" if step.failed is None else f"failed with {step.failed.error}"
        yield f"{step.who} {why}, but element {int(np.argmin(same))} changed"


def _spans(step: _Step) -> Iterator[str]:
    """Averaged and missing spans together are the whole vector, each element once, in order."""
    if not step.start.receives:
        return
    result, total = step.result, step.total
    listed = [(start, stop) for start, stop, _ in result.spans]
    if listed != sorted(listed) or list(result.missing) != sorted(result.missing):
        yield f"{step.who}: spans out of order: {listed}, missing {list(result.missing)}"
    at = 0
    for start, stop in sorted([*listed, *result.missing]):
        if start != at or stop <= start:
            yield f"{step.who}: spans do not partition the vector at element {at}: next is {start} to {stop}"
            return
        at = stop
    if at != total:
        yield f"{step.who}: spans end at element {at} of {total}"
        return
    averaged = sum(stop - start for start, stop, names in result.spans if names)
    fraction = averaged / total if total else 1.0
    if abs(fraction - result.fraction) > _LOG_EPSILON:
        yield f"{step.who}: fraction {result.fraction} where {averaged} of {total} elements were averaged"


# ---- rules about one round


def _plausible(group: _Group) -> Iterator[str]:
    """Contributors are members that were in a step of the round and have a weight."""
    for step in group.finishers:
        result = step.result
        if step.start.peer not in result.members:
            yield f"{step.who}: the group of its round does not include itself"
        if result.members != group.names:
            yield f"{step.who}: another group than the rest of round {group.round_id}"
        if not result.excluded <= result.members.keys():
            yield f"{step.who}: excluded who is no member: {sorted(result.excluded - result.members.keys())}"
        for start, stop, names in result.spans:
            for name in sorted(names):
                member = group.members.get(name)
                if name not in result.members or member is None:
                    yield f"{step.who}: {name} is in the average of {start} to {stop}, but never was in this round"
                elif not member.start.contributes:
                    yield f"{step.who}: {name} is in the average of {start} to {stop}, but contributes nothing"
                elif member.start.time > step.until:
                    yield f"{step.who}: {name} is in the average of {start} to {stop}, but began later"


def _whole(group: _Group) -> Iterator[str]:
    """Where peers only die, whom nothing happened to is in every average, and is neither excluded nor left behind."""
    if not group.troubles.only_deaths:
        return
    reducible = any(member.start.reduces for member in group.untouched)
    for step in group.final:
        for member in group.untouched:
            if member.start.peer in step.result.excluded and not group.out_of_sight(member, step):
                yield f"{step.who}: excluded {member.start.peer}, to whom nothing happened"
            if not member.start.contributes or not step.start.receives:
                continue
            for start, stop, names in step.result.spans:
                if member.start.peer not in names:
                    innocent = f"{member.start.peer}, to whom nothing happened,"
                    yield f"{step.who}: {innocent} is not in the average of {start} to {stop}"
            for start, stop in step.result.missing if reducible else ():
                yield f"{step.who}: {start} to {stop} not averaged, though {member.start.peer} lives"
    for step in group.diverged_untouched():
        yield f"{step.who}: diverged, though nothing happened to it"


def _carried_along(group: _Group) -> Iterator[str]:
    """A round that one member finished is finished by every member to whom nothing happened."""
    for step in group.untouched:
        reachable = [other for other in group.final if other is not step and group.together(step, other)]
        if not reachable or step.end is None or group.useless(step):
            continue
        if step.finished is None or step.finished.round_id != group.round_id:
            ended = "ended otherwise" if step.failed is None else f"failed with {step.failed.error}: {step.failed.message}"
            yield f"{step.who}: {ended}, though {reachable[0].who} finished round {group.round_id} with it"
        elif step in group.diverged_untouched():
            yield f"{step.who}: diverged, though it could reach {reachable[0].who} all the time"


def _agreed(group: _Group) -> Iterator[str]:
    """Members of the last term tell the same outcome and, at alpha 1, hold the same bits."""
    receivers = [step for step in group.final if step.start.receives]
    for index, step in enumerate(receivers):
        other = next((earlier for earlier in receivers[:index] if group.together(earlier, step)), None)
        if other is None:
            continue
        mine, theirs = step.result, other.result
        if _merged(mine) != _merged(theirs) or mine.missing != theirs.missing:
            yield f"{step.who} tells {_told(mine)}, {other.who} tells {_told(theirs)}"
        elif mine.fraction != theirs.fraction:
            yield f"{step.who} averaged a fraction of {mine.fraction}, {other.who} of {theirs.fraction}"
        elif step.start.alpha == other.start.alpha == 1.0:
            assert step.end is not None
            assert other.end is not None
            differs = ~same_bits(step.end.values, other.end.values) & _averaged(step)
            if differs.any():
                yield f"{step.who} and {other.who} differ in element {int(np.argmax(differs))}"


def _valued(group: _Group) -> Iterator[str]:
    """Every element is the weighted mean over the stated contributors, or what it was where there are none."""
    for step in group.finishers:
        if not step.start.receives:
            continue
        assert step.end is not None
        same = same_bits(step.start.values, step.end.values)
        local, now = flat(step.start.values), flat(step.end.values)
        unchanged = [*step.result.missing, *((start, stop) for start, stop, names in step.result.spans if not names)]
        for start, stop in unchanged:
            if not same[start:stop].all():
                at = start + int(np.argmin(same[start:stop]))
                yield f"{step.who}: element {at} was not averaged, but changed from {local[at]!r} to {now[at]!r}"
        for start, stop, names in step.result.spans:
            chosen = [group.members[name].start for name in sorted(names) if name in group.members]
            if not chosen or len(chosen) != len(names):
                continue  # reported elsewhere
            expected, bound = mean(group.log, step.start, chosen, slice(start, stop))
            wrong = ~(np.abs(now[start:stop] - expected) <= bound)  # a NaN is wrong too
            if wrong.any():
                at = int(np.argmax(wrong))
                yield (
                    f"{step.who}: element {start + at} is {now[start + at]!r}, but the mean over {sorted(names)} is "
                    f"{expected[at]!r} +- {bound[at]:.3g}{_explained(group, step, start + at)}"
                )


def _explained(group: _Group, step: _Step, at: int) -> str:
    """Which contributors would make the value right, for whoever looks for the error."""
    assert step.end is not None
    value = flat(step.end.values)[at]
    starts = [member.start for _, member in sorted(group.members.items()) if member.start.contributes]
    for count in range(1, min(len(starts), _EXPLAINABLE) + 1):
        for chosen in itertools.combinations(starts, count):
            expected, bound = mean(group.log, step.start, list(chosen), slice(at, at + 1))
            if abs(value - expected[0]) <= bound[0]:
                return f"; it is the mean over {[start.peer for start in chosen]}"
    return ""


_RULES: Final[tuple[Callable[[_Group], Iterator[str]], ...]] = (_plausible, _whole, _carried_along, _agreed, _valued)


# ---- rules about the run


def _found_each_other(log: EventLog, steps: dict[tuple[str, int], _Step]) -> Iterator[str]:
    """Two that look for a group for long enough, one of whom can reduce, do not both come back without one."""
    settled = max((fault.time for fault in log.faults), default=0.0)
    failed = [step for step in steps.values() if step.failed is not None]
    for index, one in enumerate(failed):
        for other in failed[:index]:
            since = max(one.start.time, other.start.time, settled)
            until = min(one.until, other.until)
            troubles = Troubles(log, since, until)
            if (
                until - since > log.grouping
                and one.start.peer != other.start.peer
                and (one.start.reduces or other.start.reduces)
                and not {one.start.peer, other.start.peer} & troubles.touched
            ):
                yield f"{one.who} and {other.who} looked for a group from {since:.3f} to {until:.3f} and both failed"


# ---- small things


def _averaged(step: _Step) -> NDArray[np.bool_]:
    mask = np.zeros(step.total, dtype=bool)
    for start, stop, names in step.result.spans:
        mask[start:stop] = bool(names)
    return mask


def _merged(result: Finished) -> list[tuple[int, int, frozenset[str]]]:
    """Neighbours with the same contributors as one."""
    merged: list[tuple[int, int, frozenset[str]]] = []
    for start, stop, names in result.spans:
        if merged and merged[-1][1:] == (start, names):
            merged[-1] = (merged[-1][0], stop, names)
        else:
            merged.append((start, stop, names))
    return merged


def _told(result: Finished) -> str:
    spans = ", ".join(f"{start}-{stop} from {sorted(names)}" for start, stop, names in result.spans)
    return f"({spans}; missing {list(result.missing)})"
