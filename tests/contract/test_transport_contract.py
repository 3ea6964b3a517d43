"""The transport contract on every back end: the in-process network in virtual and real time, TCP in plaintext and with TLS."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import pytest

from swarmavg.identifiers import Address
from swarmavg.security.identity import Identity
from swarmavg.security.swarm import SwarmSecurity, open_swarm_security
from swarmavg.security.tokens import generate_token
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.contracts.transport import TRANSPORT_CHECKS, TransportCheck
from swarmavg.transport.endpoint import StreamTransport
from swarmavg.transport.interface import Transport, TransportContext, TransportLimits
from swarmavg.transport.memory import MemoryNetwork
from swarmavg_tcp import TcpTransport

TOKEN, OTHER_TOKEN = generate_token(), generate_token()


class Harness:
    """What is common to both: makes peers and closes their transports at the end."""

    def __init__(self, token: str, other_token: str) -> None:
        self._tokens = (token, other_token)
        self._transports: list[StreamTransport] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for transport in self._transports:
            await transport.aclose()

    def join(self, limits: TransportLimits | None = None) -> StreamTransport:
        return self._add(open_swarm_security(Identity.generate(), self._tokens[0]), limits)

    def join_other_swarm(self) -> StreamTransport:
        return self._add(open_swarm_security(Identity.generate(), self._tokens[1]), None)

    def make(self, context: TransportContext) -> StreamTransport:
        raise NotImplementedError

    def _add(self, security: SwarmSecurity, limits: TransportLimits | None) -> StreamTransport:
        transport = self.make(TransportContext(security=security, limits=limits or TransportLimits()))
        self._transports.append(transport)
        return transport


class MemoryHarness(Harness):
    def __init__(self, latency: float, bandwidth: float | None) -> None:
        super().__init__(TOKEN, OTHER_TOKEN)
        self.network = MemoryNetwork(latency=latency, bandwidth=bandwidth, window=256 * 1024)

    def make(self, context: TransportContext) -> StreamTransport:
        return self.network.transport(context)

    def address(self) -> Address:
        return Address("memory", "host")

    def nobody(self) -> Address:
        return Address("memory", "nowhere", 9)

    @asynccontextmanager
    async def silence(self) -> AsyncIterator[Address]:
        silent, done = self.join(TransportLimits(handshakes=1)), asyncio.Event()

        async def handler(_channel: object) -> None:
            await done.wait()

        listener = await silent.listen(self.address(), handler)
        await listener.slot()  # so that nobody else is accepted
        yield listener.address.with_peer(None)
        listener.unused_slot()
        await listener.aclose()

    async def kill(self, transport: Transport) -> None:
        assert isinstance(transport, StreamTransport)
        self.network.kill(transport.context.security.peer_id)


class TcpHarness(Harness):
    def __init__(self, token: str | None) -> None:
        super().__init__(token or "", OTHER_TOKEN)
        self._plaintext = token is None

    def join(self, limits: TransportLimits | None = None) -> StreamTransport:
        token = None if self._plaintext else self._tokens[0]
        return self._add(open_swarm_security(Identity.generate(), token), limits)

    def make(self, context: TransportContext) -> StreamTransport:
        return TcpTransport(context)

    def address(self) -> Address:
        return Address("tcp", "127.0.0.1")

    def nobody(self) -> Address:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Address("tcp", *server.getsockname())

    @asynccontextmanager
    async def silence(self) -> AsyncIterator[Address]:
        with socket.create_server(("127.0.0.1", 0)) as server:  # the system connects, and nobody accepts
            yield Address("tcp", *server.getsockname())

    async def kill(self, transport: Transport) -> None:
        assert isinstance(transport, StreamTransport)
        transport.cut()


async def run(check: TransportCheck, harness: MemoryHarness | TcpHarness) -> None:
    async with harness:
        await check(harness)


def each(checks: tuple[TransportCheck, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)


@each(TRANSPORT_CHECKS)
def test_memory_in_virtual_time(check: TransportCheck) -> None:
    run_virtual(lambda: run(check, MemoryHarness(0.01, 50e6)))


@each(TRANSPORT_CHECKS)
def test_memory_without_latency(check: TransportCheck) -> None:
    run_virtual(lambda: run(check, MemoryHarness(0.0, None)))


@each(TRANSPORT_CHECKS)
def test_memory_in_real_time(check: TransportCheck) -> None:
    asyncio.run(run(check, MemoryHarness(0.0005, None)), debug=True)


@each(TRANSPORT_CHECKS)
def test_tcp_in_plaintext(check: TransportCheck) -> None:
    asyncio.run(run(check, TcpHarness(None)), debug=True)


@each(TRANSPORT_CHECKS)
def test_tcp_with_tls(check: TransportCheck) -> None:
    asyncio.run(run(check, TcpHarness(TOKEN)))


@each(TRANSPORT_CHECKS)
@pytest.mark.parametrize("token", [None, TOKEN], ids=["plaintext", "tls"])
def test_tcp_on_uvloop(check: TransportCheck, token: str | None) -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(check, TcpHarness(token)))
