"""Checks of dialling and listening: who is reached, who is refused, what is reused."""

from __future__ import annotations

import asyncio
from typing import Final

from swarmavg.errors import (
    AuthenticationError,
    ChannelRefusedError,
    ClosedError,
    ListenError,
    PeerUnreachableError,
)
from swarmavg.testing.contracts.transport_harness import (
    PATIENCE,
    TransportCheck,
    TransportHarness,
    connected,
    dial_and_meet,
    listening,
    next_message,
    raised,
)
from swarmavg.transport.interface import END, MAX_PURPOSE_CHARS, Channel, TransportLimits

_MANY: Final = 40


async def both_sides_know_peer_and_purpose(harness: TransportHarness) -> None:
    purpose = "ü" * MAX_PURPOSE_CHARS
    async with connected(harness, purpose=purpose) as pair:
        assert pair.near.purpose == pair.far.purpose == purpose
        assert pair.near.peer == pair.listener.address.peer_id
        assert pair.far.peer != pair.near.peer
        async with listening(harness, pair.near_transport) as (listener, arrivals):
            back, _ = await dial_and_meet(pair.far_transport, listener, arrivals, "back")
            assert back.peer == pair.far.peer == listener.address.peer_id


async def the_bound_address_can_be_dialled(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        address = pair.listener.address
        assert address.port != 0, "a listener tells the port that it got"
        assert address.host == harness.address().host
        assert address.scheme == pair.far_transport.scheme


async def an_address_in_use_is_named(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        taken = pair.listener.address.with_peer(None)
        error = await raised(pair.near_transport.listen(taken, _ignore), ListenError)
        assert str(taken) in str(error), error


async def the_expected_peer_is_reached(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        channel = await pair.near_transport.dial(
            pair.listener.address.with_peer(None), purpose="check", expect=pair.near.peer, timeout=PATIENCE
        )
        assert channel.peer == pair.near.peer
        await channel.aclose()


async def another_peer_than_expected_is_an_error(harness: TransportHarness) -> None:
    async with connected(harness) as pair:
        wrong, address = pair.far.peer, pair.listener.address.with_peer(None)
        call = pair.near_transport.dial(address, purpose="check", expect=wrong, timeout=PATIENCE)
        error = await raised(call, AuthenticationError)
        assert wrong.short in str(error), error
        assert pair.near.peer.short in str(error), error
        call = pair.near_transport.dial(address.with_peer(wrong), purpose="check", timeout=PATIENCE)
        await raised(call, AuthenticationError)
        assert pair.arrivals.empty(), "a channel meant for another peer was opened"


async def a_peer_of_another_swarm_is_refused(harness: TransportHarness) -> None:
    stranger, far = harness.join_other_swarm(), harness.join()
    async with listening(harness, far) as (listener, arrivals):
        await raised(stranger.dial(listener.address, purpose="check", timeout=PATIENCE), AuthenticationError)
        assert arrivals.empty()
        near, _ = await dial_and_meet(harness.join(), listener, arrivals, "check")
        await near.aclose()


async def nobody_there_is_unreachable(harness: TransportHarness) -> None:
    address = harness.nobody()
    error = await raised(harness.join().dial(address, purpose="check", timeout=PATIENCE), PeerUnreachableError)
    assert str(address) in str(error), error


async def a_dial_without_an_answer_ends_in_time(harness: TransportHarness) -> None:
    async with harness.silence() as address:
        error = await raised(harness.join().dial(address, purpose="check", timeout=0.3), PeerUnreachableError)
        assert "0.3" in str(error), error
        assert str(address) in str(error), error


async def a_cancelled_dial_leaves_nothing(harness: TransportHarness) -> None:
    near = harness.join()
    async with harness.silence() as address:
        dialling = asyncio.create_task(near.dial(address, purpose="check", timeout=PATIENCE), name="dial")
        await asyncio.sleep(0.1)
        dialling.cancel()
        await asyncio.wait([dialling])
        assert dialling.cancelled()
        await near.aclose()


async def many_channels_at_once(harness: TransportHarness) -> None:
    async def echo(channel: Channel) -> None:
        while (message := await channel.receive()) is not END:
            await channel.send(message.header, message.payload)

    async def talk(number: int) -> None:
        channel = await near.dial(listener.address, purpose=f"talk {number}", timeout=PATIENCE)
        for size in (0, 10, 100_000):
            await channel.send(b"%d" % number, bytes([number]) * size)
            answer = await next_message(channel)
            assert (answer.header, bytes(answer.payload)) == (b"%d" % number, bytes([number]) * size)
        await channel.end()
        assert await channel.receive() is END
        await channel.aclose()

    near, far = harness.join(), harness.join()
    listener = await far.listen(harness.address(), echo)
    for _ in range(2):
        async with asyncio.TaskGroup() as tasks:
            for number in range(_MANY):
                tasks.create_task(talk(number), name=f"talk {number}")
    await listener.aclose()


async def one_channel_after_another(harness: TransportHarness) -> None:
    """However a channel ended, the next one starts afresh."""
    async with connected(harness, far_limits=TransportLimits(channels_per_peer=2)) as pair:
        for number in range(12):
            near, far = await pair.another(f"number {number}")
            await near.send(b"%d" % number, bytes(100_000))
            assert (await next_message(far)).header == b"%d" % number
            match number % 4:
                case 0:
                    await asyncio.gather(near.aclose(), far.aclose())
                case 1:
                    await near.end()
                    assert await far.receive() is END
                    await far.end()
                    assert await near.receive() is END
                case 2:
                    await far.send(b"never read", bytes(50_000))
                    await near.aclose()
                    assert await far.receive() is END
                    await far.aclose()
                case _:
                    await far.send(b"bye")
                    await far.aclose()
                    assert (await next_message(near)).header == b"bye"
                    assert await near.receive() is END
                    await near.aclose()


async def too_many_channels_are_refused(harness: TransportHarness) -> None:
    async with connected(harness, far_limits=TransportLimits(channels_per_peer=2)) as pair:
        near, far = await pair.another()
        call = pair.near_transport.dial(pair.listener.address, purpose="check", timeout=PATIENCE)
        error = await raised(call, ChannelRefusedError)
        assert isinstance(error, ChannelRefusedError)
        assert error.code == "too-many-channels", error
        await asyncio.gather(near.aclose(), far.aclose())
        near, _ = await pair.another()
        other, _ = await dial_and_meet(harness.join(), pair.listener, pair.arrivals, "another peer has its own share")
        await near.aclose()
        await other.aclose()


async def a_peer_that_restarted_is_reached_again(harness: TransportHarness) -> None:
    """A connection kept from before is of no use, and nobody has to know."""
    near, first, second = harness.join(), harness.join(), harness.join()
    async with listening(harness, first) as (listener, arrivals):
        channel, far = await dial_and_meet(near, listener, arrivals, "check")
        await asyncio.gather(channel.aclose(), far.aclose())
        address = listener.address.with_peer(None)
    await harness.kill(first)
    over = asyncio.Event()

    async def handler(channel: Channel) -> None:
        await channel.send(b"second")
        await over.wait()

    listener = await second.listen(address, handler)
    channel = await near.dial(address, purpose="check", timeout=PATIENCE)
    assert (await next_message(channel)).header == b"second"
    assert channel.peer == listener.address.peer_id
    over.set()
    await channel.aclose()
    await listener.aclose()


async def closing_a_listener_ends_listening(harness: TransportHarness) -> None:
    near, far = harness.join(), harness.join()
    listener = await far.listen(harness.address(), _ignore)
    await listener.aclose()
    await raised(near.dial(listener.address, purpose="check", timeout=PATIENCE), PeerUnreachableError)
    await (await far.listen(listener.address.with_peer(None), _ignore)).aclose()


async def a_closed_transport_says_so(harness: TransportHarness) -> None:
    transport = harness.join()
    await transport.aclose()
    await transport.aclose()
    await raised(transport.dial(harness.nobody(), purpose="check", timeout=PATIENCE), ClosedError)
    await raised(transport.listen(harness.address(), _ignore), ClosedError)


async def bad_arguments_are_named(harness: TransportHarness) -> None:
    transport, address = harness.join(), harness.nobody()
    for purpose in ("", "x" * (MAX_PURPOSE_CHARS + 1)):
        error = await raised(transport.dial(address, purpose=purpose, timeout=PATIENCE), ValueError)
        assert "purpose" in str(error), error


async def _ignore(channel: Channel) -> None:
    await channel.aclose()


DIALLING_CHECKS: Final[tuple[TransportCheck, ...]] = (
    both_sides_know_peer_and_purpose,
    the_bound_address_can_be_dialled,
    an_address_in_use_is_named,
    the_expected_peer_is_reached,
    another_peer_than_expected_is_an_error,
    a_peer_of_another_swarm_is_refused,
    nobody_there_is_unreachable,
    a_dial_without_an_answer_ends_in_time,
    a_cancelled_dial_leaves_nothing,
    many_channels_at_once,
    one_channel_after_another,
    too_many_channels_are_refused,
    a_peer_that_restarted_is_reached_again,
    closing_a_listener_ends_listening,
    a_closed_transport_says_so,
    bad_arguments_are_named,
)
