"""Who may not talk to whom over TCP, and what each side is told: the dialler by its error, the listener's owner by a warning.

After each refusal the listener must still serve a peer that belongs to the swarm.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

import pytest

from swarmavg.errors import AuthenticationError
from swarmavg.identifiers import Address, PeerId
from swarmavg.security.identity import Identity
from swarmavg.security.swarm import Clock, SwarmSecurity, open_swarm_security, utc_now
from swarmavg.security.swarm_ca import CLOCK_SKEW, LEAF_LIFETIME, make_authority
from swarmavg.security.tls_errors import explain_tls_error
from swarmavg.security.tokens import derive_signing_key, generate_token
from swarmavg.transport.interface import END, Channel, TransportContext, TransportLimits
from swarmavg_tcp import TcpTransport

TOKEN, OTHER_TOKEN = generate_token(), generate_token()
PATIENCE = 20.0


def member(token: str | Sequence[str] | None = TOKEN, *, clock: Clock = utc_now) -> SwarmSecurity:
    return open_swarm_security(Identity.generate(), token, clock=clock)


def long_ago() -> dt.datetime:
    return utc_now() - LEAF_LIFETIME - dt.timedelta(hours=1)


def far_ahead() -> dt.datetime:
    return utc_now() + CLOCK_SKEW + dt.timedelta(hours=1)


class Warnings(logging.Handler):
    """Collects what the listening side logs at WARNING and above, for tests that wait for it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._queue: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._queue.put_nowait(record.getMessage())

    async def next(self) -> str:
        async with asyncio.timeout(PATIENCE):
            return await self._queue.get()

    @property
    def quiet(self) -> bool:
        return self._queue.empty()


@contextlib.contextmanager
def warnings() -> Iterator[Warnings]:
    handler = Warnings()
    logger = logging.getLogger("swarmavg")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


def transport_of(security: SwarmSecurity) -> TcpTransport:
    return TcpTransport(TransportContext(security=security, limits=TransportLimits()))


async def echo(channel: Channel) -> None:
    while (message := await channel.receive()) is not END:
        await channel.send(message.header, message.payload)


@contextlib.asynccontextmanager
async def listening(security: SwarmSecurity) -> AsyncIterator[tuple[Address, Warnings]]:
    """A peer that echoes, and its warnings."""
    transport = transport_of(security)
    with warnings() as heard:
        try:
            listener = await transport.listen(Address("tcp", "127.0.0.1"), echo)
            yield listener.address.with_peer(None), heard
        finally:
            await transport.aclose()


async def talk(security: SwarmSecurity, address: Address, expect: PeerId | None = None) -> PeerId:
    """Dial, have something echoed, and say who answered."""
    transport = transport_of(security)
    try:
        channel = await transport.dial(address, purpose="echo", expect=expect, timeout=PATIENCE)
        await channel.send(b"ping", b"payload")
        answer = await channel.receive()
        assert answer is not END
        assert (answer.header, bytes(answer.payload)) == (b"ping", b"payload")
        await channel.aclose()
        return channel.peer
    finally:
        await transport.aclose()


async def refused(dialler: SwarmSecurity, listener: SwarmSecurity, friend: SwarmSecurity | None = None) -> tuple[str, str]:
    """What the dialler's error and the listener's warning say."""
    async with listening(listener) as (address, heard):
        with pytest.raises(AuthenticationError) as caught:
            await talk(dialler, address)
        warning = await heard.next()
        if friend is not None:
            assert await talk(friend, address) == listener.peer_id
        assert heard.quiet
    assert str(address) in str(caught.value)
    return str(caught.value), warning


def test_members_talk_and_know_each_other() -> None:
    async def run() -> None:
        dialler, listener = member(), member()
        async with listening(listener) as (address, heard):
            assert await talk(dialler, address) == listener.peer_id
            assert await talk(dialler, address, expect=listener.peer_id) == listener.peer_id
            assert heard.quiet

    asyncio.run(run())


def test_another_token() -> None:
    async def run() -> None:
        error, warning = await refused(member(OTHER_TOKEN), member(), friend=member())
        assert "signed by another swarm's token" in error
        assert "it uses another token" in warning

    asyncio.run(run())


def test_a_token_that_only_the_dialler_accepts() -> None:
    """A dialler whose change of token is ahead of the listener's: it accepts the listener, and is refused."""

    async def run() -> None:
        error, warning = await refused(member([OTHER_TOKEN, TOKEN]), member(), friend=member())
        assert "it uses another token" in error
        assert "signed by another swarm's token" in warning

    asyncio.run(run())


def test_an_expired_dialler() -> None:
    async def run() -> None:
        error, warning = await refused(member(clock=long_ago), member(), friend=member())
        assert "this side's certificate expired" in error
        assert "its certificate has expired" in warning

    asyncio.run(run())


def test_an_expired_listener() -> None:
    async def run() -> None:
        error, warning = await refused(member(), member(clock=long_ago))
        assert "its certificate has expired" in error
        assert "this side's certificate expired" in warning

    asyncio.run(run())


def test_a_dialler_whose_clock_is_far_ahead() -> None:
    async def run() -> None:
        error, warning = await refused(member(clock=far_ahead), member(), friend=member())
        assert "not valid yet" in error
        assert "not valid yet" in warning

    asyncio.run(run())


