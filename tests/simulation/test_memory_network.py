"""The in-process network: its latencies, rates and faults, by the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from swarmavg.errors import ChannelLostError, ListenError, PeerUnreachableError
from swarmavg.identifiers import Address, PeerId
from swarmavg.testing.clock import run_virtual
from swarmavg.transport.interface import END, Channel, Listener, Message, TransportContext, TransportLimits
from swarmavg.transport.memory import MemoryNetwork, MemoryTransport

MB = 1_000_000


@dataclass(frozen=True)
class Claimed:
    """A peer that just says who it is."""

    peer_id: PeerId
    swarm_id: bytes = bytes(32)
    accepted_swarm_ids: tuple[bytes, ...] = (bytes(32),)
    insecure: bool = False

    def server_context(self) -> None:
        return None

    def client_context(self) -> None:
        return None

    def peer_of(self, certificate: bytes) -> PeerId:
        raise NotImplementedError


@dataclass
class Node:
    """A peer that listens and keeps what it is opened."""

    id: PeerId
    transport: MemoryTransport
    listener: Listener | None = None
    arrivals: asyncio.Queue[Channel] = field(default_factory=asyncio.Queue)

    @property
    def address(self) -> Address:
        assert self.listener is not None
        return self.listener.address

    async def dial(self, other: Node, *, timeout: float = 5.0) -> tuple[Channel, Channel]:
        near = await self.transport.dial(other.address, purpose="test", timeout=timeout)
        return near, await other.arrivals.get()


@asynccontextmanager
async def nodes(network: MemoryNetwork, count: int, limits: TransportLimits | None = None) -> AsyncIterator[list[Node]]:
    over = asyncio.Event()
    made = []
    for number in range(count):
        peer = PeerId(bytes([number]) * 32)
        context = TransportContext(security=Claimed(peer), limits=limits or TransportLimits())
        node = Node(peer, network.transport(context))

        async def handler(channel: Channel, node: Node = node) -> None:
            node.arrivals.put_nowait(channel)
            await over.wait()

        node.listener = await node.transport.listen(Address("memory", f"host{number}"), handler)
        made.append(node)
    yield made
    over.set()
    for node in made:
        await node.transport.aclose()


def simulate(network: MemoryNetwork, count: int, program: Callable[..., Awaitable[None]]) -> None:
    async def main() -> None:
        async with nodes(network, count) as made:
            await program(*made)

    run_virtual(main)


def now() -> float:
    return asyncio.get_running_loop().time()


async def arrival_of(channel: Channel, size: int) -> float:
    message = await channel.receive()
    assert isinstance(message, Message)
    assert message.payload.nbytes == size
    return now()


def test_latency_is_that_of_the_directed_link() -> None:
    network = MemoryNetwork(latency=0.01)

    async def program(a: Node, b: Node) -> None:
        network.set_link(b.id, a.id, latency=0.5)
        near, far = await a.dial(b)
        start = now()
        await near.send(b"x")
        assert await arrival_of(far, 0) - start == pytest.approx(0.01)
        start = now()
        await far.send(b"x")
        assert await arrival_of(near, 0) - start == pytest.approx(0.5)

    simulate(network, 2, program)


def test_a_fresh_dial_takes_two_round_trips_and_a_pooled_one_takes_one() -> None:
    async def program(a: Node, b: Node) -> None:
        for trips in (2, 1, 1):
            start = now()
            near, far = await a.dial(b)
            assert now() - start == pytest.approx(trips * 0.2)
            await far.end()
            await near.aclose()
            assert await far.receive() is END

    simulate(MemoryNetwork(latency=0.1), 2, program)


def test_bandwidth_is_kept_and_shared_by_the_channels_of_a_link() -> None:
    async def program(a: Node, b: Node) -> None:
        pairs = [await a.dial(b) for _ in range(4)]
        start = now()
        async with asyncio.TaskGroup() as tasks:
            for near, _ in pairs:
                tasks.create_task(near.send(b"", bytes(MB)))
            arrivals = [tasks.create_task(arrival_of(far, MB)) for _, far in pairs]
        ends = [task.result() - start for task in arrivals]
        assert max(ends) == pytest.approx(4.0, rel=0.01)
        assert min(ends) > 3.9, "channels take turns, none is served first"

    simulate(MemoryNetwork(latency=0.001, bandwidth=MB), 2, program)


def test_directions_and_pairs_do_not_share_bandwidth() -> None:
    async def program(a: Node, b: Node, c: Node) -> None:
        near, far = await a.dial(b)
        near_c, far_c = await a.dial(c)
        start = now()
        async with asyncio.TaskGroup() as tasks:
            for sender in (near, far, near_c):
                tasks.create_task(sender.send(b"", bytes(MB)))
            arrivals = [tasks.create_task(arrival_of(receiver, MB)) for receiver in (far, near, far_c)]
        assert [task.result() - start for task in arrivals] == pytest.approx([1.001] * 3, rel=0.01)

    simulate(MemoryNetwork(latency=0.001, bandwidth=MB), 3, program)


def test_a_small_message_overtakes_a_large_one_on_another_channel() -> None:
    async def program(a: Node, b: Node) -> None:
        (bulk, bulk_far), (control, control_far) = await a.dial(b), await a.dial(b)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bulk.send(b"", bytes(10 * MB)))
            tasks.create_task(bulk_far.receive())
            await asyncio.sleep(1)
            start = now()
            await control.send(b"urgent")
            assert await arrival_of(control_far, 0) - start < 0.05

    simulate(MemoryNetwork(latency=0.01, bandwidth=MB), 2, program)


def test_a_slow_message_that_moves_is_not_silence() -> None:
    async def program(a: Node, b: Node) -> None:
        near, far = await a.dial(b)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(near.send(b"", bytes(MB)))
            receiving = tasks.create_task(far.receive())
            while not receiving.done():
                await asyncio.sleep(1)
                assert now() - far.last_received < 1

    simulate(MemoryNetwork(bandwidth=MB / 10), 2, program)


def test_jitter_keeps_the_order_and_follows_from_the_seed() -> None:
    def times(seed: int) -> list[float]:
        seen: list[float] = []

        async def program(a: Node, b: Node) -> None:
            near, far = await a.dial(b)
            for number in range(20):
                await near.send(b"%d" % number)
            for number in range(20):
                message = await far.receive()
                assert isinstance(message, Message)
                assert message.header == b"%d" % number
                seen.append(now())

        simulate(MemoryNetwork(seed, latency=0.01, jitter=0.1), 2, program)
        return seen

    assert times(1) == times(1)
    assert times(1) != times(2)


def test_over_a_cut_link_nothing_arrives_until_it_is_healed() -> None:
    network = MemoryNetwork(latency=0.01, bandwidth=MB)

    async def program(a: Node, b: Node, c: Node) -> None:
        near, far = await a.dial(b)
        network.cut(b.id, a.id)
        await near.send(b"into the void", bytes(100_000))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await far.receive()
        with pytest.raises(PeerUnreachableError, match="within 7 s"):
            await a.dial(b, timeout=7)
        other, _ = await a.dial(c)
        await other.aclose()
        network.heal(a.id, b.id)
        assert await arrival_of(far, 100_000) <= now()
        await (await a.dial(b))[0].aclose()

    simulate(network, 3, program)


def test_a_partition_separates_the_sides_and_nobody_else() -> None:
    network = MemoryNetwork(latency=0.01)

    async def program(a: Node, b: Node, c: Node, d: Node) -> None:
        network.partition([a.id, b.id], [c.id, d.id])
        for dialler, other in ((a, c), (d, b)):
            with pytest.raises(PeerUnreachableError):
                await dialler.dial(other, timeout=1)
        for dialler, other in ((a, b), (d, c)):
            await (await dialler.dial(other, timeout=1))[0].aclose()
        network.heal_partition([a.id, b.id], [c.id, d.id])
        await (await a.dial(c, timeout=1))[0].aclose()

    simulate(network, 4, program)


def test_a_killed_peer_is_lost_to_all_at_once_and_gone() -> None:
    network = MemoryNetwork(latency=0.5)

    async def program(a: Node, b: Node, c: Node) -> None:
        (near, _), (far_near, _) = await a.dial(b), await b.dial(c)
        start = now()
        network.kill(b.id)
        for channel in (near, far_near):
            with pytest.raises(ChannelLostError):
                await channel.receive()
        assert now() == start
        with pytest.raises(PeerUnreachableError):
            await a.dial(b)
        with pytest.raises(PeerUnreachableError):
            await b.dial(a)
        with pytest.raises(ListenError, match="killed"):
            await b.transport.listen(Address("memory", "b"), _never)
        network.revive(b.id)
        await (await b.transport.listen(Address("memory", "b"), _never)).aclose()

    simulate(network, 3, program)


def test_the_window_bounds_what_is_under_way() -> None:
    async def program(a: Node, b: Node) -> None:
        near, _ = await a.dial(b)
        await near.send(b"", bytes(50_000))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await near.send(b"", bytes(500_000))

    async def main() -> None:
        limits = TransportLimits(buffered_bytes=10_000)
        async with nodes(MemoryNetwork(window=100_000), 2, limits) as made:
            await program(*made)

    run_virtual(main)


def test_the_receiver_has_a_copy() -> None:
    async def program(a: Node, b: Node) -> None:
        near, far = await a.dial(b)
        payload = bytearray(b"before")
        await near.send(b"", payload)
        payload[:] = b"after!"
        message = await far.receive()
        assert isinstance(message, Message)
        assert bytes(message.payload) == b"before"

    simulate(MemoryNetwork(latency=1), 2, program)


def test_an_idle_connection_is_closed_in_the_end() -> None:
    async def program(a: Node, b: Node) -> None:
        for pause, trips in ((59, 1), (61, 2)):
            near, far = await a.dial(b)
            await asyncio.gather(near.aclose(), far.aclose())
            await asyncio.sleep(pause)
            start = now()
            near, far = await a.dial(b)
            assert now() - start == pytest.approx(trips * 0.2)
            await asyncio.gather(near.aclose(), far.aclose())
            await asyncio.sleep(1)

    simulate(MemoryNetwork(latency=0.1), 2, program)


@pytest.mark.parametrize(
    ("argument", "value"), [("latency", -1), ("latency", float("nan")), ("jitter", -0.1), ("bandwidth", 0), ("window", 0)]
)
def test_bad_arguments_are_named(argument: str, value: float) -> None:
    arguments: dict[str, float] = {argument: value}
    with pytest.raises(ValueError, match=argument):
        MemoryNetwork(**arguments)  # type: ignore[arg-type]


async def _never(_channel: Channel) -> None:
    raise AssertionError("nobody should come here")
