"""Gossip over real sockets, encrypted, as a swarm with a token runs it."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from swarmavg.identifiers import Address
from swarmavg.security.identity import Identity
from swarmavg.security.tokens import generate_token
from swarmavg.testing.contracts.directory import DIRECTORY_CHECKS, Check, Member, publishing_again_keeps_a_record_alive
from swarmavg.testing.gossip_node import GossipNode
from swarmavg_tcp import TcpTransport

TOKEN = generate_token()
ANYWHERE = Address.parse("tcp://127.0.0.1:0")


def make(number: int, bootstrap: Sequence[Address] = (), *, token: str = TOKEN, listens: bool = True) -> GossipNode:
    return GossipNode(
        Identity.generate(),
        TcpTransport,
        listen=ANYWHERE if listens else None,
        bootstrap=bootstrap,
        token=token,
        rng=random.Random(number),
    )


@asynccontextmanager
async def connect(count: int) -> AsyncIterator[Sequence[Member]]:
    nodes: list[GossipNode] = []
    try:
        for number in range(count):
            bootstrap = [nodes[0].address.with_peer(None)] if nodes else []
            nodes.append(await make(number, bootstrap).start())
        yield [Member(node.id, node.directory) for node in nodes]
    finally:
        await asyncio.gather(*(node.aclose() for node in nodes))


UNTIMED = [check for check in DIRECTORY_CHECKS if check is not publishing_again_keeps_a_record_alive]
"""On a machine that stands still for a second, a record may expire before it is published again."""


@pytest.mark.parametrize("check", UNTIMED, ids=lambda check: check.__name__)
def test_contract(check: Check) -> None:
    asyncio.run(check(connect))


def test_a_stranger_to_the_swarm_learns_nothing() -> None:
    async def main() -> None:
        member = make(0)
        await member.start()
        stranger = make(1, [member.address.with_peer(None)], token=generate_token())
        friend = make(2, [member.address])
        try:
            await member.directory.publish("run", b"secret", ttl=60.0, urgent=True)
            await stranger.start()
            await friend.start()
            async with friend.directory.watch("run") as changes, asyncio.timeout(20):
                change = await anext(changes)
            assert change.record is not None
            assert change.record.value == b"secret"
            async with member.directory.watch("peers") as changes, asyncio.timeout(20):
                assert {(await anext(changes)).owner, (await anext(changes)).owner} == {member.id, friend.id}
            assert await stranger.directory.fetch("run") == []
            assert member.directory.known_peers() == [friend.id]
            assert member.directory.linked_peers() == [friend.id]
        finally:
            await asyncio.gather(*(node.aclose() for node in (member, stranger, friend)))

    asyncio.run(main())


def test_addresses_are_told_with_the_bound_port() -> None:
    async def main() -> None:
        server = await make(0).start()
        client = await make(1, [server.address], listens=False).start()
        try:
            async with client.directory.watch("peers") as changes, asyncio.timeout(20):
                owners = {(await anext(changes)).owner, (await anext(changes)).owner}
            assert owners == {server.id, client.id}
            assert client.directory.addresses_of(server.id) == [server.address]
            assert server.address.port != 0
            assert client.directory.known_peers() == [server.id]
        finally:
            await asyncio.gather(server.aclose(), client.aclose())
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing is left running"

    asyncio.run(main())
