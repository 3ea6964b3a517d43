"""Transports are found by scheme."""

import asyncio
from importlib.metadata import EntryPoint

import pytest

from swarmavg.errors import AddressError
from swarmavg.security.identity import Identity
from swarmavg.security.swarm import open_swarm_security
from swarmavg.transport import registry
from swarmavg.transport.interface import TransportContext, TransportLimits
from swarmavg_tcp import TcpTransport


def make_context() -> TransportContext:
    return TransportContext(security=open_swarm_security(Identity.generate(), None), limits=TransportLimits())


def test_tcp_is_installed() -> None:
    async def run() -> None:
        transport = registry.create_transport("tcp", make_context())
        assert isinstance(transport, TcpTransport)
        assert transport.scheme == "tcp"
        await transport.aclose()

    asyncio.run(run())
    assert "tcp" in registry.known_schemes()


def test_an_unknown_scheme_is_told_what_there_is() -> None:
    with pytest.raises(AddressError, match=r"'carrier-pigeon'.*tcp"):
        registry.create_transport("carrier-pigeon", make_context())


def test_two_packages_that_claim_one_scheme_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def claims(**_: str) -> list[EntryPoint]:
        return [EntryPoint("tcp", value, registry.ENTRY_POINTS) for value in ("one:T", "two:T", "one:T")]

    monkeypatch.setattr(registry, "entry_points", claims)
    with pytest.raises(AddressError, match="one:T, two:T"):
        registry.create_transport("tcp", make_context())
