"""What only the TCP back end does: sockets, limits on strangers, hostile bytes, reuse of connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.errors import ChannelViolationError, ListenError, PeerUnreachableError, SecurityError
from swarmavg.identifiers import Address, PeerId
from swarmavg.security.identity import Identity
from swarmavg.security.swarm import NO_SWARM_ID, open_swarm_security
from swarmavg.testing.contracts.transport_harness import dial_and_meet, next_message, raised
from swarmavg.transport.framing import HEAD, Hello, Kind, decode_error, encode, encode_open
from swarmavg.transport.interface import END, Channel, Listener, TransportContext, TransportLimits
from swarmavg_tcp import TcpTransport

LOOPBACK = Address("tcp", "127.0.0.1")
PATIENCE = 20.0
STRANGER = PeerId(b"s" * 32)


def make_transport(limits: TransportLimits | None = None, *, insecure: bool = False) -> TcpTransport:
    security = open_swarm_security(Identity.generate(), None, insecure=insecure)
    return TcpTransport(TransportContext(security=security, limits=limits or TransportLimits()))


@asynccontextmanager
async def listening(
    limits: TransportLimits | None = None, address: Address = LOOPBACK
) -> AsyncIterator[tuple[Listener, asyncio.Queue[Channel]]]:
    arrivals: asyncio.Queue[Channel] = asyncio.Queue()
    over = asyncio.Event()

    async def handler(channel: Channel) -> None:
        arrivals.put_nowait(channel)
        await over.wait()

    transport = make_transport(limits)
    try:
        async with asyncio.timeout(PATIENCE):
            yield await transport.listen(address, handler), arrivals
    finally:
        over.set()
        await transport.aclose()


@asynccontextmanager
async def raw(listener: Listener) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection to a listener, for bytes that no peer sends."""
    reader, writer = await asyncio.open_connection(listener.address.host, listener.address.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    kind, _, header_bytes, payload_bytes = HEAD.unpack(await reader.readexactly(HEAD.size))
    header = await reader.readexactly(header_bytes)
    await reader.readexactly(payload_bytes)
    return kind, header


def hello(versions: tuple[int, int] = (1, 1), swarm: bytes = NO_SWARM_ID) -> bytes:
    return Hello(STRANGER, swarm, 1 << 20, versions).encode()


async def still_serves(listener: Listener, arrivals: asyncio.Queue[Channel]) -> None:
    transport = make_transport()
    near, far = await dial_and_meet(transport, listener, arrivals, "check")
    await near.send(b"well?")
    assert (await next_message(far)).header == b"well?"
    await transport.aclose()


def no_complaints(program: Callable[[], Awaitable[None]]) -> None:
    """Run a program during which the event loop must have nothing to complain about, and no task may be left."""

    async def main() -> None:
        complaints: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
        await program()
        await asyncio.sleep(0)
        assert complaints == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main(), debug=True)


def test_plaintext_beyond_loopback_is_refused() -> None:
    async def program() -> None:
        transport = make_transport()
        far_away = Address("tcp", "192.0.2.1", 9)
        await raised(transport.dial(far_away, purpose="check", timeout=1), SecurityError)
        await raised(transport.listen(Address("tcp", "0.0.0.0"), _ignore), SecurityError)
        await transport.aclose()
        transport = make_transport(insecure=True)
        await raised(transport.dial(far_away, purpose="check", timeout=0.05), PeerUnreachableError)
        await transport.aclose()

    no_complaints(program)


def test_what_cannot_be_bound_is_named() -> None:
    async def program() -> None:
        transport = make_transport(insecure=True)
        for host in ("192.0.2.1", "no-such-host.invalid", "x" * 300):
            error = await raised(transport.listen(Address("tcp", host), _ignore), ListenError)
            assert host in str(error)
        with pytest.raises(ValueError, match="'memory://x:1'"):
            await transport.listen(Address("memory", "x", 1), _ignore)
        await transport.aclose()

    no_complaints(program)


