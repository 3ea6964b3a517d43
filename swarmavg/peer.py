"""The peer: what a process is in the swarm. It owns the identity, the transports and their channels, and the directory.

The public async API, and the `ChannelHub` through which everything else reaches other peers. Many averagers share one peer.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from swarmavg.config import check_seconds
from swarmavg.discovery.gossip import GossipDirectory
from swarmavg.discovery.interface import Directory
from swarmavg.errors import ClosedError, PeerUnreachableError, SecurityError, SwarmError, TokenError
from swarmavg.identifiers import Address, PeerId
from swarmavg.runtime.addresses import AddressWatch, announced_addresses
from swarmavg.runtime.offload import offload
from swarmavg.security.identity import Identity
from swarmavg.security.swarm import SwarmSecurity, open_swarm_security
from swarmavg.security.tokens import missing_token_message
from swarmavg.telemetry.logs import get_logger
from swarmavg.telemetry.rounds import RoundCounters
from swarmavg.transport.interface import Channel, Listener, OnChannel, Transport, TransportContext, TransportLimits
from swarmavg.transport.registry import create_transport

_log = get_logger("swarmavg.peer")

TransportFactory: TypeAlias = Callable[[TransportContext], Transport]
DirectoryFactory: TypeAlias = Callable[[PeerId], Directory]


CLOSE_SECONDS = 5.0
"""Bound on the close of one directory, listener or transport."""


class Closable(Protocol):
    """Something that lives on a peer and is closed before it."""

    async def aclose(self) -> None: ...


class Peer:
    """A member of the swarm.

        async with swarmavg.Peer(listen=["tcp://0.0.0.0:31337"], bootstrap=["tcp://198.51.100.7:31337"], token="...") as peer:
            ...

    Arguments:
        listen: addresses to listen on, several transports allowed; port 0 = any free one; ``[]`` = client mode (dials only).
        announce: addresses told to others. By default the bound ones, wildcard hosts replaced by the address of the interface
            of the default route.
        bootstrap: addresses of any members, with or without their peer id. Unreachable ones never fail the start and are
            dialled again for ever.
        token: the swarm's secret, as printed by ``swarmavg token``; two of them (new, old) while it is being changed. `None`
            is allowed on loopback only, unless `insecure`.
        identity: path of the key file, created with mode 0600 if it is missing; or an `Identity`; `None` = a fresh key.
        directory: `None` = gossip; or a function from the own peer id to a `swarmavg.discovery.Directory`.
        client_mode: cannot accept connections; by default whether `listen` is empty, with which it must agree.
        limits: what this process grants others, per transport.
        insecure: allow plaintext beyond loopback, for swarms without a token. Ids are then claimed, not proven.
        transports: factories by URL scheme, before those found by entry point.
        rng: source of randomness, for repeatable simulations.

    Raises (from `start`): `ListenError`, `TokenError`, `IdentityError`, `SecurityError`. Starting needs no network.
    """

    def __init__(
        self,
        *,
        listen: Sequence[str | Address] = ("tcp://0.0.0.0:0",),
        announce: Sequence[str | Address] | None = None,
        bootstrap: Sequence[str | Address] = (),
        token: str | Sequence[str] | None = None,
        identity: str | os.PathLike[str] | Identity | None = None,
        directory: DirectoryFactory | None = None,
        client_mode: bool | None = None,
        limits: TransportLimits | None = None,
        insecure: bool = False,
        transports: Mapping[str, TransportFactory] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._listen = _addresses("listen", listen)
        self._announce = None if announce is None else _addresses("announce", announce)
        self._bootstrap = _addresses("bootstrap", bootstrap)
        self._check_addresses()
        if client_mode is not None and not isinstance(client_mode, bool):
            raise TypeError(f"client_mode must be a bool or None, got {client_mode!r}")
        if client_mode and self._listen:
            raise ValueError(f"client_mode=True excludes listen={[str(a) for a in self._listen]}: leave listen empty")
        if client_mode is False and not self._listen:
            raise ValueError("client_mode=False needs an address to listen on, got listen=[]")
        if directory is not None and not callable(directory):
            raise TypeError(f"directory must be None or a function from a PeerId to a Directory, got {directory!r}")
        if limits is not None and not isinstance(limits, TransportLimits):
            raise TypeError(f"limits must be a TransportLimits, got {limits!r}")
        self._token = token
        self._insecure = bool(insecure)
        self._require_token_beyond_loopback()
        self._identity_source = identity
        self._directory_factory = directory
        self._limits = limits or TransportLimits()
        self._factories = dict(transports or {})
        self.rng = rng or random.Random()  # noqa: S311  (spreads load, guards nothing)
        self._identity: Identity | None = None
        self._security: SwarmSecurity | None = None
        self._transports: dict[str, Transport] = {}
        self._listeners: list[Listener] = []
        self._own_addresses: list[Address] = []
        self._handlers: dict[str, OnChannel] = {}
        self._directory: Directory | None = None
        self._book: AddressWatch | GossipDirectory | None = None
        self._dependents: list[Closable] = []
        self._rounds: dict[str, RoundCounters] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._life = asyncio.Lock()
        self._running = False
        self._closed = False
        self._stopped = False
        self._closing: asyncio.Task[None] | None = None

    # Life

    async def start(self) -> Self:
        """Bind, announce, and begin to look for others in the background. Returns at once if it runs already."""
        if self._closed or self._running:
            self.check_running()
            return self
        async with self._life:
            if self._closed or self._running:
                self.check_running()
                return self
            self._loop = asyncio.get_running_loop()
            try:
                await self._start()
            except BaseException:
                await self._stop()
                self._forget()
                raise
            self._running = True
        _log.info("peer started", peer=self.id, addresses=[str(address) for address in self.addresses])
        return self

    async def aclose(self) -> None:
        """Close the averagers on this peer, say goodbye, close channels and listeners. Bounded; never raises.

        A second call waits for the first. A call that is cancelled goes on in the background.
        """
        if self._closing is None:
            self._closed = True
            if self._loop is None or not self.in_its_loop():
                self._close_identity()  # never started, or its event loop has ended and taken everything else along
                return
            self._closing = asyncio.create_task(self._close(), name="peer-close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        async with self._life:
            dependents = [dependent.aclose() for dependent in reversed(self._dependents)]
            for outcome in await asyncio.gather(*dependents, return_exceptions=True):
                if isinstance(outcome, Exception):
                    _log.warning("an object on this peer could not be closed", peer=self.id, error=repr(outcome))
            await self._stop()
            self._stopped = True
            self._running = False

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # What it is

    @property
    def running(self) -> bool:
        return self._running and not self._closed

    def check_running(self) -> None:
        """Raise `ClosedError` unless this peer runs, in the event loop of the caller."""
        if self._closed:
            raise ClosedError("this peer is closed")
        if not self._running:
            raise ClosedError("this peer is not running: start it first")
        if not self.in_its_loop():
            raise ClosedError("this peer was started in another event loop: start and use it within one")

    def in_its_loop(self) -> bool:
        """Whether the caller runs in the event loop in which this peer was started."""
        return asyncio.get_running_loop() is self._loop

    @property
    def limits(self) -> TransportLimits:
        return self._limits

    @property
    def client_mode(self) -> bool:
        """Whether this peer only dials."""
        return not self._listen

    @property
    def accepts_channels(self) -> bool:
        return not self.client_mode

    @property
    def id(self) -> PeerId:
        return self._started_identity().peer_id

    @property
    def public_key(self) -> bytes:
        """DER SubjectPublicKeyInfo, of which `id` is the hash."""
        return self._started_identity().public_key

    @property
    def swarm_id(self) -> bytes:
        """32 bytes common to everyone with the same token."""
        if self._security is None:
            raise ClosedError("this peer has not been started")
        return self._security.swarm_id

    @property
    def accepted_swarm_ids(self) -> tuple[bytes, ...]:
        """`swarm_id`, and that of the second token while the swarm changes its token."""
        if self._security is None:
            raise ClosedError("this peer has not been started")
        return self._security.accepted_swarm_ids

    @property
    def directory(self) -> Directory:
        if self._directory is None:
            raise ClosedError("this peer has not been started")
        return self._directory

    @property
    def addresses(self) -> list[Address]:
        """Where others reach this peer: with its id and the bound port, never 0. Empty in client mode."""
        return list(self._own_addresses)

    @property
    def join_line(self) -> str:
        """An address to paste into `bootstrap` on another machine; empty in client mode."""
        reachable = [address for address in self._own_addresses if not address.is_loopback]
        best = reachable or self._own_addresses
        return str(best[0]) if best else ""

    def status(self) -> dict[str, Any]:
        """A plain dict for a person or a monitor: who this is, whom it knows, the rounds of each prefix, rates in bytes per
        second of all-reduce, and what the directory holds.
        """
        book = self._book
        return {
            "id": str(self._identity.peer_id) if self._identity is not None else None,
            "running": self.running,
            "client_mode": self.client_mode,
            "addresses": [str(address) for address in self._own_addresses],
            "peers": [str(peer) for peer in book.known_peers()] if book is not None and self.running else [],
            "purposes": sorted(self._handlers),
            "bootstrap_failures": {str(address): reason for address, reason in self.bootstrap_failures().items()},
            "rounds": {prefix: counters.as_dict() for prefix, counters in sorted(self._rounds.items())},
            "rates": {
                "sent": sum(counters.rate_sent for counters in self._rounds.values()),
                "received": sum(counters.rate_received for counters in self._rounds.values()),
            },
            "directory": book.status() if isinstance(book, GossipDirectory) and self.running else {},
        }

    def __str__(self) -> str:
        return self.join_line or repr(self)

    def __repr__(self) -> str:
        if self._identity is None:
            return "<Peer, not started>"
        where = ", ".join(str(address.with_peer(None)) for address in self._own_addresses) or "client mode"
        return f"<Peer {self._identity.peer_id.short}, {where}, {'running' if self.running else 'not running'}>"

    # The hub

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature by the own key."""
        return self._started_identity().sign(data)

    def own_addresses(self) -> list[Address]:
        """As `addresses`; asked by the directory."""
        return self.addresses

    async def open_channel(self, peer: PeerId, purpose: str, *, timeout: float) -> Channel:
        """Open a channel to a peer at its known addresses in turn. Raises `DialError` kinds, within `timeout` seconds."""
        check_seconds("timeout", timeout)
        if self._book is None or self._stopped:
            raise ClosedError("this peer is not running")
        addresses = self._book.addresses_of(peer)
        if not addresses:
            raise PeerUnreachableError(f"peer {peer.short} announces no address: it is a client, gone, or not known here yet")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        failures: list[SwarmError] = []
        for index, address in enumerate(addresses):
            share = (deadline - loop.time()) / (len(addresses) - index)
            if share <= 0:
                break
            try:
                return await self.dial_address(address.with_peer(peer), purpose, share)
            except SwarmError as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        reasons = "; ".join(map(str, failures)) or f"no time is left to dial in timeout={timeout!r}"
        raise PeerUnreachableError(f"peer {peer.short}: {reasons}")

    async def dial_address(self, address: Address, purpose: str, timeout: float) -> Channel:
        """Open a channel to whoever listens at an address; with a peer id in it, only to that peer."""
        transport = self._transport(address.scheme)
        return await transport.dial(address, purpose=purpose, expect=address.peer_id, timeout=timeout)

    def serve(self, purpose: str, handler: OnChannel) -> Callable[[], None]:
        """Hand inbound channels of exactly this purpose to `handler`; returns the call that ends it.

        Raises `ValueError` if the purpose is served already.
        """
        if purpose in self._handlers:
            raise ValueError(f"purpose {purpose!r} is already served on this peer")
        self._handlers[purpose] = handler

        def end() -> None:
            if self._handlers.get(purpose) is handler:
                del self._handlers[purpose]

        return end

    def bootstrap_failures(self) -> dict[Address, str]:
        """Bootstrap addresses that could not be reached at the latest try, and why: what is behind an empty swarm."""
        return self._book.bootstrap_failures() if isinstance(self._book, GossipDirectory) else {}

    def round_counters(self, prefix: str) -> RoundCounters:
        """The counters in which an averager of this prefix notes its rounds, for `status`."""
        return self._rounds.setdefault(prefix, RoundCounters())

    def closing_with(self, dependent: Closable) -> None:
        """Close this object before the peer closes."""
        self._dependents.append(dependent)

    def no_longer_closing_with(self, dependent: Closable) -> None:
        with suppress(ValueError):
            self._dependents.remove(dependent)

    # Inside

    async def _start(self) -> None:
        self._identity = await _open_identity(self._identity_source)
        self._security = await offload(_open_security, self._identity, self._token, self._insecure)
        for address in self._listen:
            listener = await self._transport(address.scheme).listen(address, self._on_channel)
            self._listeners.append(listener)
        bound = [listener.address for listener in self._listeners]
        self._own_addresses = announced_addresses(bound, self._announce, self.id)
        if self._directory_factory is None:
            gossip = GossipDirectory(
                self._identity,
                self._security.swarm_id,
                self,
                accepted_swarm_ids=self._security.accepted_swarm_ids,
                bootstrap=[address for address in self._bootstrap if address.peer_id != self.id],
                rng=random.Random(self.rng.random()),  # noqa: S311
            )
            self._directory = self._book = gossip
            await gossip.start()
        else:
            self._directory = self._directory_factory(self.id)
            self._book = AddressWatch(self._directory, self.id, self._own_addresses)
            await self._book.start()

    async def _stop(self) -> None:
        """Close all that was opened, one kind after another; what fails to close holds up nothing else."""
        if isinstance(self._book, AddressWatch):
            await _closed([self._book])
        await _closed([self._directory] if self._directory is not None else [])
        await _closed(self._listeners)
        await _closed(list(self._transports.values()))
        self._close_identity()

    def _close_identity(self) -> None:
        if self._identity is not None and self._identity is not self._identity_source:
            self._identity.close()

    def _forget(self) -> None:
        """After a start that failed: the next one begins afresh."""
        self._identity = self._security = self._directory = self._book = self._loop = None
        self._transports, self._listeners, self._own_addresses = {}, [], []

    def _transport(self, scheme: str) -> Transport:
        """The transport of a scheme, made when it is first needed."""
        if self._security is None or (self._closed and scheme not in self._transports):
            raise ClosedError("this peer is not running")
        if scheme not in self._transports:
            context = TransportContext(security=self._security, limits=self._limits)
            factory = self._factories.get(scheme)
            self._transports[scheme] = factory(context) if factory is not None else create_transport(scheme, context)
        return self._transports[scheme]

    async def _on_channel(self, channel: Channel) -> None:
        handler = self._handlers.get(channel.purpose)
        if handler is None:
            channel.abort(f"nobody here serves {channel.purpose!r}", code="no-such-purpose")
            return
        await handler(channel)

    def _started_identity(self) -> Identity:
        if self._identity is None:
            raise ClosedError("this peer has no id yet: start it first")
        return self._identity

    def _check_addresses(self) -> None:
        for name, addresses in (("announce", self._announce or ()), ("bootstrap", self._bootstrap)):
            for address in addresses:
                if address.port == 0:
                    raise ValueError(f"{name}={str(address)!r} needs a port other than 0")

    def _require_token_beyond_loopback(self) -> None:
        if self._token is not None or self._insecure:
            return
        for name, addresses in (("listen", self._listen), ("bootstrap", self._bootstrap)):
            for address in addresses:
                if not address.is_loopback:
                    raise TokenError(missing_token_message(f"{name}={str(address)!r}"))


