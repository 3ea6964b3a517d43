"""One group, one round, and peers that are killed at chosen message boundaries: the cases of the exhaustive simulation.

A case replays exactly: it is a group and a few kills, written ``nodes4 1b17 0r9``: peer 1 dies before it sends its 17th
message, and peer 0 when it has received its 9th.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

import torch

from swarmavg.averager import Averager
from swarmavg.compression import Float16Compression, NoCompression
from swarmavg.compression.interface import Compression
from swarmavg.identifiers import PeerId
from swarmavg.testing import oracle
from swarmavg.testing.event_log import EventLog, Finished, StepEnded
from swarmavg.testing.judged_run import judged_run
from swarmavg.testing.message_watch import MessageSeen
from swarmavg.testing.network import RoleName, SimulatedSwarm
from swarmavg.testing.round_recorder import Recorder

LATENCY: Final = 0.01
PART_BYTES: Final = 64
WINDOW: Final = 2.0
REQUEST_TIMEOUT: Final = 0.5
SENDER_TIMEOUT: Final = 1.0
CODEC: Final = {"codec_relative": 2.0**-11, "codec_absolute": 2.0**-25}
"""What `Float16Compression` promises."""


def bound(kills: int) -> float:
    """Virtual seconds within which a survivor's step returns an average: one attempt per death and one more.

    An attempt takes a matchmaking window at most, and four times a request timeout: for the presence of a dead peer that is
    probed, for a suspect that is probed, for the reports of a term, and for the next coordinator's.
    """
    return (kills + 1) * (WINDOW + 4 * REQUEST_TIMEOUT)


STEP_TIMEOUT: Final = bound(2)
"""The same in all cases, so that a case runs as another one does until they differ in a kill."""


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """A group that averages once."""

    name: str
    roles: tuple[RoleName, ...]
    weights: tuple[float, ...]
    elements: int
    compression: Compression | None = None


def _spec(name: str, roles: str, *weights: float, elements: int, compression: Compression | None = None) -> GroupSpec:
    letters: dict[str, RoleName] = {"n": "node", "c": "client", "a": "auxiliary"}
    return GroupSpec(
        name=name,
        roles=tuple(letters[letter] for letter in roles),
        weights=weights,
        elements=elements,
        compression=compression,
    )


GROUPS: Final[dict[str, GroupSpec]] = {
    spec.name: spec
    for spec in (
        _spec("nodes3", "nnn", 1.0, 2.5, 1.0, elements=120),
        _spec("client3", "ncn", 1.0, 1.0, 0.5, elements=80),
        _spec("auxiliary3", "can", 3.0, 1.0, 1.0, elements=80),
        _spec("clients3", "cac", 1.0, 1.0, 0.25, elements=40),
        _spec("nodes4", "nnnn", 1.0, 1.0, 2.5, 1.0, elements=160),
        _spec("mixed4", "ncan", 1.0, 2.5, 1.0, 1.0, elements=120),
        _spec("clients4", "ccaa", 1.0, 0.5, 1.0, 1.0, elements=80),
        _spec("zero4", "nncn", 0.0, 1.0, 2.5, 1.0, elements=120),
        _spec("half4", "nncn", 1.0, 1.0, 2.5, 1.0, elements=120, compression=Float16Compression()),
        _spec("nodes5", "nnnnn", 1.0, 1.0, 1.0, 2.5, 1.0, elements=200),
        _spec("mixed5", "ncnca", 1.0, 2.5, 1.0, 0.5, 1.0, elements=120),
    )
}


# ---- boundaries and kills


@dataclass(frozen=True, order=True, slots=True)
class Kill:
    """A peer dies at one of its message boundaries."""

    peer: int
    when: str
    """``b``: before it sends its n-th message, of which nothing leaves. ``r``: when it has read its n-th."""
    number: int
    lossy: bool = False
    """Whether what it had sent and is still under way is lost too."""

    def __str__(self) -> str:
        return f"{self.peer}{self.when}{self.number}{'!' if self.lossy else ''}"

    @classmethod
    def parse(cls, text: str) -> Self:
        found = re.fullmatch(r"(\d+)([br])(\d+)(!?)", text)
        if found is None:
            raise ValueError(f"a kill must be written like 1b17, 0r9 or 0r9!, got {text!r}")
        peer, when, number, lossy = found.groups()
        return cls(int(peer), when, int(number), lossy == "!")


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where a peer could die: just before a message leaves it, or just after it has read one."""

    kill: Kill
    protocol: bool
    """Whether the message belongs to matchmaking or the round, and not to the connection under them."""


@dataclass(kw_only=True)
class Report:
    """How a case went."""

    case: str
    log: EventLog
    violations: list[str]
    boundaries: list[Boundary] = field(repr=False)
    """All that were passed since the last kill, in order."""
    seconds: float
    """Virtual time when the last survivor returned."""
    finished: int
    """Survivors that averaged."""


