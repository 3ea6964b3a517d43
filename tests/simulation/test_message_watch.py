"""The watch on messages: their boundaries, their numbers, and what dies with a sender that is killed at one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from swarmavg.errors import ChannelLostError
from swarmavg.identifiers import Address, PeerId
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.message_watch import MessageSeen, MessageWatch, OnMessage
from swarmavg.transport.interface import END, Message, TransportContext, TransportLimits
from swarmavg.transport.memory import MemoryNetwork


class Claimed:
    """A peer that just says who it is."""

    swarm_id = bytes(32)
    accepted_swarm_ids = (bytes(32),)
    insecure = False

    def __init__(self, peer_id: PeerId) -> None:
        self.peer_id = peer_id

    def server_context(self) -> None:
        return None

    def client_context(self) -> None:
        return None

    def peer_of(self, certificate: bytes) -> PeerId:
        raise NotImplementedError


class Ends:
    """Two peers with a channel from `a` to `b`; `far` is its other end."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.a, self.b = PeerId(b"a" * 32), PeerId(b"b" * 32)
        self.near: Any = None
        self.far: Any = None

    async def open(self) -> None:
        contexts = [TransportContext(security=Claimed(peer), limits=TransportLimits()) for peer in (self.a, self.b)]
        self.transports = [self.network.transport(context) for context in contexts]
        arrived = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()

        async def handler(channel):
            arrived.set_result(channel)
            await self.over.wait()

        listener = await self.transports[1].listen(Address("memory", "b"), handler)
        self.near = await self.transports[0].dial(listener.address, purpose="test", timeout=5)
        self.far = await arrived

    async def close(self) -> None:
        self.over.set()
        for transport in self.transports:
            await transport.aclose()


def simulate(program: Callable[[Ends, MessageWatch], Awaitable[None]], **network: Any) -> None:
    async def main() -> None:
        ends = Ends(MemoryNetwork(**{"latency": 0.01, **network}))
        watch = MessageWatch(ends.network, record=True)
        await ends.open()
        try:
            await program(ends, watch)
        finally:
            await ends.close()

    run_virtual(main)


def seen(messages: list[MessageSeen], source: PeerId) -> list[tuple[int, str, str]]:
    return [(message.number, message.kind, message.purpose) for message in messages if message.source == source]


def test_every_frame_is_seen_with_its_number_and_purpose() -> None:
    async def program(ends: Ends, watch: MessageWatch) -> None:
        await ends.near.send(b"\x91\xa4part", b"x" * 5)
        await ends.near.end()
        await ends.far.receive()
        assert await ends.far.receive() is END
        assert seen(watch.trace, ends.a) == [(1, "hello", ""), (2, "open", "test"), (3, "message", "test"), (4, "end", "test")]
        assert seen(watch.trace, ends.b) == [(1, "hello", ""), (2, "open", "test")]
        message = watch.trace[-2]
        assert (message.content, message.payload_bytes, message.target) == ("part", 5, ends.b)
        assert not message.is_part, "another purpose than that of a round"
        assert watch.sent == {ends.a: 4, ends.b: 2}
        assert watch.received == {ends.a: 2, ends.b: 4}

    simulate(program)


CUT_UP = [(1, 0), (1, 100), (7, 1), (7, 500), (100, 100), (100, 20_000), (1 << 20, 0), (1 << 20, 20_000), (1 << 20, 100_000)]


@pytest.mark.parametrize(("window", "size"), CUT_UP)
def test_boundaries_are_found_however_the_stream_is_cut_up(window: int, size: int) -> None:
    async def program(ends: Ends, watch: MessageWatch) -> None:
        events = []
        watch.on_sending.append(lambda message: events.append(("sending", message.number)))
        watch.on_sent.append(lambda message: events.append(("sent", message.number)))
        watch.on_received.append(lambda message: events.append(("received", message.number)))
        for _ in range(2):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ends.near.send(b"header", bytes(size)))
                message = await ends.far.receive()
                assert isinstance(message, Message)
        steps = ("sending", "sent", "received")
        assert events == [(step, number) for number in (3, 4) for step in steps]

    simulate(program, window=window)


