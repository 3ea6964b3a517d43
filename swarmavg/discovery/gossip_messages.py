"""What travels on a gossip link. Encoding and validation only.

    digest  (digests of my buckets)                          at once on a new link, then every 2 s; also the sign of life
    summary (fingerprint, version) of all I hold in the      answer to a digest, for buckets that differ
            differing buckets
    records (body, signature, age), ...                      pushed, or what a summary shows to be missing there
    passed  (topic, version)                                 to an owner: your record is older than one of yours I have seen

Both sides send digests, so each side's gaps are filled by the other. Every message fits a channel's header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from swarmavg.discovery.digests import COARSE, FINE, FINGERPRINT_BYTES, Fingerprint
from swarmavg.discovery.interface import Version
from swarmavg.discovery.limits import MAX_TTL_SECONDS, check_topic
from swarmavg.discovery.records import SignedRecord, check_number, decode_record
from swarmavg.errors import RemoteProtocolError
from swarmavg.transport.interface import MAX_HEADER_BYTES
from swarmavg.transport.packing import pack, unpack

MAX_SUMMARY_ENTRIES: Final = 1500
MAX_BATCH_RECORDS: Final = 64
MAX_BATCH_BYTES: Final = 16 * 1024
"""A batch is closed once it holds as much, so that checking its signatures never keeps the event loop for long."""

_ENTRY = struct.Struct(f">{FINGERPRINT_BYTES}sQQ")


@dataclass(frozen=True, slots=True)
class Digest:
    digests: bytes

    def encode(self) -> bytes:
        return pack(["digest", self.digests])


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything the sender holds in the listed buckets, out of `buckets`; at most `MAX_SUMMARY_ENTRIES` entries."""

    buckets: int
    listed: frozenset[int]
    entries: dict[Fingerprint, Version]

    def encode(self) -> bytes:
        packed = (_ENTRY.pack(name, v.incarnation, v.counter) for name, v in self.entries.items())
        return pack(["summary", self.buckets, bytes(sorted(self.listed)), b"".join(packed)])


@dataclass(frozen=True, slots=True)
class Records:
    """Records with their ages in seconds."""

    entries: tuple[tuple[SignedRecord, float], ...]

    def encode(self) -> bytes:
        return pack(["records", [[record.body, record.signature, age] for record, age in self.entries]])


@dataclass(frozen=True, slots=True)
class Passed:
    topic: str
    version: Version

    def encode(self) -> bytes:
        return pack(["passed", self.topic, self.version.incarnation, self.version.counter])


GossipMessage: TypeAlias = Digest | Summary | Records | Passed


def decode_message(header: bytes) -> GossipMessage:
    """Read a message. Raises `RemoteProtocolError` for anything no correct peer sends."""
    fields = unpack(header, what="gossip message", max_bytes=MAX_HEADER_BYTES, max_depth=3)
    if not isinstance(fields, list) or not fields:
        raise RemoteProtocolError("malformed gossip message: a list with a kind is needed")
    try:
        return _from_fields(fields)
    except (TypeError, ValueError) as error:
        raise RemoteProtocolError(f"malformed gossip message {fields[0]!r:.20}: {error}") from None


def _from_fields(fields: list[Any]) -> GossipMessage:
    match fields:
        case ["digest", bytes() as digests]:
            return Digest(digests)
        case ["summary", int() as buckets, bytes() as listed, bytes() as entries]:
            return _summary(buckets, listed, entries)
        case ["records", list() as entries] if len(entries) <= MAX_BATCH_RECORDS:
            return Records(tuple(_aged_record(entry) for entry in entries))
        case ["passed", str() as topic, incarnation, counter]:
            return Passed(check_topic(topic), Version(check_number(incarnation), check_number(counter)))
        case _:
            raise ValueError("unknown kind or wrong fields")


def _summary(buckets: int, listed: bytes, entries: bytes) -> Summary:
    if buckets not in {COARSE, FINE} or any(bucket >= buckets for bucket in listed):
        raise ValueError(f"bad buckets, {buckets} in all")
    if len(entries) % _ENTRY.size or len(entries) > MAX_SUMMARY_ENTRIES * _ENTRY.size:
        raise ValueError(f"{len(entries)} bytes of entries")
    found = {name: Version(check_number(i), check_number(c)) for name, i, c in _ENTRY.iter_unpack(entries)}
    return Summary(buckets, frozenset(listed), found)


def _aged_record(entry: Any) -> tuple[SignedRecord, float]:
    match entry:
        case [body, signature, float() as age] if 0.0 <= age <= MAX_TTL_SECONDS:
            return decode_record(body, signature), age
        case _:
            raise ValueError("a record needs a body, a signature and an age in seconds")
