"""What goes into the matchmaking machine and what comes out of it. Plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from swarmavg.identifiers import GroupId, PeerId
from swarmavg.protocol.group import Group, Role
from swarmavg.protocol.matchmaking_begin import MAX_GROUP_SIZE
from swarmavg.protocol.matchmaking_messages import MAX_GATHER_BYTES, MatchMessage
from swarmavg.protocol.matchmaking_presence import MatchConfig, Presence, read_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchSettings:
    """What stays the same over the life of an averager. Times in seconds."""

    prefix: str
    role: Role
    config: MatchConfig
    target_group_size: int | None
    """Most members of a group; `None` = everyone who shows up."""
    min_group_size: int
    request_timeout: float
    window: float
    """How long a group stays open when it is not full and not everyone known has arrived."""

    def __post_init__(self) -> None:
        for name in ("request_timeout", "window"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive finite number of seconds, got {value!r}")
        if not 1 <= self.min_group_size <= MAX_GROUP_SIZE:
            raise ValueError(f"min_group_size must be between 1 and {MAX_GROUP_SIZE}, got {self.min_group_size!r}")
        target = self.target_group_size
        if target is not None and not self.min_group_size <= target <= MAX_GROUP_SIZE:
            raise ValueError(
                f"target_group_size must be between min_group_size ({self.min_group_size}) and {MAX_GROUP_SIZE}, got {target!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LookRequest:
    """One search for a group. Times in seconds."""

    bits: str = ""
    """The bucket: only peers with the same bits meet."""
    gather: bytes = b""
    """The user's value, msgpack; every member gets those of all."""
    bandwidth: float | None = None
    not_before: float | None = None
    """The group must not start earlier than this, counted from now; `None` = as soon as the rules allow."""
    deadline: float = math.inf
    """Moment (on the clock of `now`) at which the search fails."""
    window: float | None = None
    """`None` = as in the settings."""

    def __post_init__(self) -> None:
        read_bits(self.bits)
        if len(self.gather) > MAX_GATHER_BYTES:
            raise ValueError(f"gather must be at most {MAX_GATHER_BYTES} bytes once packed, got {len(self.gather)}")
        for name in ("bandwidth", "not_before"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be None or a finite number >= 0, got {value!r}")
        if math.isnan(self.deadline):
            raise ValueError(f"deadline must be a number, got {self.deadline!r}")
        if self.window is not None and not (math.isfinite(self.window) and self.window > 0):
            raise ValueError(f"window must be None or a positive finite number, got {self.window!r}")


@dataclass(frozen=True, slots=True)
class Look:
    """Local command: find a group."""

    request: LookRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Local command: stop looking; from a group that stands already, step back and tell its members."""


@dataclass(frozen=True, slots=True)
class RoundFinished:
    """Local command: the round of the assembled group is over."""

    bits: str
    """The bucket of the next step."""
    ok: bool
    failed: frozenset[PeerId] = frozenset()
    """Members that failed in it: nobody waits for them before they show themselves again."""


@dataclass(frozen=True, slots=True)
class BitsChanged:
    """Local command, idle or in a round: the bucket of the next step."""

    bits: str


@dataclass(frozen=True, slots=True)
class Close:
    """Local command: leave for good."""


@dataclass(frozen=True, slots=True)
class PresenceSeen:
    """The directory shows a presence that was published `age` seconds ago."""

    peer: PeerId
    presence: Presence
    age: float


@dataclass(frozen=True, slots=True)
class PresenceGone:
    """The directory shows that a presence was withdrawn or expired."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class MessageReceived:
    peer: PeerId
    presence: Presence
    message: MatchMessage


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """A message could not be brought to a peer, or the peer broke the protocol."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The connection with a peer broke; it may be alive."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class BeginSeen:
    """A channel of a round carried a begin: adopted if it names the current nonce."""

    signed: bytes


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline has come."""


MatchEvent: TypeAlias = (
    Look
    | Cancel
    | RoundFinished
    | BitsChanged
    | Close
    | PresenceSeen
    | PresenceGone
    | MessageReceived
    | PeerFailed
    | LinkLost
    | BeginSeen
    | Tick
)


@dataclass(frozen=True, slots=True)
class Send:
    peer: PeerId
    presence: Presence
    message: MatchMessage


@dataclass(frozen=True, slots=True)
class Publish:
    presence: Presence


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take the presence out of the directory."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """The group stands; all begins of a leader were sent before."""

    group: Group


@dataclass(frozen=True, slots=True)
class Failed:
    """No group in time."""

    message: str
    seen: Mapping[PeerId, str]


@dataclass(frozen=True, slots=True)
class MemberLost:
    """A member of the standing group said that it takes no part."""

    group_id: GroupId
    peer: PeerId
    reason: str


MatchEffect: TypeAlias = Send | Publish | Withdraw | Assembled | Failed | MemberLost
