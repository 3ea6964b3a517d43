"""Checks of what happens to messages: order, memory, limits, back-pressure."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from swarmavg.errors import ChannelCancelledError, ChannelClosedError, ChannelError, ChannelLostError
from swarmavg.testing.contracts.transport_harness import (
    Pair,
    TransportCheck,
    TransportHarness,
    connected,
    message_of,
    next_message,
    raised,
)
from swarmavg.transport.interface import END, MAX_HEADER_BYTES, Channel, TransportLimits

_MANY: Final = 200
_LARGE: Final = 3_000_001
_FRAME_BYTES: Final = 64
_STALL_SECONDS: Final = 0.2


class _Allocate:
    """Hands out one piece of memory and remembers what it was asked for."""

    def __init__(self, target: memoryview) -> None:
        self.target = target
        self.asked: list[tuple[bytes, int]] = []

    def __call__(self, header: bytes, count: int) -> memoryview:
        self.asked.append((header, count))
        return self.target


async def messages_arrive_in_order_in_both_directions(harness: TransportHarness) -> None:
    async with connected(harness) as pair, asyncio.TaskGroup() as tasks:
        for sender, receiver in ((pair.near, pair.far), (pair.far, pair.near)):
            tasks.create_task(_send_numbers(sender), name="send")
            tasks.create_task(_receive_numbers(receiver), name="receive")


async def _send_numbers(channel: Channel) -> None:
    for number in range(_MANY):
        await channel.send(b"%d" % number, b"%d" % -number)


async def _receive_numbers(channel: Channel) -> None:
    for number in range(_MANY):
        message = await next_message(channel)
        assert (message.header, bytes(message.payload)) == (b"%d" % number, b"%d" % -number)


async def empty_headers_and_payloads_are_messages(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        await pair.near.send(b"")
        await pair.near.send(b"", b"")
        await pair.near.send(b"header", b"", b"")
        await pair.near.send(b"", b"payload")
        for header, payload in ((b"", b""), (b"", b""), (b"header", b""), (b"", b"payload")):
            message = await next_message(pair.far)
            assert (message.header, bytes(message.payload)) == (header, payload)


async def large_payloads_arrive_whole(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        for size in (1, 65_535, 65_536, 1 << 20, _LARGE):
            await _transfer(pair, _pattern(size))


async def several_buffers_of_any_format_are_one_payload(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        wide: Any = memoryview(_pattern(80_000)).cast("d")
        square = memoryview(bytes(range(64))).cast("B", (8, 8))
        await _transfer(pair, b"start", bytearray(b"middle"), wide, memoryview(b""), square, b"end")


async def headers_may_be_as_long_as_allowed_and_no_longer(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        longest = bytes(MAX_HEADER_BYTES)
        error = await raised(pair.near.send(longest + b"x"), ValueError)
        assert str(MAX_HEADER_BYTES) in str(error), error
        await _meanwhile(pair.near.send(longest, b"payload"), pair.far, longest)


async def payloads_may_be_as_long_as_the_receiver_allows(harness: TransportHarness) -> None:
    limit = 100_000
    async with connected(harness, far_limits=TransportLimits(message_bytes=limit)) as pair:
        error = await raised(pair.near.send(b"", bytes(limit), b"x"), ValueError)
        assert str(limit) in str(error), "the error names the receiver's limit"
        await _transfer(pair, bytes(limit))
        await _meanwhile(pair.far.send(b"back", bytes(limit + 1)), pair.near, b"back")


async def payloads_land_in_the_memory_that_allocate_chose(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        for size in (10, _LARGE):
            content, target = _pattern(size), memoryview(bytearray(size))
            allocate = _Allocate(target)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(pair.near.send(b"here", content), name="send")
                message = message_of(await pair.far.receive(allocate))
            assert allocate.asked == [(b"here", size)], allocate.asked
            assert message.payload.obj is target.obj
            assert bytes(target) == content


async def allocate_is_used_for_what_was_read_ahead_and_not_for_empty_payloads(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        await pair.near.send(b"first", b"payload")
        await pair.near.send(b"second")
        await asyncio.sleep(_STALL_SECONDS)  # whether it has been read by now or not must not matter
        allocate = _Allocate(memoryview(bytearray(7)))
        message = message_of(await pair.far.receive(allocate))
        assert message.payload.obj is allocate.target.obj
        assert bytes(allocate.target) == b"payload"
        message = message_of(await pair.far.receive(allocate))
        assert (message.header, allocate.asked) == (b"second", [(b"first", 7)])


async def an_error_in_allocate_comes_out_of_receive_and_breaks_the_channel(harness: TransportHarness) -> None:
    def refuse(header: bytes, count: int) -> memoryview:
        raise KeyError(f"{header!r} {count}")

    for payload in (b"small", bytes(_LARGE)):
        async with connected(harness) as pair, asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(_send_until_told(pair.near, payload), name="send")
            await raised(pair.far.receive(refuse), KeyError)
            await raised(pair.far.receive(), ChannelClosedError)
            assert isinstance(await sending, ChannelCancelledError | ChannelLostError), sending


async def memory_of_the_wrong_size_is_an_error(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        await pair.near.send(b"", b"payload")
        error = await raised(pair.far.receive(lambda _header, count: memoryview(bytearray(count + 1))), ValueError)
        assert "7" in str(error), error


async def a_sender_is_held_back_by_a_receiver_that_does_not_receive(harness: TransportHarness) -> None:
    limits = TransportLimits(buffered_bytes=64 * 1024)
    async with connected(harness, far_limits=limits) as pair, asyncio.TaskGroup() as tasks:
        sent = [0]
        sending = tasks.create_task(_send_for_ever(pair.near, sent), name="send")
        before = -1
        while before != sent[0]:
            before = sent[0]
            await asyncio.sleep(_STALL_SECONDS)
        assert sent[0] < 1000, f"{sent[0]} MB were taken from the sender though nobody receives"
        for number in range(before + 3):
            message = await next_message(pair.far)
            assert message.header == b"%d" % number
        sending.cancel()


async def a_flood_of_empty_messages_is_held_back_too(harness: TransportHarness) -> None:
    limits = TransportLimits(buffered_bytes=64 * 1024)
    async with connected(harness, far_limits=limits) as pair, asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(_send_empty(pair.near), name="send")
        await asyncio.sleep(_STALL_SECONDS)
        received = [(await next_message(pair.far)).header for _ in range(5000)]
        assert received == [b"%d" % number for number in range(5000)]
        sending.cancel()


async def memory_may_be_reused_once_send_has_returned(harness: TransportHarness) -> None:
    async with connected(harness) as pair, asyncio.TaskGroup() as tasks:
        tasks.create_task(_send_from_one_buffer(pair.near), name="send")
        for number in range(8):
            message = await next_message(pair.far)
            assert bytes(message.payload) == bytes([number]) * _LARGE, f"message {number} was changed on its way"


async def one_slow_channel_does_not_hold_up_another(harness: TransportHarness) -> None:
    async with connected(harness) as pair, asyncio.TaskGroup() as tasks:
        near, far = await pair.another()
        stuck = tasks.create_task(_send_for_ever(pair.near, [0]), name="stuck")
        await asyncio.sleep(_STALL_SECONDS)
        await near.send(b"still here")
        assert (await next_message(far)).header == b"still here"
        stuck.cancel()


async def the_time_of_the_last_byte_is_known(harness: TransportHarness) -> None:
    loop = asyncio.get_running_loop()
    async with connected(harness) as pair:
        await asyncio.sleep(_STALL_SECONDS)
        before = loop.time()
        await pair.near.send(b"x")
        await pair.far.receive()
        assert before <= pair.far.last_received <= loop.time()
        assert pair.near.last_received <= loop.time()


async def arriving_bytes_are_counted(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        assert (pair.near.bytes_received, pair.far.bytes_received) == (0, 0), "opening a channel counts as nothing"
        content = len(b"header") + _LARGE
        await _transfer(pair, _pattern(_LARGE))
        assert content < pair.far.bytes_received <= content + _FRAME_BYTES
        assert pair.near.bytes_received == 0
        whole = pair.far.bytes_received
        await _transfer(pair, b"")
        assert 0 < pair.far.bytes_received - whole - len(b"header") <= _FRAME_BYTES, "a frame without payload counts too"


async def bytes_of_an_unfinished_message_are_counted(harness: TransportHarness) -> None:
    limits = TransportLimits(buffered_bytes=64 * 1024)
    async with connected(harness, far_limits=limits) as pair, asyncio.TaskGroup() as tasks:
        seen = -1
        sending = tasks.create_task(pair.near.send(b"header", bytes(_LARGE)), name="send")
        while seen < pair.far.bytes_received:
            seen = pair.far.bytes_received
            await asyncio.sleep(_STALL_SECONDS)
        assert len(b"header") < seen < _LARGE, "what was read ahead, though nobody receives"
        await next_message(pair.far)
        await sending
        assert pair.far.bytes_received > _LARGE


async def each_channel_counts_its_own_bytes_and_keeps_the_count(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        for size in (50_000, 10):
            near, far = await pair.another()
            await near.send(b"", bytes(size))
            await next_message(far)
            assert size < far.bytes_received <= size + _FRAME_BYTES, "whatever an earlier channel carried on the connection"
            await near.aclose()
            assert await far.receive() is END
            before = far.bytes_received
            await far.aclose()
            assert far.bytes_received >= before > size


async def _transfer(pair: Pair, *buffers: bytes | bytearray | memoryview) -> None:
    content = b"".join(bytes(buffer) for buffer in buffers)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pair.near.send(b"header", *buffers), name="send")
        message = await next_message(pair.far)
    assert message.header == b"header"
    assert message.payload.nbytes == len(content)
    assert bytes(message.payload) == content


async def _meanwhile(sending: Coroutine[Any, Any, None], receiver: Channel, header: bytes) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sending, name="send")
        assert (await next_message(receiver)).header == header


async def _send_until_told(channel: Channel, payload: bytes) -> ChannelError:
    while True:
        try:
            await channel.send(b"", payload)
        except ChannelError as error:
            return error


async def _send_for_ever(channel: Channel, sent: list[int]) -> None:
    payload = bytes(1_000_000)
    while True:
        await channel.send(b"%d" % sent[0], payload)
        sent[0] += 1


async def _send_empty(channel: Channel) -> None:
    number = 0
    while True:
        await channel.send(b"%d" % number)
        number += 1


async def _send_from_one_buffer(channel: Channel) -> None:
    buffer = bytearray(_LARGE)
    for number in range(8):
        buffer[:] = bytes([number]) * _LARGE
        await channel.send(b"", buffer)
    buffer[:] = b"\xff" * _LARGE


def _pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


MESSAGE_CHECKS: Final[tuple[TransportCheck, ...]] = (
    messages_arrive_in_order_in_both_directions,
    empty_headers_and_payloads_are_messages,
    large_payloads_arrive_whole,
    several_buffers_of_any_format_are_one_payload,
    headers_may_be_as_long_as_allowed_and_no_longer,
    payloads_may_be_as_long_as_the_receiver_allows,
    payloads_land_in_the_memory_that_allocate_chose,
    allocate_is_used_for_what_was_read_ahead_and_not_for_empty_payloads,
    an_error_in_allocate_comes_out_of_receive_and_breaks_the_channel,
    memory_of_the_wrong_size_is_an_error,
    a_sender_is_held_back_by_a_receiver_that_does_not_receive,
    a_flood_of_empty_messages_is_held_back_too,
    memory_may_be_reused_once_send_has_returned,
    one_slow_channel_does_not_hold_up_another,
    the_time_of_the_last_byte_is_known,
    arriving_bytes_are_counted,
    bytes_of_an_unfinished_message_are_counted,
    each_channel_counts_its_own_bytes_and_keeps_the_count,
)
