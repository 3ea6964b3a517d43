"""Names of things on the wire: peers, groups and addresses.

Plain frozen values. Nothing here does I/O, knows about keys, or imports another module of the package but `errors`.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Self

from swarmavg.errors import AddressError

PEER_ID_BYTES = 32
GROUP_ID_BYTES = 16

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*\Z")


@dataclass(frozen=True, slots=True, order=True, repr=False)
class PeerId:
    """Name of a peer: sha256 of the SubjectPublicKeyInfo (DER) of its Ed25519 key, shown as lower-case base32.

    Ordered by its 32 bytes, so that every peer sorts a set of ids alike.
    """

    digest: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.digest, bytes) or len(self.digest) != PEER_ID_BYTES:
            raise ValueError(f"digest must be {PEER_ID_BYTES} bytes, got {self.digest!r}")

    @classmethod
    def from_public_key(cls, spki_der: bytes) -> Self:
        """The id of the owner of a public key given as DER SubjectPublicKeyInfo."""
        return cls(hashlib.sha256(spki_der).digest())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` printed. Raises `AddressError` for anything else."""
        padded = text.upper() + "=" * (-len(text) % 8)
        try:
            digest = base64.b32decode(padded)
        except ValueError as error:
            raise AddressError(f"not a peer id: {text!r} ({error})") from None
        if len(digest) != PEER_ID_BYTES or str(cls(digest)) != text.lower():
            raise AddressError(f"not a peer id: {text!r} (a peer id is 52 base32 characters)")
        return cls(digest)

    @property
    def short(self) -> str:
        """The first eight characters, for logs."""
        return str(self)[:8]

    def __str__(self) -> str:
        return base64.b32encode(self.digest).decode("ascii").rstrip("=").lower()

    def __repr__(self) -> str:
        return f"PeerId({self.short})"


@dataclass(frozen=True, slots=True, order=True, repr=False)
class GroupId:
    """Name of one group, and so of one round: 16 random bytes drawn by its leader."""

    digest: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.digest, bytes) or len(self.digest) != GROUP_ID_BYTES:
            raise ValueError(f"digest must be {GROUP_ID_BYTES} bytes, got {self.digest!r}")

    @classmethod
    def random(cls) -> Self:
        return cls(secrets.token_bytes(GROUP_ID_BYTES))

    def __str__(self) -> str:
        return self.digest.hex()

    def __repr__(self) -> str:
        return f"GroupId({self.digest.hex()[:8]})"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer listens: ``scheme://[peer id@]host[:port]``, for example ``tcp://<id>@192.0.2.7:31337``.

    `port` 0 asks the system for a free one and is legal for listening only. IPv6 hosts are written in brackets.
    """

    scheme: str
    host: str
    port: int = 0
    peer_id: PeerId | None = None

    def __post_init__(self) -> None:
        if not _SCHEME.match(self.scheme):
            raise AddressError(f"bad scheme {self.scheme!r} in an address")
        if not self.host or any(c in self.host for c in "/@[] \t\r\n"):
            raise AddressError(f"bad host {self.host!r} in an address")
        if not 0 <= self.port <= 65535:
            raise AddressError(f"bad port {self.port!r} in an address: must be between 0 and 65535")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an address. Raises `AddressError` that quotes the text and says what is wrong with it."""
        if not isinstance(text, str):
            raise AddressError(f"an address must be a string such as 'tcp://127.0.0.1:0', got {text!r}")
        scheme, separator, rest = text.strip().partition("://")
        if not separator:
            raise AddressError(f"no scheme in address {text!r}: write it as tcp://host:port")
        owner, at, location = rest.rpartition("@")
        host, port = _split_host_port(location, text)
        try:
            return cls(scheme.lower(), host, port, PeerId.parse(owner) if at else None)
        except AddressError as error:
            raise AddressError(f"{error} (in {text!r})") from None

    def with_peer(self, peer_id: PeerId | None) -> Address:
        return Address(self.scheme, self.host, self.port, peer_id)

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host can reach it. Name resolution is not consulted."""
        host = self.host.lower()
        return self.scheme == "memory" or host in {"localhost", "::1"} or host.startswith("127.")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        owner = f"{self.peer_id}@" if self.peer_id is not None else ""
        return f"{self.scheme}://{owner}{host}:{self.port}"


def _split_host_port(location: str, whole: str) -> tuple[str, int]:
    if location.startswith("["):
        host, bracket, tail = location[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")):
            raise AddressError(f"bad IPv6 host in address {whole!r}")
        port = tail[1:]
    else:
        host, _, port = location.partition(":")
        if ":" in port:
            raise AddressError(f"write an IPv6 host in brackets, as tcp://[::1]:0, in address {whole!r}")
    if not port:
        return host, 0
    if not (port.isascii() and port.isdigit()):
        raise AddressError(f"bad port {port!r} in address {whole!r}")
    return host, int(port)
