"""Which addresses a peer tells others, and an address book for directories that are not one themselves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from swarmavg.discovery.address_book import PEERS_TOPIC, AddressBook, Announcement
from swarmavg.discovery.interface import Directory
from swarmavg.errors import ClosedError, DirectoryError
from swarmavg.identifiers import Address, PeerId
from swarmavg.telemetry.logs import get_logger

_log = get_logger("swarmavg.peer")

ANNOUNCE_TTL = 60.0
ANNOUNCE_INTERVAL = 20.0
RETRY_SECONDS = 1.0
WILDCARDS = {"0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}  # noqa: S104  (compared with, not bound)
_FAR_AWAY = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # documentation addresses: nothing is sent


def announced_addresses(bound: Sequence[Address], announce: Sequence[Address] | None, peer_id: PeerId) -> list[Address]:
    """What to tell others: `announce` if given, else the bound addresses with wildcard hosts made concrete."""
    chosen = list(announce) if announce is not None else [_concrete(address) for address in bound]
    return [address.with_peer(peer_id) for address in chosen]


def _concrete(address: Address) -> Address:
    family = WILDCARDS.get(address.host)
    if family is None:
        return address
    return Address(address.scheme, default_route_host(family), address.port)


def default_route_host(family: socket.AddressFamily) -> str:
    """The own address on the interface of the default route, else loopback. Sends nothing: connecting UDP only looks up."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_FAR_AWAY[family], 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1" if family is socket.AF_INET else "::1"


class AddressWatch:
    """Publishes the own addresses in a directory and follows those of others."""

    def __init__(self, directory: Directory, own_id: PeerId, addresses: Sequence[Address]) -> None:
        self._directory = directory
        self._announcement = Announcement(tuple(addresses))
        self._book = AddressBook(own_id)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._publish()
        self._tasks = [
            asyncio.create_task(self._follow(), name="address-watch"),
            asyncio.create_task(self._renew(), name="address-renewal"),
        ]

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def addresses_of(self, peer: PeerId) -> list[Address]:
        return self._book.addresses_of(peer)

    def known_peers(self) -> list[PeerId]:
        return self._book.peers()

    async def _publish(self) -> None:
        await self._directory.publish(PEERS_TOPIC, self._announcement.encode(), ttl=ANNOUNCE_TTL, urgent=True)

    async def _follow(self) -> None:
        while True:
            try:
                await self._watch()
            except ClosedError:
                return
            except DirectoryError as error:
                _log.warning("the addresses of others could not be followed, trying again", error=str(error))
            await asyncio.sleep(RETRY_SECONDS)

    async def _watch(self) -> None:
        async with self._directory.watch(PEERS_TOPIC) as changes:
            async for change in changes:
                if change.record is None:
                    self._book.lose(change.owner)
                else:
                    self._book.learn(change.owner, change.record.value, asyncio.get_running_loop().time())

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_INTERVAL)
            try:
                await self._publish()
            except ClosedError:
                return
            except DirectoryError as error:
                _log.warning("the own addresses could not be announced", error=str(error))
