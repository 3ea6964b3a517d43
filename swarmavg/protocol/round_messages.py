"""What travels on a channel of a round, between one contributor and one reducer. Encoding and validation only.

    contributor                         reducer
      hello (group, begin)  ------->
      beat (waiting)        ------->    <-------  beat
      start (weight)        ------->
      part 0, part 1, ...   ------->    <-------  result 0, result 1, ...
                                        <-------  end
      end                   ------->

A channel belongs to one round: its hello carries the group id and the incarnations of both ends, and every later message the
term. A message of another term is dropped by the receiver.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from swarmavg.errors import RemoteProtocolError
from swarmavg.identifiers import GROUP_ID_BYTES, GroupId
from swarmavg.transport.packing import pack, unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundHello:
    """First message of a contributor; its payload is the begin as the leader signed it."""

    group_id: GroupId
    term: int
    sender: bytes
    """The contributor's nonce in the begin."""
    receiver: bytes
    """The reducer's nonce in the begin: a restarted process with the same key is not who was meant."""
    plan_hash: bytes

    def encode(self) -> bytes:
        return pack(["hello", self.term, self.group_id.digest, self.sender, self.receiver, self.plan_hash])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStart:
    """The contributor's weight; its parts follow, or none when the weight is 0."""

    term: int
    weight: float

    def encode(self) -> bytes:
        return pack(["start", self.term, self.weight])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPart:
    """One part of a contributor's input; the payload is its encoding."""

    term: int
    index: int

    def encode(self) -> bytes:
        return pack(["part", self.term, self.index])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """The average of one part; the payload is its encoding, empty when `contributors` is 0 (keep the local values)."""

    term: int
    index: int
    contributors: int
    """Bit p set = the member at position p is in the average."""

    def encode(self) -> bytes:
        mask = self.contributors.to_bytes((self.contributors.bit_length() + 7) // 8, "little")
        return pack(["result", self.term, self.index, mask])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundBeat:
    """I am alive. `waiting_for`: positions of the members that hold me up, my own for an all-reduce not triggered yet."""

    term: int
    waiting_for: tuple[int, ...]

    def encode(self) -> bytes:
        return pack(["beat", self.term, list(self.waiting_for)])


RoundMessage = RoundHello | RoundStart | RoundPart | RoundResult | RoundBeat


def decode_round_message(header: bytes) -> RoundMessage:
    """Read a header. Raises `RemoteProtocolError` for anything that no `encode` above has made."""
    fields = unpack(header, what="round message")
    try:
        if not isinstance(fields, list) or not fields:
            raise TypeError("not a list")
        kind, term, *rest = fields
        message: RoundMessage = _READERS[kind](_count(term), *rest)
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


def _hello(term: int, group: Any, sender: Any, receiver: Any, plan_hash: Any) -> RoundHello:
    return RoundHello(
        group_id=GroupId(_bytes(group, GROUP_ID_BYTES)),
        term=term,
        sender=_bytes(sender, 16),
        receiver=_bytes(receiver, 16),
        plan_hash=_bytes(plan_hash, 32),
    )


def _start(term: int, weight: Any) -> RoundStart:
    if type(weight) not in (int, float) or not math.isfinite(weight) or weight < 0:
        raise ValueError(f"weight {weight!r} is not a finite number >= 0")
    return RoundStart(term=term, weight=float(weight))


def _part(term: int, index: Any) -> RoundPart:
    return RoundPart(term=term, index=_count(index))


def _result(term: int, index: Any, mask: Any) -> RoundResult:
    if not isinstance(mask, bytes) or len(mask) > 4096:
        raise ValueError("contributors must be a short byte string")
    return RoundResult(term=term, index=_count(index), contributors=int.from_bytes(mask, "little"))


def _beat(term: int, waiting_for: Any) -> RoundBeat:
    if not isinstance(waiting_for, list) or len(waiting_for) > 4096:
        raise ValueError("waiting_for must be a short list")
    return RoundBeat(term=term, waiting_for=tuple(_count(position) for position in waiting_for))


_READERS: dict[str, Any] = {"hello": _hello, "start": _start, "part": _part, "result": _result, "beat": _beat}
