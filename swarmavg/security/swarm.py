"""What a peer shows to others and asks of them: the `ChannelSecurity` of a token swarm, and of a swarm without one."""

from __future__ import annotations

import datetime as dt
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from swarmavg.errors import TokenError
from swarmavg.identifiers import PeerId
from swarmavg.security.identity import Identity
from swarmavg.security.swarm_ca import RENEW_BEFORE, SwarmAuthority, issue_leaf, make_authority, peer_id_of
from swarmavg.security.tls import make_contexts
from swarmavg.security.tokens import derive_signing_key

NO_SWARM_ID: Final = bytes(32)
"""`SwarmSecurity.swarm_id` without a token: 32 zero bytes, which no public key hashes to."""
MAX_TOKENS: Final = 2

Clock: TypeAlias = Callable[[], dt.datetime]
"""Returns the time as an aware datetime."""


@dataclass(frozen=True, slots=True)
class _Contexts:
    server: ssl.SSLContext
    client: ssl.SSLContext
    renew_at: dt.datetime


def utc_now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class SwarmSecurity:
    """One peer's standing in one swarm. Made by `open_swarm_security`. Safe to use from several threads.

    The first authority signs what this peer shows, each of them may sign what others show: that is how a swarm changes its
    token without a stop. Without authorities there is no TLS, and ids are claimed instead of proven.
    """

    def __init__(
        self,
        identity: Identity,
        authorities: Sequence[SwarmAuthority],
        *,
        insecure: bool = False,
        clock: Clock = utc_now,
    ) -> None:
        self._identity = identity
        self._authorities = tuple(authorities)
        self._insecure = insecure
        self._clock = clock
        self._contexts: _Contexts | None = None
        self._lock = threading.Lock()

    @property
    def peer_id(self) -> PeerId:
        return self._identity.peer_id

    @property
    def swarm_id(self) -> bytes:
        """32 bytes, equal for everyone with the same (first) token; `NO_SWARM_ID` without one."""
        return self._authorities[0].swarm_id if self._authorities else NO_SWARM_ID

    @property
    def accepted_swarm_ids(self) -> tuple[bytes, ...]:
        """`swarm_id` first, then that of the second token, while tokens are being changed."""
        return tuple(authority.swarm_id for authority in self._authorities) or (NO_SWARM_ID,)

    @property
    def insecure(self) -> bool:
        """Whether plaintext beyond loopback was explicitly allowed."""
        return self._insecure

    def server_context(self) -> ssl.SSLContext | None:
        """For accepting connections; `None` = plaintext.

        A listener may keep it for weeks: each handshake on it shows the certificate that is current by then.
        """
        contexts = self._current()
        return contexts.server if contexts else None

    def client_context(self) -> ssl.SSLContext | None:
        """For dialling; `None` = plaintext. Ask again for each dial: its certificate ends within days."""
        contexts = self._current()
        return contexts.client if contexts else None

    def peer_of(self, certificate: bytes) -> PeerId:
        """The id in a verified DER certificate. Raises `AuthenticationError` when it may not be here."""
        return peer_id_of(certificate, self._clock())

    def _current(self) -> _Contexts | None:
        if not self._authorities:
            return None
        with self._lock:
            now = self._clock()
            if self._contexts is None or now >= self._contexts.renew_at:
                self._contexts = self._make(now)
            return self._contexts

    def _make(self, now: dt.datetime) -> _Contexts:
        leaf = issue_leaf(self._authorities[0], self._identity.public_key, now)
        trusted = [authority.certificate for authority in self._authorities]
        server, client = make_contexts(self._identity, leaf, trusted)
        server.sni_callback = self._show_current
        return _Contexts(server, client, leaf.not_valid_after_utc - RENEW_BEFORE)

    def _show_current(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called by `ssl` in each inbound handshake, before a certificate is chosen."""
        current = self.server_context()
        if current is not None:
            connection.context = current

    def __repr__(self) -> str:
        return f"SwarmSecurity(peer={self.peer_id.short}, swarm={self.swarm_id.hex()[:8]})"


def open_swarm_security(
    identity: Identity,
    token: str | Sequence[str] | None,
    *,
    insecure: bool = False,
    clock: Clock = utc_now,
) -> SwarmSecurity:
    """The security of a peer that knows `token`, or two of them while the swarm changes its token (the first is shown).

    `insecure` allows plaintext beyond loopback and is for swarms without a token. Raises `TokenError` for a bad token,
    `ValueError` for `insecure` with a token. A passphrase in place of a token makes this slow: call it off the event loop.
    """
    tokens = _as_tokens(token)
    if insecure and tokens:
        raise ValueError("insecure=True is for swarms without a token: drop one of the two arguments")
    authorities = [make_authority(derive_signing_key(each)) for each in tokens]
    if len({authority.swarm_id for authority in authorities}) < len(authorities):
        raise TokenError("the two tokens are the same: give the one, or the new and the old one")
    return SwarmSecurity(identity, authorities, insecure=insecure, clock=clock)


def _as_tokens(token: str | Sequence[str] | None) -> tuple[str, ...]:
    if token is None:
        return ()
    if isinstance(token, str):
        return (token,)
    if not isinstance(token, Sequence) or isinstance(token, bytes | bytearray | memoryview):
        raise TypeError(f"token must be a str, a sequence of them, or None, got a {type(token).__name__}")
    if not 1 <= len(token) <= MAX_TOKENS:
        raise TokenError(f"token must be one token or the new and the old one, got a sequence of {len(token)}")
    return tuple(token)
