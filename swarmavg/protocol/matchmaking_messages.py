"""What averagers say to each other while they look for a group. Values, encoding and validation only.

    joiner                             leader
      join      ------------------>             every join is answered at once:
                <------------------  accepted   a lease, renewed by `renew`, each answered with `accepted`
                <------------------  redirect   ask that one, whose key is smaller
                <------------------  rejected   with a reason
      renew     ------------------>
                <------------------  released   the lease ends without fault: deal again
      leave     ------------------>             the joiner gives up this nonce
                <------------------  begin      the group stands
      refuse    ------------------>             the group stands without me, because ...
      probe  <---- any two ---->  alive

Every message carries the sender's presence, so that the latest word about a peer is its own. The payload carries what may be
long: the gathered value of a join, the signed begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from swarmavg.errors import RemoteProtocolError
from swarmavg.identifiers import GROUP_ID_BYTES, GroupId, PeerId
from swarmavg.protocol.group import Role
from swarmavg.protocol.matchmaking_presence import (
    INCARNATION_BYTES,
    Presence,
    decode_presence,
    read_bytes,
    read_count,
    read_seconds,
    read_text,
)
from swarmavg.transport.packing import pack, unpack

NONCE_BYTES: Final = 16
MAX_GATHER_BYTES: Final = 64 * 1024
MAX_BEGIN_BYTES: Final = 8 * 1024 * 1024
MAX_LISTED: Final = 64
"""Most candidates, or peers to avoid, in one message."""
MAX_REASON: Final = 400


@dataclass(frozen=True, slots=True)
class Candidate:
    """A compatible peer that looks in the sender's bucket, at second hand."""

    peer: PeerId
    role: Role
    incarnation: bytes
    serial: int
    due_in: float | None
    """Seconds until it may begin; `None` = at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """May I be a member of your group?"""

    nonce: bytes
    min_group_size: int
    window: float
    """Seconds until the joiner's matchmaking window closes."""
    deadline: float | None
    """Seconds until the joiner needs a group at the latest; `None` = it can wait for ever."""
    starts_in: float
    """Seconds before which the joiner must not start; 0 = now."""
    bandwidth: float | None
    gather: bytes
    final: bool
    """Three redirects are enough: accept if there is room."""
    avoid: tuple[PeerId, ...]
    """Peers that did not answer the joiner, or refused it."""
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """I am still here."""

    nonce: bytes
    window: float
    deadline: float | None
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """You are in my group for one request timeout more."""

    nonce: bytes
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirect:
    """You are not in my group: ask `to`."""

    nonce: bytes
    to: PeerId
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """You are not in my group. `code` is for programs.

    ``incompatible``, ``client``, ``not-looking``, ``following``, ``full``, ``schedule``, ``size``, ``closing``: ask somebody
    else. ``unknown``: the join is void, make a new one. Others, of later versions, are treated like the first ones.
    """

    nonce: bytes
    code: str
    reason: str
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """You are not in my group any more, by nobody's fault: with these candidates you will find a better place."""

    nonce: bytes
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The join with this nonce is void."""

    nonce: bytes
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The group stands. `signed` is what `matchmaking_begin` reads."""

    signed: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """I take no part in the group that you began."""

    group_id: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Are you there, and what are you doing?"""


@dataclass(frozen=True, slots=True)
class Alive:
    """Answer to a probe: the presence that comes with it says all."""


MatchMessage: TypeAlias = Join | Renew | Accepted | Redirect | Rejected | Released | Leave | Begin | Refuse | Probe | Alive


def encode_message(presence: Presence, message: MatchMessage) -> tuple[bytes, bytes]:
    """The header and the payload of one message."""
    fields: dict[str, Any] = {}
    payload = b""
    for name in message.__slots__:
        value = getattr(message, name)
        if name in {"gather", "signed"}:
            payload = value
        else:
            fields[name] = _plain(value)
    return pack([_KINDS[type(message)], presence.encode(), fields]), payload


def decode_message(header: bytes, payload: bytes) -> tuple[Presence, MatchMessage]:
    """Read a message and its sender's presence. Keys of later versions are ignored. Raises `RemoteProtocolError`."""
    content = unpack(header, what="matchmaking message")
    try:
        kind, presence, fields = content
        if not isinstance(fields, Mapping):
            raise TypeError("fields must be a map")
        reader = _READERS[kind]
        return decode_presence(_as_bytes(presence)), reader(fields, payload)
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(f"malformed matchmaking message: {error!r}") from None


def payload_limit(header: bytes) -> int:
    """How large the payload of a message may be, judged by its header. Raises `RemoteProtocolError`."""
    content = unpack(header, what="matchmaking message")
    kind = content[0] if isinstance(content, list) and content else None
    return {"join": MAX_GATHER_BYTES, "begin": MAX_BEGIN_BYTES}.get(kind, 0) if isinstance(kind, str) else 0


