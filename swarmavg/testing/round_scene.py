"""One round of a simulated swarm to which something happens at a chosen message, and what must have come of it.

Where the event log and the oracle judge any run, a scene is for tests that say exactly who ends how. Its tensors hold whole
numbers whose means are whole, so that sums in any order give the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self

import torch

from swarmavg.averager import Averager
from swarmavg.control import StepResult
from swarmavg.testing.faults import FaultPlan
from swarmavg.testing.message_watch import MessageSeen
from swarmavg.testing.network import RoleName, SimulatedSwarm
from swarmavg.testing.processes import ProcessKilledError

PART: Final = 64
"""Elements per part."""
SETTINGS: Final[dict[str, Any]] = {
    "part_size_bytes": 4 * PART,
    "min_matchmaking_time": 2.0,
    "request_timeout": 0.5,
    "sender_timeout": 1.0,
    "reducer_timeout": 2.0,
}
NOTICED: Final = 8.0
"""Virtual seconds in which, with these settings, any trouble is noticed and what it left undone is done."""
AFTERWARDS: Final = 40.0
"""Virtual seconds after the steps in which all rounds are over, also for those that come late."""
_ROLES: Final[dict[str, RoleName]] = {"n": "node", "c": "client", "a": "auxiliary"}
Moment = Literal["sending", "sent", "received"]


def whole_numbers(peers: int, size: int) -> list[torch.Tensor]:
    """Numbers whose means over one to six of the peers are whole: float32 holds sums and means exactly."""
    generator = torch.Generator().manual_seed(peers)
    return [60.0 * torch.randint(-500, 500, (size,), generator=generator).float() for _ in range(peers)]


class Scene:
    """Averagers in the `roles` of the letters n, c and a, which step once, together. Peers are numbered from 0.

    Usage, in virtual time: `async with Scene("nnnc") as scene`, then `when` something is sent `act`, then `await scene.step()`,
    then `check` who survived.
    """

    def __init__(
        self,
        roles: str,
        *,
        parts: int = 1,
        weights: Sequence[float] | None = None,
        tensors: Sequence[torch.Tensor] | None = None,
        faults: FaultPlan | None = None,
        tolerance: float = 0.0,
        **settings: Any,
    ) -> None:
        self.roles = [_ROLES[letter] for letter in roles]
        reducers = len(roles) - roles.count("c")
        self.tensors = list(tensors or whole_numbers(len(roles), reducers * parts * PART))
        self.before = [tensor.clone() for tensor in self.tensors]
        self.weights = list(weights or [1.0] * len(roles))
        self.settings = {**SETTINGS, "target_group_size": len(roles), **settings}
        self.swarm = SimulatedSwarm(seed=len(roles), faults=faults)
        self.averagers: list[Averager] = []
        self.outcomes: list[StepResult | BaseException] = []
        self.seconds: dict[int, float] = {}
        """By peer: how long its step took."""
        self.leader = -1
        """Of the latest group."""
        self._tolerance = tolerance
        self._errors: list[Exception] = []
        self._pending = 0
        """Acts whose message has not come."""

    async def __aenter__(self) -> Self:
        await self.swarm.__aenter__()
        self.swarm.messages.on_sending.append(self._note_leader)
        tensors = [[tensor] for tensor in self.tensors]
        self.averagers = await self.swarm.averagers(tensors, roles=self.roles, **self.settings)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.swarm.__aexit__(kind, error, trace)

    # ---- what happens

    def when(self, chosen: Callable[[str, int, int], bool], act: Callable[[int, int], object], moment: Moment = "sent") -> None:
        """Act once, at the first message of a round that is chosen by its content, its source and its target.

        `moment`: before a byte of it has left, when it is on its way, or when its target has read it.
        """
        watch = self.swarm.messages
        listeners = {"sending": watch.on_sending, "sent": watch.on_sent, "received": watch.on_received}[moment]

        def listen(message: MessageSeen) -> None:
            try:
                ends = self.number(message.source), self.number(message.target)
                if message.kind == "message" and chosen(message.content, *ends):
                    listeners.remove(listen)
                    self._pending -= 1
                    act(*ends)
            except Exception as error:  # noqa: BLE001  (callbacks must not raise; `step` does instead)
                self._errors.append(error)

        listeners.append(listen)
        self._pending += 1

    def _note_leader(self, message: MessageSeen) -> None:
        if message.content == "begin":
            self.leader = self.number(message.source)

    def cut(self, one: Iterable[int], other: Iterable[int], *, seconds: float | None = None) -> None:
        """Nothing passes between the two sides any more, or for so long."""
        ids = self.swarm.ids
        pairs = [(ids[a], ids[b]) for a in one for b in list(other)]
        for pair in pairs:
            self.swarm.network.cut(*pair)
        if seconds is not None:
            for pair in pairs:
                asyncio.get_running_loop().call_later(seconds, self.swarm.network.heal, *pair)

    def stall(self, source: int, *targets: int) -> None:
        """The source's bytes for the targets do not move any more."""
        for target in targets:
            self.swarm.network.stall(self.swarm.ids[source], self.swarm.ids[target])

    def freeze(self, peer: int, seconds: float) -> None:
        self.swarm.freeze(peer)
        asyncio.get_running_loop().call_later(seconds, self.swarm.thaw, peer)

    def number(self, peer_id: object) -> int:
        return next(number for number, own in enumerate(self.swarm.ids) if own == peer_id)

    def others(self, *peers: int) -> list[int]:
        """All but these."""
        return [number for number in range(len(self.roles)) if number not in peers]

    async def step(self, **options: Any) -> None:
        """All of them step; returns when rounds are over for everybody."""
        await self.steps({number: self._step(number, options) for number in range(len(self.roles))})

    async def steps(self, running: dict[int, Any]) -> None:
        """Wait for the steps of all peers."""
        began = asyncio.get_running_loop().time()

        async def ended(number: int) -> StepResult:
            try:
                result: StepResult = await running[number]
                return result
            finally:
                self.seconds[number] = asyncio.get_running_loop().time() - began

        self.outcomes = await asyncio.gather(*map(ended, range(len(self.roles))), return_exceptions=True)
        await asyncio.sleep(AFTERWARDS)
        if self._errors:
            raise self._errors[0]
        if self._pending:
            raise AssertionError(f"{self._pending} of the messages at which something was to happen never came")

    async def _step(self, number: int, options: dict[str, Any]) -> StepResult:
        return await self.swarm.step(number, **{"weight": self.weight(number), "timeout": 100, **options})

    def weight(self, number: int) -> float | None:
        return None if self.roles[number] == "auxiliary" else self.weights[number]

    # ---- what came of it

    def result(self, number: int) -> StepResult:
        outcome = self.outcomes[number]
        if isinstance(outcome, StepResult):
            return outcome
        raise AssertionError(f"peer {number} has no result, but {outcome!r}")

    def contributors(self, number: int) -> list[tuple[int, int, frozenset[int]]]:
        """Who is in the average of which elements."""
        return [(span.start, span.stop, frozenset(map(self.number, peers))) for span, peers in self.result(number).contributors]

    def excluded(self, number: int) -> dict[int, str]:
        """Whom the result of a peer excludes, and by which code."""
        return {self.number(peer): exclusion.code.value for peer, exclusion in self.result(number).excluded.items()}

    def story(self, number: int) -> str:
        return self.averagers[number].story(self.result(number).round_id)

    def name(self, number: int) -> str:
        """As stories and logs call a peer."""
        return self.swarm.ids[number].short

    def check(self, survivors: Iterable[int], *, outs: Iterable[int] = (), within: float = NOTICED, attempts: int = 1) -> None:
        """The survivors, and nobody else, have a result: the mean over whom it names, and the same for all, to the last bit.

        They exclude nobody but `outs`. Whoever is alive without a result has the tensors that it had before.
        """
        survivors, outs = sorted(survivors), set(outs)
        for number in range(len(self.roles)):
            if number in survivors:
                self._check_result(number, outs, within, attempts)
            elif isinstance(self.outcomes[number], StepResult):
                raise AssertionError(f"peer {number} has a result too, {self.outcomes[number]!r}")
            elif not isinstance(self.outcomes[number], ProcessKilledError):
                self.check_unchanged(number)
        receivers = [number for number in survivors if self.roles[number] != "auxiliary"]
        for number in receivers:
            if self.contributors(number) != self.contributors(receivers[0]):
                raise AssertionError(f"{self.contributors(number)} and {self.contributors(receivers[0])}")
            if self.settings.get("averaging_alpha", 1.0) == 1.0 and not torch.equal(
                self.tensors[number], self.tensors[receivers[0]]
            ):
                raise AssertionError(f"peers {number} and {receivers[0]} hold different numbers")

    def _check_result(self, number: int, outs: set[int], within: float, attempts: int) -> None:
        result = self.result(number)
        problems = {
            "it says that it diverged": result.diverged,
            f"it took {result.attempts} attempts": result.attempts != attempts,
            f"it took {self.seconds[number]:.3f} s": self.seconds[number] > within,
            f"it excludes {self.excluded(number)}": bool(self.excluded(number).keys() - outs),
            f"it misses {result.missing}": bool(result.missing) or result.fraction != 1.0,
        }
        if any(problems.values()):
            wrong = [problem for problem, holds in problems.items() if holds]
            raise AssertionError(f"peer {number}: {', '.join(wrong)}\n{self.story(number)}")
        if self.roles[number] == "auxiliary":
            self.check_unchanged(number)
        else:
            self.check_values(number)

    def check_values(self, number: int) -> None:
        """A peer holds the mean over whom its result names, in every element."""
        at, alpha = 0, self.settings.get("averaging_alpha", 1.0)
        for start, stop, members in self.contributors(number):
            if start != at:
                raise AssertionError(f"peer {number}: nothing is said of elements {at} to {start}")
            at = stop
            total = sum(self.weights[member] for member in members)
            mean = torch.stack([self.weights[m] * self.before[m][start:stop].double() for m in sorted(members)]).sum(0) / total
            local = self.before[number][start:stop].double()
            expected = (local + alpha * (mean - local)).float()
            torch.testing.assert_close(
                self.tensors[number][start:stop],
                expected,
                rtol=self._tolerance,
                atol=self._tolerance,
                msg=lambda text: f"peer {number}, elements {start} to {stop} from {sorted(members)}: {text}",  # noqa: B023
            )
        if at != len(self.tensors[number]):
            raise AssertionError(f"peer {number}: spans end at {at}")

    def check_unchanged(self, number: int) -> None:
        """A peer holds what it held before its step."""
        if not torch.equal(self.tensors[number], self.before[number]):
            raise AssertionError(f"the tensors of peer {number} have changed")
