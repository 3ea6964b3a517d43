"""What discovery must do: small signed records, published under a topic by their owner, that everybody can list.

Nothing here does I/O. A **record** lives until its time-to-live is over, is replaced by its owner's newer one, or is
withdrawn. Values are opaque bytes. Readers get only what is verified, unexpired and the owner's latest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from swarmavg.identifiers import PeerId

MAX_TOPIC_BYTES: Final = 256
MAX_VALUE_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """Order of one owner's records of one topic: a later start of the process wins, then a later publication."""

    incarnation: int
    counter: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One owner's value under one topic, as a reader sees it."""

    topic: str
    owner: PeerId
    value: bytes
    version: Version
    expires_in: float
    """Seconds left, at the moment it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change under a watched topic: the new record, or `None` in `record` when it was withdrawn or expired."""

    topic: str
    owner: PeerId
    record: Record | None


class Directory(Protocol):
    """A place where members publish and look up records. Values: at most `MAX_VALUE_BYTES`; topics: `MAX_TOPIC_BYTES`."""

    async def publish(self, topic: str, value: bytes, *, ttl: float, urgent: bool = False) -> None:
        """Replace the own record under `topic`; it lives for `ttl` seconds unless published again.

        `urgent` records are pushed to others at once. Returns when the record is accepted locally, without waiting for
        anybody. Raises `ValueError` (size, ttl, topic), `DirectoryError` (back end), `ClosedError`.
        """

    async def withdraw(self, topic: str) -> None:
        """Remove the own record under `topic`, for everybody, at once. No error if there is none."""

    async def fetch(self, topic: str) -> list[Record]:
        """Every live record of `topic` known here, the own one included, sorted by owner."""

    def watch(self, topic: str) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        """Inside the block, iterate over changes: first every present record, then each change, in order, without gaps.

        A slow reader may miss values that were replaced before it looked, never the latest.
        """

    async def aclose(self) -> None:
        """Withdraw everything published here, bounded, and stop. Idempotent."""
