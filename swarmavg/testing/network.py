"""A whole swarm in one process and in virtual time: real peers and averagers over the in-memory transport.

async def main():
    async with SimulatedSwarm(latency=0.01) as swarm:
        averagers = await swarm.averagers([[torch.ones(10)], [torch.zeros(10)]], prefix="run")
        results = await swarm.step_all(averagers)

run_virtual(main)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmavg.averager import Averager, AveragerOptions
from swarmavg.control import StepResult
from swarmavg.discovery.memory import SharedDirectory
from swarmavg.peer import Peer
from swarmavg.security.identity import Identity
from swarmavg.transport.interface import TransportLimits
from swarmavg.transport.memory import MemoryNetwork

RoleName = Literal["node", "client", "auxiliary"]


class SimulatedSwarm:
    """Peers on one simulated network; all of it follows from `seed`.

    Arguments:
        seed: of ids, random choices and jitter.
        latency: one-way delay of every link in seconds.
        bandwidth: of every link and direction in bytes per second; `None` = unlimited.
        directory: ``"shared"`` = records are seen by everyone at once; ``"gossip"`` = they travel over the network.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        latency: float = 0.01,
        bandwidth: float | None = None,
        directory: Literal["shared", "gossip"] = "shared",
    ) -> None:
        self.network = MemoryNetwork(seed=seed, latency=latency, bandwidth=bandwidth)
        self.rng = random.Random(seed)  # noqa: S311  (a simulation)
        self.peers: list[Peer] = []
        self._shared = SharedDirectory() if directory == "shared" else None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def peer(self, *, client_mode: bool = False, limits: TransportLimits | None = None) -> Peer:
        """A started peer. The first one is everybody's bootstrap address."""
        number = len(self.peers)
        shared = self._shared
        peer = Peer(
            listen=[] if client_mode else [f"memory://peer{number}:1"],
            bootstrap=self._bootstrap(),
            identity=Identity(Ed25519PrivateKey.from_private_bytes(self.rng.randbytes(32))),
            directory=None if shared is None else shared.directory,
            limits=limits,
            transports={"memory": self.network.transport},
            rng=random.Random(self.rng.random()),  # noqa: S311
        )
        self.peers.append(await self._stack.enter_async_context(peer))
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
        if role == "auxiliary":
            options["auxiliary"] = True
        return await self._stack.enter_async_context(Averager(tensors, peer=peer, prefix=prefix, **options))

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

    async def step_all(
        self, averagers: Sequence[Averager], weights: Sequence[float | None] | None = None, **options: Any
    ) -> list[StepResult]:
        """All of them step together; raises the first failure once all have ended."""
        chosen = weights or [None] * len(averagers)
        outcomes = await asyncio.gather(
            *(averager.step(weight=weight, **options) for averager, weight in zip(averagers, chosen, strict=True)),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, StepResult)]

    def _bootstrap(self) -> list[str]:
        return [str(address) for peer in self.peers[:1] for address in peer.addresses]