@pytest.mark.parametrize("token", [TOKEN, None])
def test_another_peer_at_the_dialled_address(token: str | None) -> None:
    async def run() -> None:
        dialler, listener, sought = member(token), member(token), member(token)
        async with listening(listener) as (address, heard):
            with pytest.raises(AuthenticationError, match="another peer") as caught:
                await talk(dialler, address, expect=sought.peer_id)
            assert listener.peer_id.short in str(caught.value)
            assert sought.peer_id.short in str(caught.value)
            warning = await heard.next()
            assert "another peer" in warning
            assert sought.peer_id.short in warning
            assert await talk(dialler, address, expect=listener.peer_id) == listener.peer_id
            assert heard.quiet

    asyncio.run(run())


class Choosy(SwarmSecurity):
    """A member that lets nobody in, as one with a list of peers will."""

    def peer_of(self, certificate: bytes) -> PeerId:
        raise AuthenticationError(f"peer {super().peer_of(certificate).short} is on the list")


def choosy() -> Choosy:
    return Choosy(Identity.generate(), [make_authority(derive_signing_key(TOKEN))])


def test_a_member_that_is_not_welcome() -> None:
    async def run() -> None:
        dialler, listener = member(), choosy()
        error, warning = await refused(dialler, listener)
        assert f"peer {dialler.peer_id.short} is on the list" in error
        assert f"peer {dialler.peer_id.short} is on the list" in warning
        dialler, friendly = choosy(), member()
        error, warning = await refused(dialler, friendly, friend=member())
        assert f"peer {friendly.peer_id.short} is on the list" in error
        assert f"peer {friendly.peer_id.short} is on the list" in warning

    asyncio.run(run())


def test_a_plaintext_dialler_at_a_tls_port() -> None:
    async def run() -> None:
        error, warning = await refused(member(None), member(), friend=member())
        assert "this swarm has a token, and you spoke plaintext" in error
        assert "it spoke plaintext, and this swarm has a token" in warning

    asyncio.run(run())


def test_a_tls_dialler_at_a_plaintext_port() -> None:
    async def run() -> None:
        error, warning = await refused(member(), member(None), friend=member(None))
        assert "does not speak TLS" in error
        assert "speaks TLS" in warning
        assert "token" in warning

    asyncio.run(run())


async def _without_certificate(address: Address) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=bare)
    with pytest.raises(ssl.SSLError) as caught:
        await reader.read()
    assert "wants a certificate" in explain_tls_error(caught.value)
    writer.close()
    with contextlib.suppress(ssl.SSLError):
        await writer.wait_closed()


async def _http(address: Address) -> None:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.read()
    writer.close()
    await writer.wait_closed()


async def _old_tls(address: Address) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError) as caught:
        await asyncio.open_connection(address.host, address.port, ssl=old)
    assert "does not speak TLS 1.3" in explain_tls_error(caught.value)


@pytest.mark.parametrize(
    ("stranger", "cause"),
    [
        (_without_certificate, "showed no certificate"),
        (_http, "it spoke plaintext"),
        (_old_tls, "does not speak TLS 1.3"),
    ],
)
def test_strangers_at_a_tls_port(stranger: Callable[[Address], Awaitable[None]], cause: str) -> None:
    async def run() -> None:
        listener = member()
        async with listening(listener) as (address, heard):
            await stranger(address)
            assert cause in await heard.next()
            assert await talk(member(), address) == listener.peer_id
            assert heard.quiet

    asyncio.run(run())


def test_a_service_that_is_no_peer_is_named_to_the_dialler() -> None:
    """A server that speaks plaintext first, as mail servers do."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP ready\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        async with server:
            address = Address("tcp", *server.sockets[0].getsockname()[:2])
            with pytest.raises(AuthenticationError, match="does not speak TLS"):
                await talk(member(), address)
            with pytest.raises(AuthenticationError, match="no peer of this protocol"):
                await talk(member(None), address)

    asyncio.run(run())


@pytest.mark.parametrize("direction", ["forth", "back"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_change_of_token_in_stages(direction: str, stage: int) -> None:
    stages = [[TOKEN], [TOKEN, OTHER_TOKEN], [OTHER_TOKEN, TOKEN], [OTHER_TOKEN]]

    async def run() -> None:
        pair = [member(stages[stage]), member(stages[stage + 1])]
        dialler, listener = pair if direction == "forth" else reversed(pair)
        async with listening(listener) as (address, heard):
            assert await talk(dialler, address) == listener.peer_id
            assert heard.quiet

    asyncio.run(run())


def test_a_listener_outlives_its_first_certificate() -> None:
    now = [long_ago()]

    async def run() -> None:
        listener = member(clock=lambda: now[0])
        async with listening(listener) as (address, heard):
            with pytest.raises(AuthenticationError, match="expired"):
                await talk(member(), address)
            await heard.next()
            now[0] = utc_now()
            assert await talk(member(), address) == listener.peer_id
            assert heard.quiet

    asyncio.run(run())


def test_a_dialler_outlives_its_first_certificate() -> None:
    now = [long_ago()]

    async def run() -> None:
        dialler, listener = member(clock=lambda: now[0]), member()
        async with listening(listener) as (address, heard):
            transport = transport_of(dialler)
            try:
                with pytest.raises(AuthenticationError, match="expired"):
                    await transport.dial(address, purpose="echo", timeout=PATIENCE)
                await heard.next()
                now[0] = utc_now()
                channel = await transport.dial(address, purpose="echo", timeout=PATIENCE)
                assert channel.peer == listener.peer_id
                await channel.aclose()
            finally:
                await transport.aclose()

    asyncio.run(run())
