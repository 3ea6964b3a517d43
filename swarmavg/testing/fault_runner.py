"""Carries a plan of faults out on a simulated swarm: waits for the moments, does, undoes, and notes what was done."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextvars import Context
from typing import Any, Final, Protocol

from swarmavg.identifiers import PeerId
from swarmavg.testing.fault_kinds import Fault, Where
from swarmavg.testing.faults import FaultEvent, FaultPlan
from swarmavg.testing.message_watch import MessageSeen, MessageWatch
from swarmavg.testing.processes import SimulatedProcess
from swarmavg.transport.framing import HEAD
from swarmavg.transport.memory import MemoryNetwork

_KIND_MASK: Final = 0x40
"""Turns the number of every kind of frame into that of none."""


class Swarm(Protocol):
    """What is needed of `swarmavg.testing.network.SimulatedSwarm`."""

    network: MemoryNetwork
    ids: list[PeerId]
    processes: list[SimulatedProcess]

    def kill(self, who: int, *, abrupt: bool = False) -> None: ...

    def restore_bandwidth(self, source: int, target: int) -> None: ...


class FaultRunner:
    """Implements `fault_kinds.Battlefield`. Nothing happens before `begin` or after `end`."""

    def __init__(self, plan: FaultPlan, swarm: Swarm) -> None:
        self._plan = plan
        self._swarm = swarm
        self._rng = random.Random(plan.seed)  # noqa: S311  (repeatable, not secret)
        self._watch: MessageWatch | None = None
        self._waiting: list[int] = []  # faults whose moment has not come, in the plan's order
        self._early: list[int] = []  # faults whose moment has come before their peers
        self._counts: Counter[tuple[str, int]] = Counter()
        self._ordinals: dict[MessageSeen, tuple[str, int]] = {}
        self._holding: Counter[tuple[type[Fault], tuple[int, ...]]] = Counter()
        self._corrupting: dict[PeerId, Where] = {}
        self._timers: list[asyncio.TimerHandle] = []

    def begin(self, watch: MessageWatch) -> None:
        """Called in the event loop, before the first peer. Raises `RuntimeError` where time is not virtual."""
        if not hasattr(asyncio.get_running_loop(), "add_process"):
            raise RuntimeError("a plan of faults needs virtual time: use swarmavg.testing.clock.run_virtual")
        self._plan.events.clear()
        self._watch = watch
        watch.on_sending.append(self._on_sending)
        watch.on_sent.append(self._on_sent)
        watch.on_received.append(self._on_received)
        watch.rewrite = self._rewrite
        for index in range(len(self._plan.faults)):
            trigger = self._plan.triggers[index]
            if trigger is None:
                self._early.append(index)
            elif trigger.kind == "at":
                self._later(trigger.n, self._happens, index)
            else:
                self._waiting.append(index)

    def end(self) -> None:
        """No more faults; those under way are not undone."""
        for timer in self._timers:
            timer.cancel()
        self._waiting.clear()
        self._early.clear()
        if self._watch is not None:
            self._watch.on_sending.remove(self._on_sending)
            self._watch.on_sent.remove(self._on_sent)
            self._watch.on_received.remove(self._on_received)
            self._watch.rewrite = None
            self._watch = None

    def peer_made(self) -> None:
        """One more peer exists."""
        early, self._early = self._early, []
        for index in early:
            self._happens(index)

    # --- triggers

    def _on_sending(self, message: MessageSeen) -> None:
        sender = self._number(message.source)
        self._trigger("at_message", sender, message.number)
        what = "part" if message.is_part else "result" if message.is_result else ""
        if what:
            self._counts[what, sender] += 1
            ordinal = self._counts[what, sender]
            self._ordinals[message] = what, ordinal
            self._trigger(f"at_{what}", sender, ordinal)

    def _on_sent(self, message: MessageSeen) -> None:
        sender = self._number(message.source)
        self._trigger("after_message", sender, message.number)
        what, ordinal = self._ordinals.pop(message, ("", 0))
        if what:
            self._trigger(f"after_{what}", sender, ordinal)

    def _on_received(self, message: MessageSeen) -> None:
        assert self._watch is not None
        self._trigger("after_receiving", self._number(message.target), self._watch.received[message.target])

    def _trigger(self, kind: str, peer: int, count: int) -> None:
        for index in list(self._waiting):
            trigger = self._plan.triggers[index]
            assert trigger is not None
            of = self._plan.faults[index].peers[0] if trigger.of is None else trigger.of
            if (trigger.kind, of, trigger.n) == (kind, peer, count):
                self._waiting.remove(index)
                self._happens(index)

    # --- doing and undoing

    def _happens(self, index: int) -> None:
        fault = self._plan.faults[index]
        if max(fault.peers) >= len(self._swarm.ids):
            self._early.append(index)
            return
        self._note(index, fault.name, self._plan.describe_fault(index))
        self._holding[type(fault), fault.peers] += 1
        fault.begin(self)
        if fault.lasts is not None:
            self._later(fault.lasts, self._is_over, index)

    def _is_over(self, index: int) -> None:
        fault = self._plan.faults[index]
        self._holding[type(fault), fault.peers] -= 1
        if not self._holding[type(fault), fault.peers]:
            self._note(index, f"end of {fault.name}", f"over: {fault.describe()}")
            fault.end(self)

    def _note(self, index: int, action: str, text: str) -> None:
        now = asyncio.get_running_loop().time()
        self._plan.events.append(FaultEvent(now, index, action, self._plan.faults[index].peers, text))

    def _later(self, seconds: float, callback: Any, index: int) -> None:
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(seconds, callback, index, context=Context()))

    def _number(self, peer: PeerId) -> int:
        ids = self._swarm.ids
        return ids.index(peer) if peer in ids else -1  # a stranger that a test has brought along

    def _rewrite(self, message: MessageSeen, data: memoryview, first: bool) -> memoryview:
        """Flip a bit if that is due. A frame's start and header are written at once; a long payload follows in pieces."""
        where = self._corrupting.get(message.source)
        before_payload = HEAD.size + len(message.header) if first else 0
        if where is None or (where != "payload" and not first) or (where == "payload" and data.nbytes == before_payload):
            return data
        changed = bytearray(data)
        if where == "payload":
            changed[self._rng.randrange(before_payload, data.nbytes)] ^= 1 << self._rng.randrange(8)
        elif where == "header" and message.header:
            changed[self._rng.randrange(HEAD.size, before_payload)] ^= 1 << self._rng.randrange(8)
        else:
            changed[0] ^= _KIND_MASK
        del self._corrupting[message.source]
        return memoryview(bytes(changed))

    # --- for the faults

    @property
    def network(self) -> MemoryNetwork:
        return self._swarm.network

    def id_of(self, number: int) -> PeerId:
        return self._swarm.ids[number]

    def kill(self, number: int, *, abrupt: bool) -> None:
        self._swarm.kill(number, abrupt=abrupt)

    def freeze(self, number: int) -> None:
        self._swarm.processes[number].freeze()

    def thaw(self, number: int) -> None:
        self._swarm.processes[number].thaw()

    def step_clock(self, number: int, seconds: float) -> None:
        self._swarm.processes[number].wall_offset += seconds

    def corrupt_next(self, number: int, where: Where) -> None:
        self._corrupting[self.id_of(number)] = where

    def restore_bandwidth(self, source: int, target: int) -> None:
        self._swarm.restore_bandwidth(source, target)