async def _closed(closables: Sequence[Closable]) -> None:
    """Close them side by side, within a bound. Back ends are not ours: what they raise is logged."""

    async def close(closable: Closable) -> None:
        async with asyncio.timeout(CLOSE_SECONDS):
            await closable.aclose()

    outcomes = await asyncio.gather(*map(close, closables), return_exceptions=True)
    for closable, outcome in zip(closables, outcomes, strict=True):
        if isinstance(outcome, Exception):
            _log.warning("could not be closed", what=type(closable).__name__, error=repr(outcome))


def _addresses(name: str, given: Sequence[str | Address]) -> tuple[Address, ...]:
    if isinstance(given, str | Address):
        raise TypeError(f"{name} must be a sequence of addresses, got {given!r}: write [{str(given)!r}]")
    return tuple(address if isinstance(address, Address) else Address.parse(address) for address in given)


async def _open_identity(source: str | os.PathLike[str] | Identity | None) -> Identity:
    if isinstance(source, Identity):
        return source
    if source is None:
        return Identity.generate()
    return await offload(Identity.load_or_create, source)


def _open_security(identity: Identity, token: str | Sequence[str] | None, insecure: bool) -> SwarmSecurity:
    try:
        return open_swarm_security(identity, token, insecure=insecure)
    except ValueError as error:
        if isinstance(error, SwarmError):
            raise
        raise SecurityError(str(error)) from None
