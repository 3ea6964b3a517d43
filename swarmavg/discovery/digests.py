"""Digests of a set of records, by which two stores find out cheaply what differs between them.

Every (topic, owner) has a **fingerprint**, and falls by its first byte into one of 256 **buckets**. A bucket's digest is the
exclusive or over hashes of its (fingerprint, version) pairs, so that a change costs one hash. Small stores are compared by
16 coarse buckets, each of 16 fine ones in a row.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache, reduce
from operator import xor
from typing import Final, TypeAlias

from swarmavg.discovery.interface import Version
from swarmavg.errors import RemoteProtocolError
from swarmavg.identifiers import PeerId

Fingerprint: TypeAlias = bytes

FINGERPRINT_BYTES: Final = 16
FINE: Final = 256
COARSE: Final = 16
DIGEST_BYTES: Final = 8


@lru_cache(maxsize=4096)
def fingerprint(topic: str, owner: PeerId) -> Fingerprint:
    """Short name of a (topic, owner): hashes differ between swarms as little as the names do, it hides nothing."""
    return hashlib.blake2b(owner.digest + topic.encode(), digest_size=FINGERPRINT_BYTES).digest()


class BucketDigests:
    """The digests of a changing set of (fingerprint, version)."""

    def __init__(self) -> None:
        self._fine = [0] * FINE

    def toggle(self, name: Fingerprint, version: Version) -> None:
        """Put in what was out, take out what was in."""
        content = name + version.incarnation.to_bytes(8) + version.counter.to_bytes(8)
        digest = hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
        self._fine[name[0]] ^= int.from_bytes(digest)

    def encode(self, buckets: int) -> bytes:
        """The digests of 16 or 256 buckets, 8 bytes each."""
        return struct.pack(f">{buckets}Q", *self._values(buckets))

    def differing(self, other: bytes) -> tuple[int, list[int]]:
        """How many buckets the other side's `encode` has, and which of them differ. Raises `RemoteProtocolError`."""
        buckets, rest = divmod(len(other), DIGEST_BYTES)
        if rest or buckets not in {COARSE, FINE}:
            raise RemoteProtocolError(f"malformed digest: {len(other)} bytes")
        pairs = zip(self._values(buckets), struct.unpack(f">{buckets}Q", other), strict=True)
        return buckets, [bucket for bucket, (mine, their) in enumerate(pairs) if mine != their]

    def _values(self, buckets: int) -> list[int]:
        if buckets == FINE:
            return self._fine
        size = FINE // buckets
        return [reduce(xor, self._fine[start : start + size]) for start in range(0, FINE, size)]
