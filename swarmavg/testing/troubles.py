"""Whom the faults of a run excuse, and whom they do not: part of the oracle. Facts in, facts out; nothing of the product."""

from __future__ import annotations

from collections.abc import Iterable

from swarmavg.testing.event_log import CLOCK, CORRUPT, CUT, FREEZE, KILL, LEAVE, SLOW, STALL, EventLog, FaultApplied


class Troubles:
    """The faults of one run between two moments. Troubles shorter than the patience of the run are none."""

    def __init__(self, log: EventLog, first: float, last: float) -> None:
        self._clients = {start.peer for start in log.starts if not start.reduces}
        self._faults = [
            fault
            for fault in log.faults
            if fault.time <= last
            and fault.until >= first
            and (fault.kind in {KILL, LEAVE, CORRUPT} or fault.seconds > log.patience)
            and fault.kind != CLOCK  # no wrong clock excuses anything
        ]
        self.killed = {peer for fault in self._of(KILL) for peer in fault.peers}
        self.touched = {peer for fault in self._faults for peer in fault.peers}
        """Peers that were killed, left, or had to do with any other trouble."""
        self.only_deaths = all(fault.kind in {KILL, LEAVE} for fault in self._faults)
        """Nothing but deaths, which are noticed at once: nobody alive may be taken for dead."""

    def together(self, one: str, other: str, members: Iterable[str]) -> bool:
        """Whether the two could reach each other all the time, by way of others if need be. A client reaches no client."""
        peers = sorted(members)
        moments = {moment for fault in self._faults for moment in (fault.time, fault.until)}
        return all(other in self._reach(one, peers, moment) for moment in moments)

    def _reach(self, peer: str, peers: list[str], moment: float) -> set[str]:
        now = [fault for fault in self._faults if fault.time <= moment <= fault.until]
        alone = {each for fault in now if fault.kind in {KILL, FREEZE, LEAVE} for each in fault.peers}
        apart = {frozenset(fault.peers) for fault in now if fault.kind in {CUT, STALL, SLOW}}
        reached, frontier = {peer}, [peer]
        while frontier:
            here = frontier.pop()
            for there in peers:
                pair = {here, there}
                if there not in reached and not pair & alone and frozenset(pair) not in apart and not pair <= self._clients:
                    reached.add(there)
                    frontier.append(there)
        return reached

    def _of(self, kind: str) -> list[FaultApplied]:
        return [fault for fault in self._faults if fault.kind == kind]
