"""Checks of how channels end: cleanly, by either side's will, by cancellation, by loss."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from swarmavg.errors import (
    ChannelCancelledError,
    ChannelClosedError,
    ChannelError,
    ChannelLostError,
    ChannelRefusedError,
)
from swarmavg.testing.contracts.transport_harness import (
    TransportCheck,
    TransportHarness,
    connected,
    next_message,
    raised,
)
from swarmavg.transport.interface import END, Channel

_LARGE: Final = 3_000_000
_MOMENT: Final = 0.1


async def after_end_the_other_direction_goes_on(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        await pair.near.send(b"question")
        await pair.near.end()
        await pair.near.end()
        await raised(pair.near.send(b"more"), ChannelClosedError)
        assert (await next_message(pair.far)).header == b"question"
        assert await pair.far.receive() is END
        assert await pair.far.receive() is END
        await pair.far.send(b"answer", bytes(100_000))
        await pair.far.end()
        assert (await next_message(pair.near)).header == b"answer"
        assert await pair.near.receive() is END


async def closing_twice_is_closing_once(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        await pair.near.aclose()
        await pair.near.aclose()
        pair.near.abort("too late")
        assert await pair.far.receive() is END
        await raised(pair.near.send(b""), ChannelClosedError)
        await raised(pair.near.receive(), ChannelClosedError)
        await pair.far.aclose()


async def what_was_sent_before_a_close_arrives(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        for number in range(10):
            await pair.near.send(b"%d" % number, bytes(1000))
        await pair.near.aclose()
        for number in range(10):
            assert (await next_message(pair.far)).header == b"%d" % number
        assert await pair.far.receive() is END


async def closing_wakes_the_task_that_receives(harness: TransportHarness) -> None:
    async with connected(harness) as pair, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(raised(pair.near.receive(), ChannelClosedError), name="receive")
        await asyncio.sleep(_MOMENT)
        await pair.near.aclose()
        await waiting


async def a_sender_to_a_closed_channel_is_stopped(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        await pair.far.aclose()
        error = await _send_until_told(pair.near, 1_000_000)
        assert isinstance(error, ChannelCancelledError | ChannelLostError), error


async def an_abort_reaches_the_other_side_with_its_reason(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        await pair.near.send(b"before")
        pair.near.abort("changed my mind")
        pair.near.abort("again")
        await raised(pair.near.send(b""), ChannelClosedError)
        await raised(pair.near.receive(), ChannelClosedError)
        await pair.near.aclose()
        assert (await next_message(pair.far)).header == b"before", "what arrived before an abort is delivered first"
        error = await raised(pair.far.receive(), ChannelCancelledError)
        assert isinstance(error, ChannelCancelledError)
        assert error.reason == "changed my mind", error
        await raised(pair.far.receive(), ChannelCancelledError)
        await raised(pair.far.send(b""), ChannelCancelledError)


async def an_abort_with_a_code_is_a_refusal(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        pair.far.abort("no such thing here", code="no-such-purpose")
        error = await raised(pair.near.receive(), ChannelRefusedError)
        assert isinstance(error, ChannelRefusedError)
        assert (error.code, error.reason) == ("no-such-purpose", "no such thing here"), error
        await raised(pair.near.send(b""), ChannelRefusedError)


async def an_abort_wakes_both_ends_of_a_stuck_transfer(harness: TransportHarness) -> None:
    async with connected(harness) as pair, asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(_send_until_told(pair.near, _LARGE), name="send")
        receiving = tasks.create_task(raised(pair.near.receive(), ChannelError), name="receive")
        await asyncio.sleep(_MOMENT)
        pair.far.abort("enough")
        assert isinstance(await sending, ChannelCancelledError | ChannelLostError), sending
        assert isinstance(await receiving, ChannelCancelledError | ChannelLostError), receiving


async def an_abort_wakes_the_own_tasks(harness: TransportHarness) -> None:
    async with connected(harness) as pair, asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(_send_until_told(pair.near, _LARGE), name="send")
        receiving = tasks.create_task(raised(pair.near.receive(), ChannelClosedError), name="receive")
        await asyncio.sleep(_MOMENT)
        pair.near.abort("enough")
        assert isinstance(await sending, ChannelClosedError), sending
        await receiving


async def a_cancelled_receive_loses_nothing(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        for number in range(3):
            await _cancel_after_a_moment(pair.far.receive())
            await pair.near.send(b"%d" % number, b"payload")
            assert (await next_message(pair.far)).header == b"%d" % number


async def a_cancelled_send_leaves_the_channel_fit_for_abort(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        await _cancel_after_a_moment(_send_until_told(pair.near, _LARGE))
        pair.near.abort("cancelled")
        error = await _receive_until_told(pair.far)
        assert isinstance(error, ChannelCancelledError | ChannelLostError), error


async def a_dead_peer_is_noticed(harness: TransportHarness) -> None:
    async with connected(harness) as pair, asyncio.TaskGroup() as tasks:
        await pair.far.send(b"last words")
        assert (await next_message(pair.near)).header == b"last words"
        receiving = tasks.create_task(raised(pair.near.receive(), ChannelLostError), name="receive")
        await asyncio.sleep(_MOMENT)
        await harness.kill(pair.far_transport)
        error = await receiving
        assert pair.near.peer.short in str(error), f"the error does not name the peer: {error}"
        await raised(pair.near.send(b""), ChannelLostError)


async def a_dead_peer_frees_a_stuck_sender(harness: TransportHarness) -> None:
    async with connected(harness) as pair, asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(_send_until_told(pair.near, _LARGE), name="send")
        await asyncio.sleep(_MOMENT)
        await harness.kill(pair.far_transport)
        assert isinstance(await sending, ChannelLostError), sending


async def a_handler_that_fails_aborts_its_channel(harness: TransportHarness) -> None:
    async def fail(channel: Channel) -> None:
        await channel.receive()
        raise LookupError("a bug in the handler")

    near, far = harness.join(), harness.join()
    listener = await far.listen(harness.address(), fail)
    channel = await near.dial(listener.address, purpose="check", timeout=20)
    await channel.send(b"x")
    error = await raised(channel.receive(), ChannelCancelledError)
    assert "LookupError" not in str(error), "the bugs of a handler are no business of the other side"
    await listener.aclose()


async def a_handler_that_returns_closes_its_channel(harness: TransportHarness) -> None:
    async def answer(channel: Channel) -> None:
        await channel.send((await next_message(channel)).header)

    near, far = harness.join(), harness.join()
    listener = await far.listen(harness.address(), answer)
    channel = await near.dial(listener.address, purpose="check", timeout=20)
    await channel.send(b"x")
    assert (await next_message(channel)).header == b"x"
    assert await channel.receive() is END
    await channel.aclose()
    await listener.aclose()


async def closing_a_listener_aborts_its_channels(harness: TransportHarness) -> None:
    async with connected(harness) as pair, asyncio.TaskGroup() as tasks:
        near = tasks.create_task(raised(pair.near.receive(), ChannelCancelledError, ChannelLostError), name="near")
        far = tasks.create_task(raised(pair.far.receive(), ChannelClosedError), name="far")
        await asyncio.sleep(_MOMENT)
        await pair.listener.aclose()
        await pair.listener.aclose()
        await asyncio.gather(near, far)


async def closing_a_transport_aborts_its_channels(harness: TransportHarness) -> None:
    async with connected(harness) as pair, asyncio.TaskGroup() as tasks:
        far = tasks.create_task(raised(pair.far.receive(), ChannelCancelledError, ChannelLostError), name="far")
        near = tasks.create_task(raised(pair.near.receive(), ChannelClosedError), name="near")
        await asyncio.sleep(_MOMENT)
        await pair.near_transport.aclose()
        await pair.near_transport.aclose()
        await asyncio.gather(near, far)


async def _cancel_after_a_moment(call: Coroutine[Any, Any, object]) -> None:
    task = asyncio.create_task(call, name="to be cancelled")
    await asyncio.sleep(_MOMENT)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled(), "a cancelled call must raise CancelledError"


async def _send_until_told(channel: Channel, size: int) -> ChannelError:
    payload = bytes(size)
    while True:
        try:
            await channel.send(b"", payload)
        except ChannelError as error:
            return error


async def _receive_until_told(channel: Channel) -> ChannelError:
    while True:
        try:
            if await channel.receive() is END:
                raise AssertionError("an aborted channel ended cleanly")
        except ChannelError as error:
            return error


ENDING_CHECKS: Final[tuple[TransportCheck, ...]] = (
    after_end_the_other_direction_goes_on,
    closing_twice_is_closing_once,
    what_was_sent_before_a_close_arrives,
    closing_wakes_the_task_that_receives,
    a_sender_to_a_closed_channel_is_stopped,
    an_abort_reaches_the_other_side_with_its_reason,
    an_abort_with_a_code_is_a_refusal,
    an_abort_wakes_both_ends_of_a_stuck_transfer,
    an_abort_wakes_the_own_tasks,
    a_cancelled_receive_loses_nothing,
    a_cancelled_send_leaves_the_channel_fit_for_abort,
    a_dead_peer_is_noticed,
    a_dead_peer_frees_a_stuck_sender,
    a_handler_that_fails_aborts_its_channel,
    a_handler_that_returns_closes_its_channel,
    closing_a_listener_aborts_its_channels,
    closing_a_transport_aborts_its_channels,
)