def test_unknown_hosts_are_unreachable() -> None:
    async def program() -> None:
        transport = make_transport(insecure=True)
        for host in ("no-such-host.invalid", "x" * 300):
            error = await raised(
                transport.dial(Address("tcp", host, 9), purpose="check", timeout=PATIENCE), PeerUnreachableError
            )
            assert host in str(error)
        await transport.aclose()

    no_complaints(program)


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_other_names_of_loopback(host: str) -> None:
    if host == "::1" and not _has_ipv6():
        pytest.skip("no IPv6 here")

    async def program() -> None:
        async with listening(address=Address("tcp", host)) as (listener, arrivals):
            assert listener.address.host == host
            await still_serves(listener, arrivals)

    no_complaints(program)


def test_connections_are_reused_after_a_clean_end_and_only_then() -> None:
    async def program() -> None:
        async with listening() as (listener, arrivals):
            transport, ports = make_transport(), []
            for number in range(6):
                near, far = await dial_and_meet(transport, listener, arrivals, "check")
                ports.append(_remote_port(listener))
                await near.send(b"x")
                assert (await next_message(far)).header == b"x"
                if number == 3:
                    far.abort("unclean")
                    continue
                await near.end()
                assert await far.receive() is END
                await far.end()
                assert await near.receive() is END
            assert len(set(ports)) == 2
            await transport.aclose()

    no_complaints(program)


def test_a_silent_stranger_is_dropped_in_time() -> None:
    async def program() -> None:
        async with listening(TransportLimits(handshake_timeout=0.1)) as (listener, arrivals):
            async with raw(listener) as (reader, _):
                assert (await read_frame(reader))[0] == Kind.HELLO
                assert await reader.read() == b""
            await still_serves(listener, arrivals)

    no_complaints(program)


def test_strangers_beyond_the_limit_wait_in_the_backlog() -> None:
    async def program() -> None:
        limits = TransportLimits(handshakes=2, handshake_timeout=0.3)
        async with listening(limits) as (listener, arrivals), contextlib.AsyncExitStack() as stack:
            strangers = [await stack.enter_async_context(raw(listener)) for _ in range(3)]
            for reader, _ in strangers[:2]:
                assert (await read_frame(reader))[0] == Kind.HELLO
            assert len(listener.connections) == 2  # type: ignore[attr-defined]
            await still_serves(listener, arrivals)

    no_complaints(program)


def test_a_crowd_of_silent_strangers_does_not_keep_members_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmavg.transport.listener.CROWDED_SECONDS", 0.02)

    async def program() -> None:
        limits = TransportLimits(handshakes=2, handshake_timeout=1000.0)
        async with listening(limits) as (listener, arrivals), contextlib.AsyncExitStack() as stack:
            for _ in range(20):
                await stack.enter_async_context(raw(listener))
            await still_serves(listener, arrivals)

    no_complaints(program)


def test_idle_connections_of_one_peer_are_limited() -> None:
    async def program() -> None:
        limits = TransportLimits(channels_per_peer=1)
        async with listening(limits) as (listener, arrivals), contextlib.AsyncExitStack() as stack:
            strangers = [await stack.enter_async_context(raw(listener)) for _ in range(3)]
            for number, (reader, writer) in enumerate(strangers):
                assert (await read_frame(reader))[0] == Kind.HELLO
                writer.write(hello())
                await _until(lambda number=number: _known_peers(listener) > number)  # type: ignore[misc]
            kind, header = await read_frame(strangers[-1][0])
            assert (kind, decode_error(header)[0]) == (Kind.ERROR, "too-many-connections")
            strangers[0][1].write(encode_open("check"))
            assert (await arrivals.get()).peer == STRANGER
            await still_serves(listener, arrivals)

    no_complaints(program)