def _plain(value: Any) -> Any:
    if isinstance(value, PeerId | GroupId):
        return value.digest
    if isinstance(value, Candidate):
        return [value.peer.digest, value.role.value, value.incarnation, value.serial, value.due_in]
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return value[:MAX_REASON]
    return value


def _as_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("expected bytes")
    return value


def _nonce(fields: Mapping[str, Any]) -> bytes:
    return read_bytes(fields["nonce"], NONCE_BYTES)


def _peer(value: Any) -> PeerId:
    return PeerId(read_bytes(value, 32))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_LISTED:
        raise ValueError(f"expected a list of at most {MAX_LISTED}")
    return value


def _candidates(fields: Mapping[str, Any]) -> tuple[Candidate, ...]:
    found = []
    for peer, role, incarnation, serial, due_in in _list(fields["candidates"]):
        token = read_bytes(incarnation, INCARNATION_BYTES)
        found.append(Candidate(_peer(peer), Role(role), token, read_count(serial), read_seconds(due_in)))
    return tuple(found)


def _duration(value: Any) -> float:
    seconds = read_seconds(value)
    if seconds is None:
        raise ValueError("a duration is missing")
    return seconds


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("expected a boolean")
    return value


def read_bandwidth(value: Any) -> float | None:
    """A finite number >= 0, or `None`."""
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"bandwidth {value!r} is not a finite number >= 0")
    return float(value)


def _limited(payload: bytes, limit: int) -> bytes:
    if len(payload) > limit:
        raise ValueError(f"a payload of {len(payload)} bytes, at most {limit} are allowed")
    return payload


def _read_join(fields: Mapping[str, Any], payload: bytes) -> Join:
    return Join(
        nonce=_nonce(fields),
        min_group_size=max(1, read_count(fields["min_group_size"])),
        window=_duration(fields["window"]),
        deadline=read_seconds(fields["deadline"]),
        starts_in=_duration(fields["starts_in"]),
        bandwidth=read_bandwidth(fields["bandwidth"]),
        gather=_limited(payload, MAX_GATHER_BYTES),
        final=_flag(fields["final"]),
        avoid=tuple(_peer(peer) for peer in _list(fields["avoid"])),
        candidates=_candidates(fields),
    )


def _read_renew(fields: Mapping[str, Any], _payload: bytes) -> Renew:
    window, deadline = _duration(fields["window"]), read_seconds(fields["deadline"])
    return Renew(nonce=_nonce(fields), window=window, deadline=deadline, candidates=_candidates(fields))


def _read_accepted(fields: Mapping[str, Any], _payload: bytes) -> Accepted:
    return Accepted(nonce=_nonce(fields), candidates=_candidates(fields))


def _read_redirect(fields: Mapping[str, Any], _payload: bytes) -> Redirect:
    return Redirect(nonce=_nonce(fields), to=_peer(fields["to"]), candidates=_candidates(fields))


def _read_rejected(fields: Mapping[str, Any], _payload: bytes) -> Rejected:
    code, reason = read_text(fields["code"], 40), read_text(fields["reason"], MAX_REASON)
    return Rejected(nonce=_nonce(fields), code=code, reason=reason, candidates=_candidates(fields))


def _read_released(fields: Mapping[str, Any], _payload: bytes) -> Released:
    return Released(nonce=_nonce(fields), candidates=_candidates(fields))


def _read_leave(fields: Mapping[str, Any], _payload: bytes) -> Leave:
    return Leave(nonce=_nonce(fields), reason=read_text(fields["reason"], MAX_REASON))


def _read_begin(_fields: Mapping[str, Any], payload: bytes) -> Begin:
    return Begin(signed=_limited(payload, MAX_BEGIN_BYTES))


def _read_refuse(fields: Mapping[str, Any], _payload: bytes) -> Refuse:
    group_id = GroupId(read_bytes(fields["group_id"], GROUP_ID_BYTES))
    return Refuse(group_id=group_id, reason=read_text(fields["reason"], MAX_REASON))


_READERS: dict[str, Callable[[Mapping[str, Any], bytes], MatchMessage]] = {
    "join": _read_join,
    "renew": _read_renew,
    "accepted": _read_accepted,
    "redirect": _read_redirect,
    "rejected": _read_rejected,
    "released": _read_released,
    "leave": _read_leave,
    "begin": _read_begin,
    "refuse": _read_refuse,
    "probe": lambda _fields, _payload: Probe(),
    "alive": lambda _fields, _payload: Alive(),
}

_KINDS: dict[type, str] = {
    kind: kind.__name__.lower()
    for kind in (Join, Renew, Accepted, Redirect, Rejected, Released, Leave, Begin, Refuse, Probe, Alive)
}
