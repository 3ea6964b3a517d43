"""What travels on a channel of a round. Encoding and validation only; control messages are in `round_control`.

    contributor                         reducer             A channel to fetch results that another member passes on
      hello (group, begin)  ------->                        begins with its hello, then results come; one to push them
      beat (waiting)        ------->    <-------  beat      begins with its hello, then results go.
      start (weight)        ------->
      part 0, part 1, ...   ------->    <-------  result 0, result 1, ...
                                        <-------  end
      end                   ------->

A channel belongs to one round and term: its hello carries the group id, the incarnations of both ends, the term and what the
channel is for, and so binds every message that follows. A term's channels end with it, except those of the plan's own ranges,
which belong to term 0 and go on as long as both ends live.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

from swarmavg.errors import RemoteProtocolError
from swarmavg.identifiers import GROUP_ID_BYTES, GroupId
from swarmavg.protocol.round_control import Term
from swarmavg.transport.packing import pack, unpack


class ChannelKind(enum.Enum):
    """What a channel of a round is for."""

    CONTROL = "control"
    INPUTS = "inputs"
    """A contributor's inputs go to a reducer, averages come back."""
    FETCH = "fetch"
    """Results come from a member that passes them on."""
    PUSH = "push"
    """Results go to a member that is to pass them on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundHello:
    """First message of whoever opens a channel; its payload is the begin as the leader signed it."""

    kind: ChannelKind
    group_id: GroupId
    term: Term
    job: int | None
    """The job of the term, or `None` for the reducer's own range."""
    sender: bytes
    """The nonce in the begin of the member that opens the channel."""
    receiver: bytes
    """The other's nonce in the begin: a restarted process with the same key is not who was meant."""
    plan_hash: bytes

    def encode(self) -> bytes:
        return pack(
            [
                "hello",
                self.kind.value,
                list(self.term),
                self.job,
                self.group_id.digest,
                self.sender,
                self.receiver,
                self.plan_hash,
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStart:
    """The contributor's weight; its parts follow, or none when the weight is 0."""

    weight: float

    def encode(self) -> bytes:
        return pack(["start", self.weight])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPart:
    """One part of a contributor's input; the payload is its encoding."""

    index: int
    """Number within the range or job, from 0."""

    def encode(self) -> bytes:
        return pack(["part", self.index])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """The average of one part; empty payload when `contributors` is 0 (keep the local values).

    The payload is the average's encoding by the codec, or the bare values where a result is passed on: those are the same bits
    for everybody, whatever the codec.
    """

    index: int
    contributors: int
    """Bit p set = the member at position p is in the average."""

    def encode(self) -> bytes:
        mask = self.contributors.to_bytes((self.contributors.bit_length() + 7) // 8, "little")
        return pack(["result", self.index, mask])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundBeat:
    """I am alive. `waiting_for`: positions of the members that hold me up, my own for an all-reduce not triggered yet."""

    term: Term
    """The highest that the sender has seen, which the receiver may have missed."""
    waiting_for: tuple[int, ...]

    def encode(self) -> bytes:
        return pack(["beat", list(self.term), list(self.waiting_for)])


RoundMessage = RoundHello | RoundStart | RoundPart | RoundResult | RoundBeat


def decode_round_message(header: bytes) -> RoundMessage:
    """Read a header. Raises `RemoteProtocolError` for anything that no `encode` above has made."""
    fields = unpack(header, what="round message")
    try:
        if not isinstance(fields, list) or not fields:
            raise TypeError("not a list")
        kind, *rest = fields
        message: RoundMessage = _READERS[kind](*rest)
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(f"malformed round message: {error}") from None
    return message


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise ValueError(f"{value!r} is not a count")
    return value


def _bytes(value: Any, length: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != length:
        raise ValueError(f"expected {length} bytes")
    return value


def _term(value: Any) -> Term:
    number, rank = value
    return Term(_count(number), _count(rank))


def _hello(kind: Any, term: Any, job: Any, group: Any, sender: Any, receiver: Any, plan_hash: Any) -> RoundHello:
    return RoundHello(
        kind=ChannelKind(kind),
        group_id=GroupId(_bytes(group, GROUP_ID_BYTES)),
        term=_term(term),
        job=None if job is None else _count(job),
        sender=_bytes(sender, 16),
        receiver=_bytes(receiver, 16),
        plan_hash=_bytes(plan_hash, 32),
    )


def _start(weight: Any) -> RoundStart:
    if type(weight) not in (int, float) or not math.isfinite(weight) or weight < 0:
        raise ValueError(f"weight {weight!r} is not a finite number >= 0")
    return RoundStart(weight=float(weight))


def _part(index: Any) -> RoundPart:
    return RoundPart(index=_count(index))


def _result(index: Any, mask: Any) -> RoundResult:
    if not isinstance(mask, bytes) or len(mask) > 4096:
        raise ValueError("contributors must be a short byte string")
    return RoundResult(index=_count(index), contributors=int.from_bytes(mask, "little"))


def _beat(term: Any, waiting_for: Any) -> RoundBeat:
    if not isinstance(waiting_for, list) or len(waiting_for) > 4096:
        raise ValueError("waiting_for must be a short list")
    return RoundBeat(term=_term(term), waiting_for=tuple(_count(position) for position in waiting_for))


_READERS: dict[str, Any] = {"hello": _hello, "start": _start, "part": _part, "result": _result, "beat": _beat}