class _Scene:
    """One running case."""

    def __init__(self, group: GroupSpec, kills: Sequence[Kill]) -> None:
        self.group = group
        self.pending = list(kills)
        self.boundaries: list[Boundary] = []
        self.recorder = Recorder(
            patience=REQUEST_TIMEOUT / 2,
            grouping=WINDOW + 4 * REQUEST_TIMEOUT,
            **(CODEC if group.compression is not None else {}),
        )
        self.numbers: dict[PeerId, int] = {}
        self.dead: set[int] = set()
        self.over = False
        self.swarm = SimulatedSwarm(seed=len(group.name), latency=LATENCY)
        self.watch = self.swarm.messages
        self.watch.on_sending.append(self._sending)
        self.watch.on_received.append(self._received)

    def _sending(self, message: MessageSeen) -> None:
        self._pass(message.source, "b", message.number, message)

    def _received(self, message: MessageSeen) -> None:
        self._pass(message.target, "r", self.watch.received[message.target], message)

    def _pass(self, peer: PeerId, when: str, number: int, message: MessageSeen) -> None:
        position = self.numbers.get(peer)
        if self.over or position is None or position in self.dead:
            return
        if self.pending and (self.pending[0].peer, self.pending[0].when, self.pending[0].number) == (position, when, number):
            self._kill(self.pending.pop(0))
        else:
            self.boundaries.append(Boundary(Kill(position, when, number), message.kind == "message"))

    def _kill(self, kill: Kill) -> None:
        self.dead.add(kill.peer)
        self.boundaries.clear()
        self.recorder.fault("kill", str(kill.peer))
        self.swarm.kill(kill.peer, abrupt=kill.lossy)

    async def play(self) -> None:
        async with self.swarm:
            for position, averager, tensors in [entry async for entry in self._averagers()]:
                self.numbers[averager.peer_id] = position
                auxiliary = self.group.roles[position] == "auxiliary"
                self.recorder.start(
                    self.swarm,
                    averager,
                    tensors,
                    name=str(position),
                    weight=None if auxiliary else self.group.weights[position],
                    timeout=STEP_TIMEOUT,
                )
            await self.recorder.all_ended()
            self.over = True

    async def _averagers(self) -> AsyncIterator[tuple[int, Averager, list[torch.Tensor]]]:
        generator = torch.Generator().manual_seed(len(self.group.name))
        for position, role in enumerate(self.group.roles):
            tensors = [torch.randn(size, generator=generator) for size in (self.group.elements - 7, 7)]
            averager = await self.swarm.averager(
                tensors,
                role=role,
                target_group_size=len(self.group.roles),
                part_size_bytes=PART_BYTES,
                min_matchmaking_time=WINDOW,
                request_timeout=REQUEST_TIMEOUT,
                sender_timeout=SENDER_TIMEOUT,
                compression=self.group.compression or NoCompression(),
            )
            yield position, averager, tensors


def play(group: GroupSpec, kills: Sequence[Kill] = ()) -> Report:
    """Run one case and judge it. `kills` in the order in which they happen."""
    case = " ".join([group.name, *map(str, kills)])
    scene: list[_Scene] = []

    async def main() -> None:
        scene.append(_Scene(group, kills))
        await scene[0].play()

    found = judged_run(main)
    log = scene[0].recorder.finish()
    found += oracle.violations(log)
    found += [line for end in log.ends for line in _late(end, bound(len(kills)))]
    found += [f"{kill} was never reached" for kill in scene[0].pending]
    return Report(
        case=case,
        log=log,
        violations=found,
        boundaries=scene[0].boundaries,
        seconds=max((end.time for end in log.ends), default=0.0),
        finished=sum(isinstance(end.outcome, Finished) for end in log.ends),
    )


def _late(end: StepEnded, due: float) -> Iterator[str]:
    """Who finds nobody to average with may look until its timeout; an average comes sooner."""
    if isinstance(end.outcome, Finished) and end.time > due:
        yield f"{end.peer}, step {end.step} averaged at {end.time:.3f}, due by {due:.3f}"


def parse(case: str) -> tuple[GroupSpec, list[Kill]]:
    """The inverse of `Report.case`. Raises `ValueError`."""
    name, *kills = case.split()
    if name not in GROUPS:
        raise ValueError(f"unknown group {name!r}; there are {', '.join(GROUPS)}")
    return GROUPS[name], [Kill.parse(kill) for kill in kills]


# ---- all cases


def singles(group: GroupSpec, *, lossy: bool = False) -> Iterator[tuple[Kill, ...]]:
    """Each peer killed at each of its boundaries in the fault-free run."""
    for boundary in play(group).boundaries:
        yield (replace(boundary.kill, lossy=lossy),)


def pairs_after(group: GroupSpec, first: Kill, *, stride: int = 1) -> Iterator[tuple[Kill, ...]]:
    """A first kill, and a second one at each boundary that any other peer passes after it, or at each `stride`-th."""
    passed = [boundary for boundary in play(group, [first]).boundaries if boundary.protocol]
    for boundary in passed[first.number % stride :: stride]:
        yield first, boundary.kill


PAIR_STRIDES: Final = {"mixed4": 1, "nodes4": 4, "zero4": 8, "half4": 8, "clients4": 8}
"""Groups of which pairs are killed: all pairs of boundaries of matchmaking and the round, or each so many-th second one."""
