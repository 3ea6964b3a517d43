"""The one way in which everything above transports reaches other peers: by id and purpose, not by address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from swarmavg.discovery.interface import Directory
from swarmavg.identifiers import PeerId
from swarmavg.transport.interface import Channel, OnChannel


class ChannelHub(Protocol):
    """What a `Peer` offers to matchmaking, rounds and state transfer."""

    @property
    def id(self) -> PeerId: ...

    @property
    def public_key(self) -> bytes:
        """DER SubjectPublicKeyInfo, of which `id` is the hash."""

    @property
    def swarm_id(self) -> bytes: ...

    @property
    def accepted_swarm_ids(self) -> tuple[bytes, ...]:
        """The swarm ids that others may act under: `swarm_id`, and a second one while the swarm changes its token."""

    @property
    def directory(self) -> Directory: ...

    @property
    def accepts_channels(self) -> bool:
        """False in client mode."""

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature by the own key."""

    async def open_channel(self, peer: PeerId, purpose: str, *, timeout: float) -> Channel:
        """Dial a peer at its known addresses in turn. Raises `DialError` kinds, within `timeout` seconds."""

    def serve(self, purpose: str, handler: OnChannel) -> Callable[[], None]:
        """Hand inbound channels of exactly this purpose to `handler`; returns the call that ends it.

        Raises `ValueError` when the purpose is already served. A channel of a purpose nobody serves is refused with the code
        ``no-such-purpose``.
        """