def test_a_message_is_sent_when_its_last_byte_is_under_way_and_received_when_it_has_been_read() -> None:
    async def program(ends: Ends, watch: MessageWatch) -> None:
        loop = asyncio.get_running_loop()
        times: dict[str, float] = {}
        watch.on_sending.append(lambda _: times.setdefault("sending", loop.time()))
        watch.on_sent.append(lambda _: times.setdefault("sent", loop.time()))
        watch.on_received.append(lambda _: times.setdefault("received", loop.time()))
        start = loop.time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ends.near.send(b"", bytes(2000)))
            await ends.far.receive()
        assert times["sending"] == start
        assert times["sent"] == pytest.approx(start + 1.51, abs=0.01), "the window has room when the first bytes have been read"
        assert times["received"] == pytest.approx(start + 2.03, abs=0.01)

    simulate(program, bandwidth=1000.0, window=1500)


def when(watch: list[OnMessage], number: int, source: PeerId, action: Callable[[], None]) -> None:
    watch.append(lambda message: action() if (message.number, message.source) == (number, source) else None)


@pytest.mark.parametrize("size", [3, 100_000])
def test_killed_before_its_kth_message_the_earlier_ones_arrive_and_not_a_byte_of_that(size: int) -> None:
    async def program(ends: Ends, watch: MessageWatch) -> None:
        when(watch.on_sending, 5, ends.a, lambda: ends.network.kill(ends.a, flush=True))
        assert await how_many_arrive(ends, size) == 2
        assert watch.received[ends.b] == 4

    simulate(program)


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("bandwidth", [None, 1e5])
def test_killed_after_its_kth_message_was_under_way_it_arrives_and_no_more(size: int, bandwidth: float | None) -> None:
    async def program(ends: Ends, watch: MessageWatch) -> None:
        when(watch.on_sent, 5, ends.a, lambda: ends.network.kill(ends.a, flush=True))
        assert await how_many_arrive(ends, size) == 3

    simulate(program, bandwidth=bandwidth)


def test_killed_abruptly_what_is_under_way_is_lost_and_noticed_at_once() -> None:
    async def program(ends: Ends, watch: MessageWatch) -> None:
        when(watch.on_sent, 5, ends.a, lambda: ends.network.kill(ends.a))
        start = asyncio.get_running_loop().time()
        assert await how_many_arrive(ends, 3) == 0
        assert asyncio.get_running_loop().time() == start

    simulate(program)


def test_killed_by_what_it_receives() -> None:
    async def program(ends: Ends, watch: MessageWatch) -> None:
        def on_received(message: MessageSeen) -> None:
            if message.target == ends.b and watch.received[ends.b] == 4:
                ends.network.kill(ends.b, flush=True)

        watch.on_received.append(on_received)
        await ends.near.send(b"3")
        await ends.near.send(b"4")
        await ends.near.send(b"5")
        start = asyncio.get_running_loop().time()
        with pytest.raises(ChannelLostError):
            await ends.near.receive()
        assert asyncio.get_running_loop().time() == pytest.approx(start + 0.02), "there and back"
        assert watch.received[ends.b] == 4

    simulate(program)


async def how_many_arrive(ends: Ends, size: int) -> int:
    """Of four messages that are sent, the first of which has number 3."""

    async def send() -> None:
        with pytest.raises(ChannelLostError):
            for _ in range(4):
                await ends.near.send(b"header", bytes(size))
            await ends.near.receive()

    count = 0
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        with pytest.raises(ChannelLostError):
            while True:
                assert isinstance(await ends.far.receive(), Message)
                count += 1
    return count


def test_a_stalled_link_delivers_what_was_under_way_and_moves_on_later() -> None:
    async def program(ends: Ends, watch: MessageWatch) -> None:
        del watch
        loop = asyncio.get_running_loop()
        await ends.near.send(b"before")
        ends.network.stall(ends.a, ends.b)
        await ends.near.send(b"after")
        assert (await ends.far.receive()).header == b"before"
        await ends.far.send(b"back")
        assert (await ends.near.receive()).header == b"back"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await ends.near.receive()
        waiting = asyncio.ensure_future(ends.far.receive())
        await asyncio.sleep(10)
        assert not waiting.done()
        start = loop.time()
        ends.network.unstall(ends.a, ends.b)
        assert (await waiting).header == b"after"
        assert loop.time() == pytest.approx(start + 0.01)

    simulate(program)
