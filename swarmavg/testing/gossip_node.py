"""A peer reduced to what gossip needs: an identity, one transport, and a `GossipDirectory`. For tests of discovery alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from swarmavg.discovery.gossip import GossipDirectory
from swarmavg.identifiers import Address, PeerId
from swarmavg.security.identity import Identity
from swarmavg.security.swarm import open_swarm_security
from swarmavg.transport.interface import Channel, Listener, OnChannel, Transport, TransportContext, TransportLimits


class GossipNode:
    """Implements `swarmavg.discovery.link_keeper.GossipNetwork` over one transport.

    Arguments:
        identity: who it is.
        transport: factory of the transport, as for `swarmavg.Peer`.
        listen: where it listens; `None` = a client. Port 0 is allowed.
        bootstrap: addresses of other nodes.
        token: of the swarm; `None` for one without.
        directory_options: further keyword arguments of `GossipDirectory`.
    """

    def __init__(
        self,
        identity: Identity,
        transport: Callable[[TransportContext], Transport],
        *,
        listen: Address | None,
        bootstrap: Sequence[Address] = (),
        token: str | None = None,
        **directory_options: Any,
    ) -> None:
        self.identity = identity
        self.security = open_swarm_security(identity, token)
        self.transport = transport(TransportContext(security=self.security, limits=TransportLimits()))
        self._listen = listen
        self._listener: Listener | None = None
        self._announced: list[Address] = []
        self._handlers: dict[str, OnChannel] = {}
        self.directory = GossipDirectory(identity, self.security.swarm_id, self, bootstrap=bootstrap, **directory_options)

    @property
    def id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def address(self) -> Address:
        """Where it is bound. Raises `LookupError` for a client and before `start`."""
        if self._listener is None:
            raise LookupError("this node does not listen")
        return self._listener.address

    def own_addresses(self) -> list[Address]:
        return list(self._announced)

    def announce(self, addresses: Sequence[Address]) -> None:
        """Tell others something else than the bound address."""
        self._announced = list(addresses)
        self.directory.update_addresses()

    async def dial_address(self, address: Address, purpose: str, timeout: float) -> Channel:
        return await self.transport.dial(address, purpose=purpose, expect=address.peer_id, timeout=timeout)

    def serve(self, purpose: str, handler: OnChannel) -> Callable[[], None]:
        self._handlers[purpose] = handler

        def end() -> None:
            self._handlers.pop(purpose, None)

        return end

    async def start(self) -> Self:
        if self._listen is not None:
            self._listener = await self.transport.listen(self._listen, self._on_channel)
            self._announced = [self._listener.address]
        await self.directory.start()
        return self

    async def aclose(self) -> None:
        await self.directory.aclose()
        await self.transport.aclose()

    async def _on_channel(self, channel: Channel) -> None:
        handler = self._handlers.get(channel.purpose)
        if handler is None:
            channel.abort(f"nobody here serves {channel.purpose!r}", code="no-such-purpose")
        else:
            await handler(channel)
