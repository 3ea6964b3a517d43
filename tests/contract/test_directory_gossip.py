"""The directory contract on gossip, over a simulated network."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from swarmavg.identifiers import Address
from swarmavg.security.identity import Identity
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.contracts.directory import DIRECTORY_CHECKS, Check, Connect, Member
from swarmavg.testing.gossip_node import GossipNode
from swarmavg.transport.memory import MemoryNetwork


@asynccontextmanager
async def connect(count: int, *, clients: bool) -> AsyncIterator[Sequence[Member]]:
    """`count` nodes; with `clients`, all of them can only dial, and one more stands between them."""
    network = MemoryNetwork(latency=0.01)

    def node(number: int, *, listens: bool) -> GossipNode:
        return GossipNode(
            Identity.generate(),
            network.transport,
            listen=Address("memory", f"host{number}", 1) if listens else None,
            bootstrap=[Address("memory", "host0", 1)],
            rng=random.Random(number),
        )

    nodes = [node(number, listens=not clients) for number in range(count)]
    hub = [node(0, listens=True)] if clients else []
    for one in (*hub, *nodes):
        await one.start()
    try:
        yield [Member(one.id, one.directory) for one in nodes]
    finally:
        await asyncio.gather(*(one.aclose() for one in (*hub, *nodes)))


def run(check: Callable[[Connect], Coroutine[Any, Any, None]], *, clients: bool) -> None:
    run_virtual(lambda: check(partial(connect, clients=clients)))


@pytest.mark.parametrize("check", DIRECTORY_CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check) -> None:
    run(check, clients=False)


@pytest.mark.parametrize("check", DIRECTORY_CHECKS, ids=lambda check: check.__name__)
def test_contract_among_clients(check: Check) -> None:
    run(check, clients=True)
