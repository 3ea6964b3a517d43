"""The control channels of a simulated round, and what befalls them. `round_world` adds the data channels.

Messages are encoded and decoded on their way and keep their order on a channel; what happens on different channels happens in
any order.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarmavg.errors import RemoteProtocolError
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round_control import LinkId, Term, decode_control, encode_control
from swarmavg.protocol.round_events import ControlLost, ControlMissing, ControlUp, LinkFailed, MessageCame, Send, TermSeen
from swarmavg.testing.round_world_members import PATIENCE, REQUEST_TIMEOUT, Actor, Control, MembersWorld, Why


class ControlWorld(MembersWorld):
    """Members that talk to each other."""

    def __init__(self, seed: int, roles: str, owners: Sequence[int], *, leader: int = 0) -> None:
        super().__init__(seed, roles, owners, leader=leader)
        self._waiting: dict[tuple[int, int], list[tuple[bytes, bytes]]] = {}
        self._dialling: set[tuple[int, int]] = set()
        self._cuts: dict[frozenset[int], int] = {}
        self._controls: list[Control] = []

    # ---- faults

    def kill(self, me: int, *, lossy: bool = False) -> None:
        """The process dies; its host answers."""
        actor = self.actors[me]
        actor.alive = False
        for link in [link for link in self._controls if me in link.ends and not link.broken]:
            link.lossy |= lossy
            self._break(link)

    def cut(self, a: int, b: int, seconds: float | None = None) -> None:
        """Nothing passes between two members, and neither is told."""
        pair = frozenset({a, b})
        serial = self._cuts[pair] = next(self._numbers)
        if seconds is not None:
            self.at(self.now + seconds, None, lambda: self._heal(pair, serial))

    def _heal(self, pair: frozenset[int], serial: int) -> None:
        if self._cuts.get(pair) != serial:
            return
        del self._cuts[pair]
        for link in self._controls:
            held, link.held = link.held, []
            for to, header, payload in held:
                self._under_way(link, to, header, payload)
        for member in sorted(pair):
            self.moved(self.actors[member])

    def break_control(self, a: int, b: int) -> None:
        """The control channel between two members is lost."""
        for link in self.actors[a].links.get(b, ()):
            self._break(link)

    def is_cut(self, a: int, b: int) -> bool:
        return frozenset({a, b}) in self._cuts

    # ---- control channels

    def hears(self, me: int, other: int) -> bool:
        actor = self.actors[other]
        return not self.is_cut(me, other) and actor.running and not actor.gone and bool(self.actors[me].links.get(other))

    def close(self, actor: Actor) -> None:
        for other, link in actor.all_links():
            link.closed_by.add(actor.me)
            self._later(link, other, Why(ExclusionCode.CANCELLED, "it ended its control channel"))

    def end(self, actor: Actor) -> None:
        super().end(actor)
        for _, link in actor.all_links():
            self._break(link)
        actor.links.clear()

    def send(self, actor: Actor, effect: Send) -> None:
        to, encoded = effect.to, encode_control(effect.term, effect.message)
        links = actor.links.get(to)
        if not links:
            self._waiting.setdefault((actor.me, to), []).append(encoded)
            self.open_to(actor, to)
        elif actor.me not in links[-1].closed_by and not links[-1].broken:
            self._under_way(links[-1], to, *encoded)

    def _under_way(self, link: Control, to: int, header: bytes, payload: bytes) -> None:
        arrival = link.last[to] = max(link.last.get(to, 0.0), self.now + self.delay())
        self.at(arrival, self.actors[to], lambda: self._arrive(link, to, header, payload))

    def _arrive(self, link: Control, to: int, header: bytes, payload: bytes) -> None:
        (sender,) = link.ends - {to}
        actor = self.actors[to]
        if link.lossy or link not in actor.links.get(sender, ()):
            return
        if self.is_cut(sender, to):
            link.held.append((to, header, payload))
            return
        term, message = decode_control(header, memoryview(payload), parts=len(self.owners))
        try:
            actor.machine.receive(MessageCame(sender, term, message), self.now)
        except RemoteProtocolError as error:
            raise AssertionError(f"an honest member is told that it broke the rules: {error}\n{self.story()}") from error
        self.settle(actor)

    def open_to(self, actor: Actor, other: int) -> None:
        if actor.closing or actor.links.get(other) or (actor.me, other) in self._dialling or self.roles[other] == "c":
            return
        self._dialling.add((actor.me, other))
        self.soon(actor, lambda: self._dialled(actor, self.actors[other], patient=True))

    def _dialled(self, actor: Actor, other: Actor, *, patient: bool) -> None:
        if actor.closing:
            self._dialling.discard((actor.me, other.me))
            return
        if other.alive and (self.is_cut(actor.me, other.me) or other.frozen):
            if patient:
                self.at(self.now + 2 * REQUEST_TIMEOUT, actor, lambda: self._dialled(actor, other, patient=False))
                return
            why: Why | None = Why(ExclusionCode.UNREACHABLE, "no answer")
        elif not other.alive:
            why = Why(ExclusionCode.UNREACHABLE, "connection refused")
        else:
            why = self.refusal(actor, other)
        self._dialling.discard((actor.me, other.me))
        if why is None:
            self._connect(actor, other)
        elif not actor.links.get(other.me):
            self._waiting.pop((actor.me, other.me), None)
            self.give(actor, ControlLost(other.me, why.code, why.detail, why.fenced_by))

    def refusal(self, actor: Actor, other: Actor) -> Why | None:
        """Why `other` takes no channel from `actor`, if so."""
        if actor.me in other.machine.out:
            return Why(ExclusionCode.FENCED, "the round goes on without you", other.machine.fencing)
        if other.gone:
            return Why(ExclusionCode.CANCELLED, "the round is over")
        return None

    def _connect(self, actor: Actor, other: Actor) -> None:
        link = Control(frozenset({actor.me, other.me}))
        self._controls.append(link)
        arrival = link.last[other.me] = self.now + self.delay()
        self.at(arrival, other, lambda: self._accept(link, other, actor))
        self._stands(link, actor, other.me)

    def _accept(self, link: Control, other: Actor, actor: Actor) -> None:
        why = self.refusal(actor, other)
        if why is None:
            if not link.broken:
                self._stands(link, other, actor.me)
        else:
            link.broken = link.lossy = True
            self._later(link, actor.me, why)

    def _stands(self, link: Control, actor: Actor, other: int) -> None:
        actor.links.setdefault(other, []).append(link)
        link.heard[actor.me] = self.now
        for encoded in self._waiting.pop((actor.me, other), []):
            self._under_way(link, other, *encoded)
        self.give(actor, ControlUp(other))

    def judge(self, actor: Actor) -> None:
        """Give up control channels on which nothing has come for the patience of this member."""
        for other, link in actor.all_links():
            if not link.broken and self.actors[other].running and not self.is_cut(actor.me, other):
                link.heard[actor.me] = self.now
            elif self.now - link.heard[actor.me] > PATIENCE and not actor.closing:
                link.broken = True
                self._lost(link, actor, Why(ExclusionCode.SILENT, "no byte"))
                self._later(link, other, Why(ExclusionCode.CONNECTION_LOST, "the other side gave the channel up"))

    def forgive(self, actor: Actor, seconds: float) -> None:
        """It stood still itself: nobody is accused of that time."""
        for _, link in actor.all_links():
            link.heard[actor.me] += seconds

    def _break(self, link: Control) -> None:
        link.broken = True
        for member in sorted(link.ends):
            self._later(link, member, Why(ExclusionCode.CONNECTION_LOST, "reset"))

    def _later(self, link: Control, member: int, why: Why) -> None:
        """The end of a channel reaches one end of it, after what was sent before."""
        arrival = max(link.last.get(member, 0.0), self.now + self.delay())
        link.last[member] = arrival
        actor = self.actors[member]
        self.at(arrival, actor, lambda: self._lost(link, actor, why))

    def _lost(self, link: Control, actor: Actor, why: Why) -> None:
        (other,) = link.ends - {actor.me}
        if link not in actor.links.get(other, ()):
            return
        if why.code in (ExclusionCode.CONNECTION_LOST, ExclusionCode.CANCELLED) and self.is_cut(actor.me, other):
            return  # it does not get here; the silence will be noticed
        actor.links[other].remove(link)
        link.broken = True
        if not actor.closing and not actor.links[other]:
            self._waiting.pop((actor.me, other), None)
            self.give(actor, ControlLost(other, why.code, why.detail, why.fenced_by))

    # ---- for the data channels

    def miss(self, actor: Actor) -> None:
        """The coordinator of the first term looks whether everybody has come."""
        machine = actor.machine
        if self.now > PATIENCE and machine.coordinates and machine.term.number == 0 and not machine.state.over:
            for member in sorted(machine.unconnected()):
                self.give(actor, ControlMissing(member, "no channel from it"))

    def see_term(self, actor: Actor, sender: int, term: Term) -> None:
        if term > actor.machine.term:
            self.give(actor, TermSeen(sender, term))

    def accuse(self, actor: Actor, link: LinkId, other: int, why: Why) -> None:
        """A data channel has ended at one of its ends before its work was done."""
        if actor.closing:
            return
        if why.fenced_by is not None:
            self.give(actor, ControlLost(other, why.code, why.detail, why.fenced_by))
        elif not why.blameless:
            self.give(actor, LinkFailed(link, other, why.code, why.detail))
