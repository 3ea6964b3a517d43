"""A whole swarm in one process and in virtual time: real peers and averagers over the in-memory transport.

async def main():
    async with SimulatedSwarm(latency=0.01) as swarm:
        averagers = await swarm.averagers([[torch.ones(10)], [torch.zeros(10)]], prefix="run")
        results = await swarm.step_all(averagers)

run_virtual(main)

Each peer has a simulated process of its own, which can be frozen and killed, by hand or by a plan of faults.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypeVar, Unpack

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmavg.averager import Averager, AveragerOptions
from swarmavg.control import StepResult
from swarmavg.discovery.memory import SharedDirectory
from swarmavg.identifiers import PeerId
from swarmavg.peer import Peer
from swarmavg.security.identity import Identity
from swarmavg.testing.fault_runner import FaultRunner
from swarmavg.testing.faults import FaultPlan
from swarmavg.testing.message_watch import MessageWatch
from swarmavg.testing.processes import ProcessKilledError, SimulatedProcess, wall_clocks
from swarmavg.transport.interface import TransportLimits
from swarmavg.transport.memory import MemoryNetwork

T = TypeVar("T")
RoleName = Literal["node", "client", "auxiliary"]
Who: TypeAlias = int | Peer | Averager
"""A peer by its number, which counts from 0 in the order of creation; or itself, or the averager on it."""


class SimulatedSwarm:
    """Peers on one simulated network; all of it follows from `seed`.

    Made for `swarmavg.testing.clock.run_virtual`, without which there are no faults.

    Arguments:
        seed: of ids, random choices and jitter.
        latency: one-way delay of every link in seconds.
        bandwidth: of every link and direction in bytes per second; `None` = unlimited.
        directory: ``"shared"`` = records are seen by everyone at once; ``"gossip"`` = they travel over the network.
        faults: what befalls the peers and when; its `events` tell afterwards what did.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        latency: float = 0.01,
        bandwidth: float | None = None,
        directory: Literal["shared", "gossip"] = "shared",
        faults: FaultPlan | None = None,
    ) -> None:
        self.network = MemoryNetwork(seed=seed, latency=latency, bandwidth=bandwidth)
        self.rng = random.Random(seed)  # noqa: S311  (a simulation)
        self.peers: list[Peer] = []
        self.ids: list[PeerId] = []
        """One per peer, in the same order."""
        self.processes: list[SimulatedProcess] = []
        """One per peer, in the same order."""
        self._bandwidth = bandwidth
        self._plan = faults or FaultPlan()
        self._shared = SharedDirectory() if directory == "shared" else None
        self._stack = AsyncExitStack()
        self._messages: MessageWatch | None = None
        self._averagers: dict[int, Averager] = {}
        self._runner = FaultRunner(self._plan, self)

    async def __aenter__(self) -> Self:
        if getattr(asyncio.get_running_loop(), "is_virtual", False):
            self._stack.enter_context(wall_clocks())
        if self._plan.faults:
            self._runner.begin(self.messages)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the plan, lets frozen processes run again and closes everything that lives."""
        self._runner.end()
        for process in self.processes:
            process.thaw()
        await self._stack.aclose()

    # --- who takes part

    async def peer(self, *, client_mode: bool = False, limits: TransportLimits | None = None) -> Peer:
        """A started peer. The first one is everybody's bootstrap address.

        Raises `ProcessKilledError` if a fault kills it before it has started.
        """
        number = len(self.peers)
        shared = self._shared
        identity = Identity(Ed25519PrivateKey.from_private_bytes(self.rng.randbytes(32)))
        process = self._new_process(number, identity)
        with process.inside():
            peer = Peer(
                listen=[] if client_mode else [f"memory://peer{number}:1"],
                bootstrap=self._bootstrap(),
                identity=identity,
                directory=None if shared is None else shared.directory,
                limits=limits,
                transports={"memory": self.network.transport},
                rng=random.Random(self.rng.random()),  # noqa: S311
            )
        self.peers.append(peer)
        self.ids.append(identity.peer_id)
        self._runner.peer_made()
        await process.finish(peer.start())
        self._stack.push_async_callback(self._close, process, peer)
        return peer

    async def averager(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        prefix: str = "run",
        role: RoleName = "node",
        **options: Unpack[AveragerOptions],
    ) -> Averager:
        """A started averager on a peer of its own."""
        peer = await self.peer(client_mode=role == "client")
        process = self.process(peer)
        if role == "auxiliary":
            options["auxiliary"] = True
        with process.inside():
            averager = Averager(tensors, peer=peer, prefix=prefix, **options)
        self._averagers[self.number(peer)] = averager
        await process.finish(averager.start())
        self._stack.push_async_callback(self._close, process, averager)
        return averager

    async def averagers(
        self,
        tensors_of_each: Sequence[Sequence[torch.Tensor]],
        *,
        prefix: str = "run",
        roles: Sequence[RoleName] | None = None,
        **options: Unpack[AveragerOptions],
    ) -> list[Averager]:
        """One averager per list of tensors, each on a peer of its own; nodes unless `roles` says otherwise."""
        named = roles or ["node"] * len(tensors_of_each)
        return [
            await self.averager(tensors, prefix=prefix, role=role, **options)
            for tensors, role in zip(tensors_of_each, named, strict=True)
        ]

    # --- what they do

    async def step(self, who: Who, **options: Any) -> StepResult:
        """One step of an averager, inside its process.

        Raises what `Averager.step` does, and `ProcessKilledError` when the process is killed.
        """
        averager = who if isinstance(who, Averager) else self._averagers[self.number(who)]
        return await self.run(who, _step(averager, options))

    async def run(self, who: Who, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine inside a peer's process and return its result. Raises `ProcessKilledError` when it is killed."""
        return await self.process(who).finish(work)

    async def step_all(
        self, averagers: Sequence[Averager], weights: Sequence[float | None] | None = None, **options: Any
    ) -> list[StepResult]:
        """All of them step together; raises the first failure once all have ended."""
        outcomes = await self.step_each(averagers, weights, **options)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, StepResult)]

    async def step_each(
        self, averagers: Sequence[Averager], weights: Sequence[float | None] | None = None, **options: Any
    ) -> list[StepResult | BaseException]:
        """All of them step together; what became of each, in order, once all have ended or been killed."""
        chosen = weights or [None] * len(averagers)
        return await asyncio.gather(
            *(self.step(averager, weight=weight, **options) for averager, weight in zip(averagers, chosen, strict=True)),
            return_exceptions=True,
        )

    # --- what befalls them

    def kill(self, who: Who, *, abrupt: bool = False) -> None:
        """As ``kill -9``: nothing of it runs again; what it has sent still arrives, and then others notice.

        With `abrupt`, what is under way is lost too, and everybody connected to it notices at once.
        """
        self.process(who).kill()
        self.network.kill(self.ids[self.number(who)], flush=not abrupt)

    def freeze(self, who: Who) -> None:
        """As SIGSTOP: nothing of it runs until `thaw`; what is sent to it waits, its clocks go on."""
        self.process(who).freeze()

    def thaw(self, who: Who) -> None:
        """As SIGCONT."""
        self.process(who).thaw()

    def restore_bandwidth(self, source: Who, target: Who) -> None:
        """Give one directed link the bandwidth that all have."""
        rate = math.inf if self._bandwidth is None else self._bandwidth
        self.network.set_link(self.ids[self.number(source)], self.ids[self.number(target)], bandwidth=rate)

    # --- looking

    @property
    def messages(self) -> MessageWatch:
        """Sees all messages of streams that are opened after it was first asked for."""
        if self._messages is None:
            self._messages = MessageWatch(self.network)
        return self._messages

    def number(self, who: Who) -> int:
        """Of a peer; the first one is 0. Raises `ValueError` for one that is not of this swarm."""
        if isinstance(who, int):
            if isinstance(who, bool) or not 0 <= who < len(self.peers):
                raise ValueError(f"who must be a number below {len(self.peers)}, that of a peer made here, got {who!r}")
            return who
        return self.peers.index(who.peer if isinstance(who, Averager) else who)

    def process(self, who: Who) -> SimulatedProcess:
        """The process of a peer."""
        return self.processes[self.number(who)]

    # --- inside

    def _new_process(self, number: int, identity: Identity) -> SimulatedProcess:
        process = SimulatedProcess(f"peer{number}", clock_offset=self._plan.clock_offset(number))
        self.processes.append(process)
        self.network.set_host(identity.peer_id, process)
        return process

    def _bootstrap(self) -> list[str]:
        return [str(address) for peer in self.peers[:1] for address in peer.addresses]

    async def _close(self, process: SimulatedProcess, what: Peer | Averager) -> None:
        if process.alive:
            with suppress(ProcessKilledError):
                await process.finish(what.aclose())


async def _step(averager: Averager, options: dict[str, Any]) -> StepResult:
    result: StepResult = await averager.step(**options)
    return result
