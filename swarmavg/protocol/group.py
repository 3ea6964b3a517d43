"""Who takes part in one round: the value on which matchmaking and the all-reduce meet. Plain data, no I/O."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

from swarmavg.identifiers import GroupId, PeerId


class Role(enum.Enum):
    """What a member does in a round (the table of roles in the documentation)."""

    NODE = "node"
    CLIENT = "client"
    AUXILIARY = "auxiliary"

    @property
    def leads(self) -> bool:
        return self is not Role.CLIENT

    @property
    def reduces(self) -> bool:
        return self is not Role.CLIENT

    @property
    def contributes(self) -> bool:
        return self is not Role.AUXILIARY


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member of a group, as its join said."""

    peer_id: PeerId
    nonce: bytes
    """16 random bytes drawn for this join: the member's incarnation in this round. An old begin does not fit a new join."""
    role: Role
    bandwidth: float | None
    """In any unit common to the run; `None` = unknown, 0 = reduces nothing."""
    gather: bytes
    """The user's value, msgpack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group that stands. Equal for all its members."""

    group_id: GroupId
    leader: PeerId
    members: tuple[Member, ...]
    """In the order drawn by the leader, which is the order of ranges, of coordinators and of positions."""
    bits: str
    """The group bits under which its members met."""
    plan_hash: bytes
    signed: bytes
    """The begin as its leader signed it: what every channel of the round carries, so that one delivered copy suffices."""

    def position(self, peer_id: PeerId) -> int:
        """Index of a member. Raises `KeyError` for a stranger."""
        for index, member in enumerate(self.members):
            if member.peer_id == peer_id:
                return index
        raise KeyError(peer_id)

    def member(self, peer_id: PeerId) -> Member:
        return self.members[self.position(peer_id)]

    def __contains__(self, peer_id: object) -> bool:
        return any(member.peer_id == peer_id for member in self.members)

    def next_bits(self, peer_id: PeerId, target_group_size: int | None) -> str:
        """The group bits of a member for the round after this one.

        The oldest bits go, and the bits of the member's position come in at the end, as in Moshpit All-Reduce
        (https://arxiv.org/abs/2103.03239): members of one group spread over different buckets, and d rounds of groups of
        2^k mix 2^(k*d) peers completely. In a group that is not full, positions are drawn from all of them by hash.
        """
        if not self.bits:
            return ""
        size = target_group_size if target_group_size is not None else len(self.members)
        width = max(1, (max(size, len(self.members)) - 1).bit_length())
        places = sorted(range(1 << width), key=lambda i: hashlib.sha256(self.group_id.digest + i.to_bytes(4)).digest())
        if len(self.members) == 1 << width:
            places = list(range(1 << width))
        place = places[self.position(peer_id)]
        return (self.bits + format(place, f"0{width}b"))[-len(self.bits) :]
