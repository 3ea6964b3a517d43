"""What an averager tells everybody about itself: its presence, and the configuration that must agree before it can meet others.

Values, encoding and validation only. Times on the wire are durations, measured at the moment of encoding.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from swarmavg.errors import RemoteProtocolError
from swarmavg.identifiers import PeerId
from swarmavg.protocol.group import Role
from swarmavg.transport.packing import pack, unpack

VERSIONS: Final = (1, 1)
"""Lowest and highest protocol version spoken here. Peers meet when their ranges overlap."""
MAX_GROUP_BITS: Final = 256
MAX_CONFIG_FIELDS: Final = 64
MAX_FIELD_NAME: Final = 40
MAX_PRESENCE_BYTES: Final = 8 * 1024
INCARNATION_BYTES: Final = 8
_DIGEST_BYTES: Final = 4
_LONGEST_SECONDS: Final = 1e9


@dataclass(frozen=True, slots=True)
class MatchConfig:
    """Everything that must agree for a plan to agree, in the order in which a difference is reported.

    `fields` are (name, short text) pairs such as ``("compression", "float16")``; long values go in as a digest. The hash
    says whether two peers can meet at all; four bytes per field let a stranger say what differs.
    """

    fields: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.fields]
        if len(names) > MAX_CONFIG_FIELDS or len(set(names)) != len(names):
            raise ValueError(f"fields must be at most {MAX_CONFIG_FIELDS} with distinct names, got {names}")
        if any(not 0 < len(name) <= MAX_FIELD_NAME for name in names):
            raise ValueError(f"field names must have 1 to {MAX_FIELD_NAME} characters, got {names}")

    @property
    def hash(self) -> bytes:
        return hashlib.sha256(pack([list(field) for field in self.fields])).digest()

    @property
    def digests(self) -> tuple[tuple[str, bytes], ...]:
        return tuple((name, hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]) for name, text in self.fields)

    def first_difference(self, theirs: tuple[tuple[str, bytes], ...]) -> str:
        """Name and our value of the first field in which a stranger differs, for people to read."""
        other = dict(theirs)
        ours = dict(self.digests)
        for name, text in self.fields:
            if other.get(name) != ours[name]:
                return f"{name!r} (ours: {text})"
        extra = next((name for name in other if name not in ours), None)
        return f"{extra!r} (which we do not have)" if extra is not None else "the order of its fields"


class Phase(enum.Enum):
    """What an averager is doing."""

    IDLE = "idle"
    LOOKING = "looking"
    IN_ROUND = "round"


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """One averager as it last described itself. Durations count from the moment at which it did."""

    versions: tuple[int, int] = VERSIONS
    role: Role
    phase: Phase
    bits: str
    """The bucket in which it looks, or will look next: for `IN_ROUND`, the bits that it will have after the round."""
    config_hash: bytes
    config_digests: tuple[tuple[str, bytes], ...] = ()
    attempt: int = 0
    """Counts its matchmaking windows."""
    due_in: float | None = None
    """Seconds to its next step (`IDLE`, `IN_ROUND`; `None` = it cannot tell), or until it may begin (`LOOKING`)."""
    incarnation: bytes
    """Random per start of the averager: descriptions of different starts cannot be ordered by `serial`."""
    serial: int
    """Grows with every change of what is described."""
    follows: PeerId | None = None
    """The leader it follows or is asking, itself when it leads. Only in messages, which are fresher than the directory."""

    def encode(self) -> bytes:
        fields: dict[str, Any] = {
            "v": list(self.versions),
            "role": self.role.value,
            "phase": self.phase.value,
            "bits": self.bits,
            "config": self.config_hash,
            "fields": [list(pair) for pair in self.config_digests],
            "attempt": self.attempt,
            "due": self.due_in,
            "inc": self.incarnation,
            "serial": self.serial,
            "follows": None if self.follows is None else self.follows.digest,
        }
        return pack(fields)


def decode_presence(data: bytes) -> Presence:
    """Read a presence. Keys of later versions are ignored. Raises `RemoteProtocolError`."""
    fields = unpack(data, what="presence", max_bytes=MAX_PRESENCE_BYTES)
    try:
        return _read_presence(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(f"malformed presence: {error!r}") from None


def _read_presence(fields: Any) -> Presence:
    if not isinstance(fields, Mapping):
        raise TypeError("not a map")
    low, high = fields["v"]
    follows = fields.get("follows")
    return Presence(
        versions=(read_count(low), read_count(high)),
        role=Role(fields["role"]),
        phase=Phase(fields["phase"]),
        bits=read_bits(fields["bits"]),
        config_hash=read_bytes(fields["config"], 32),
        config_digests=_read_digests(fields["fields"]),
        attempt=read_count(fields["attempt"]),
        due_in=read_seconds(fields["due"]),
        incarnation=read_bytes(fields["inc"], INCARNATION_BYTES),
        serial=read_count(fields["serial"]),
        follows=None if follows is None else PeerId(read_bytes(follows, 32)),
    )


def _read_digests(value: Any) -> tuple[tuple[str, bytes], ...]:
    if not isinstance(value, list) or len(value) > MAX_CONFIG_FIELDS:
        raise ValueError("the configuration must be a short list")
    return tuple((read_text(name, MAX_FIELD_NAME), read_bytes(digest, _DIGEST_BYTES)) for name, digest in value)


def read_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise ValueError(f"{value!r} is not a count")
    return value


def read_bytes(value: Any, length: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != length:
        raise ValueError(f"expected {length} bytes")
    return value


def read_text(value: Any, limit: int) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise ValueError(f"expected a text of at most {limit} characters")
    return value


def read_bits(value: Any) -> str:
    bits = read_text(value, MAX_GROUP_BITS)
    if set(bits) - {"0", "1"}:
        raise ValueError(f"{bits!r} are not group bits")
    return bits


def read_seconds(value: Any) -> float | None:
    """A duration >= 0, or `None`."""
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= _LONGEST_SECONDS:
        raise ValueError(f"{value!r} is not a duration")
    return float(value)


def versions_overlap(ours: tuple[int, int], theirs: tuple[int, int]) -> bool:
    return ours[0] <= theirs[1] and theirs[0] <= ours[1]
