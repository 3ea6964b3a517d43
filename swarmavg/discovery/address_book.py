"""Where peers listen: what every peer announces of itself under one topic, and what the others remember of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from swarmavg.errors import AddressError, RemoteProtocolError
from swarmavg.identifiers import Address, PeerId
from swarmavg.transport.packing import pack, unpack

PEERS_TOPIC: Final = "peers"
MAX_ADDRESSES: Final = 16
MAX_ADDRESS_CHARS: Final = 400
MAX_LOST_PEERS: Final = 512


@dataclass(frozen=True, slots=True)
class Announcement:
    """The value of a record under `PEERS_TOPIC`: no addresses for a client, which can only dial."""

    addresses: tuple[Address, ...]

    def encode(self) -> bytes:
        """Raises `ValueError` for too many addresses."""
        if len(self.addresses) > MAX_ADDRESSES:
            raise ValueError(f"addresses must be at most {MAX_ADDRESSES}, got {len(self.addresses)}")
        return pack({"addresses": [str(address.with_peer(None)) for address in self.addresses], "client": not self.addresses})

    @classmethod
    def decode(cls, value: bytes, owner: PeerId) -> Announcement:
        """Raises `RemoteProtocolError`. Fields of later versions are skipped, addresses that name somebody else refused."""
        fields = unpack(value, what="announcement", max_depth=4)
        texts = fields.get("addresses") if isinstance(fields, dict) else None
        if not isinstance(texts, list) or len(texts) > MAX_ADDRESSES:
            raise RemoteProtocolError(f"malformed announcement: a list of at most {MAX_ADDRESSES} addresses is needed")
        return cls(tuple(_read_address(text, owner) for text in texts))


def _read_address(text: Any, owner: PeerId) -> Address:
    if not isinstance(text, str) or len(text) > MAX_ADDRESS_CHARS:
        raise RemoteProtocolError(f"malformed announcement: {text!r:.80} is no address")
    try:
        address = Address.parse(text)
    except AddressError as error:
        raise RemoteProtocolError(f"malformed announcement: {error}") from None
    if address.peer_id not in {None, owner} or address.port == 0:
        raise RemoteProtocolError(f"malformed announcement: {text!r} is not an address of {owner.short}")
    return address.with_peer(owner)


class AddressBook:
    """Addresses of live peers, and, bounded, of those whose records expired: they may be behind a broken network."""

    def __init__(self, own_id: PeerId) -> None:
        self._own_id = own_id
        self._live: dict[PeerId, Announcement] = {}
        self._since: dict[PeerId, float] = {}
        self._lost: dict[PeerId, Announcement] = {}

    def learn(self, peer: PeerId, value: bytes, now: float) -> bool:
        """Take in an announcement; an unreadable one counts as one without addresses. Tells whether anything changed."""
        if peer == self._own_id:
            return False
        try:
            announcement = Announcement.decode(value, peer)
        except RemoteProtocolError:
            announcement = Announcement(())
        changed = self._live.get(peer) != announcement
        self._lost.pop(peer, None)
        self._live[peer] = announcement
        self._since.setdefault(peer, now)
        return changed

    def leave(self, peer: PeerId) -> bool:
        """The peer said goodbye. Tells whether anything changed."""
        self._since.pop(peer, None)
        was_lost = self._lost.pop(peer, None) is not None
        return self._live.pop(peer, None) is not None or was_lost

    def lose(self, peer: PeerId) -> bool:
        """The peer's record expired. Tells whether anything changed."""
        announcement = self._live.pop(peer, None)
        self._since.pop(peer, None)
        if announcement is None:
            return False
        if announcement.addresses:
            self._lost[peer] = announcement
        while len(self._lost) > MAX_LOST_PEERS:
            del self._lost[next(iter(self._lost))]
        return True

    def peers(self) -> list[PeerId]:
        """Live peers, the own one left out, in order."""
        return sorted(self._live, key=lambda peer: peer.digest)

    def __len__(self) -> int:
        """How many live peers, the own one left out."""
        return len(self._live)

    def is_live(self, peer: PeerId) -> bool:
        return peer in self._live

    def known_since(self, peer: PeerId) -> float:
        return self._since.get(peer, 0.0)

    def addresses_of(self, peer: PeerId) -> list[Address]:
        """As announced, each with the peer's id; those of a lost peer if it is lost; else none."""
        announcement = self._live.get(peer) or self._lost.get(peer)
        return list(announcement.addresses) if announcement is not None else []

    def reachable(self) -> list[PeerId]:
        """Live peers that announce addresses, in the order in which they became known."""
        return [peer for peer, announcement in self._live.items() if announcement.addresses]

    def lost(self) -> Sequence[PeerId]:
        return list(self._lost)