@pytest.mark.parametrize(
    ("greeting", "code"),
    [
        (hello(versions=(5, 9)), "no-common-version"),
        (hello(swarm=b"x" * 32), "wrong-swarm"),
        (encode(Kind.HELLO, b"\xc1"), "not-a-peer"),
        (encode_open("hasty"), "not-a-peer"),
        (b"GET / HTTP/1.1\r\n\r\n", "not-a-peer"),
        (HEAD.pack(Kind.HELLO, 0, 60_000, 0), "not-a-peer"),
    ],
)
def test_a_bad_greeting_is_answered_with_the_reason_and_logged(
    greeting: bytes, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def program() -> None:
        async with listening() as (listener, arrivals):
            async with raw(listener) as (reader, writer):
                assert (await read_frame(reader))[0] == Kind.HELLO
                writer.write(greeting)
                kind, header = await read_frame(reader)
                assert kind == Kind.ERROR
                assert decode_error(header)[0] == code
                assert await reader.read() == b""
            await still_serves(listener, arrivals)

    with caplog.at_level(logging.WARNING, "swarmavg"):
        no_complaints(program)
    assert len(caplog.records) == 1
    assert "127.0.0.1:" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("violation", "cause"),
    [
        (HEAD.pack(99, 0, 0, 0), "unknown kind"),
        (HEAD.pack(Kind.MESSAGE, 0, 0, 1001), "at most 1000"),
        (encode(Kind.END) + encode(Kind.MESSAGE, b"x"), "outside a channel"),
        (encode(Kind.END) + encode(Kind.END), "END frame out of place"),
        (encode_open("again"), "before the last one had ended"),
        (hello(), "HELLO frame out of place"),
        (encode(Kind.ERROR, b"\xc1"), "malformed error"),
    ],
)
def test_a_violation_in_a_channel_is_told_to_its_user(violation: bytes, cause: str) -> None:
    async def program() -> None:
        async with listening(TransportLimits(message_bytes=1000)) as (listener, arrivals):
            async with raw(listener) as (reader, writer):
                writer.write(hello() + encode_open("check") + encode(Kind.MESSAGE, b"fine") + violation)
                channel = await arrivals.get()
                assert channel.peer == STRANGER
                assert (await next_message(channel)).header == b"fine"
                error = await raised(channel.send(b"", bytes(1000)), ChannelViolationError)
                assert cause in str(error)
                assert [(await read_frame(reader))[0] for _ in range(3)] == [Kind.HELLO, Kind.OPEN, Kind.CANCEL]
            await still_serves(listener, arrivals)

    no_complaints(program)


def test_frames_of_later_versions_are_skipped_when_optional() -> None:
    async def program() -> None:
        async with listening() as (listener, arrivals), raw(listener) as (_, writer):
            later = encode(200, b"header", 100_000, flags=0x80) + bytes(100_000)
            writer.write(hello() + later + encode_open("check") + later + encode(Kind.MESSAGE, b"x") + later + encode(Kind.END))
            channel = await arrivals.get()
            assert (await next_message(channel)).header == b"x"
            assert await channel.receive() is END

    no_complaints(program)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.binary(max_size=60) | st.sampled_from([hello(), encode_open("x"), encode(Kind.END)]), max_size=8))
def test_whatever_a_stranger_sends_the_listener_lives(pieces: list[bytes]) -> None:
    async def program() -> None:
        async with listening() as (listener, arrivals):
            async with raw(listener) as (_, writer):
                for piece in pieces:
                    writer.write(piece)
                    with contextlib.suppress(ConnectionError):
                        await writer.drain()
            while not arrivals.empty():
                arrivals.get_nowait().abort()
            await _until(lambda: not listener.connections)  # type: ignore[attr-defined]
            while not arrivals.empty():
                arrivals.get_nowait()
            await still_serves(listener, arrivals)

    no_complaints(program)


def test_a_peer_that_never_reads_does_not_hold_up_closing() -> None:
    async def program() -> None:
        async with listening() as (listener, arrivals), raw(listener) as (_, writer):
            writer.write(hello() + encode_open("check"))
            channel = await arrivals.get()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    while True:
                        await channel.send(b"", bytes(1 << 20))
            channel.abort("enough")
            async with asyncio.timeout(5):
                await listener.aclose()

    no_complaints(program)


async def _ignore(channel: Channel) -> None:
    await channel.aclose()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def _known_peers(listener: Listener) -> int:
    return sum(c.peer is not None for c in listener.connections)  # type: ignore[attr-defined]


def _remote_port(listener: Listener) -> str:
    (connection,) = (c for c in listener.connections if c.channel is not None)  # type: ignore[attr-defined]
    return str(connection.where)


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
