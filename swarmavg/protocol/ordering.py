"""Who leads and whom each looking averager joins: a pure function of who is looking. No state, no I/O.

Every peer computes the same deal from the same list, so that a swarm that starts together splits into groups without asking
anybody. Views that differ for a moment only cost a redirect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from swarmavg.identifiers import PeerId
from swarmavg.protocol.group import Role


@lru_cache(maxsize=16_384)
def order_key(bits: str, peer: PeerId) -> bytes:
    """Rank of a peer among those who look in one bucket; the smallest leads. Different buckets order differently."""
    return hashlib.sha256(b"swarmavg order\0" + bits.encode("ascii") + b"\0" + peer.digest).digest()


@dataclass(frozen=True, slots=True)
class Deal:
    """Heads, and the head to whom each looking peer belongs (a head belongs to itself). Empty when nobody can lead."""

    heads: tuple[PeerId, ...]
    head_of: Mapping[PeerId, PeerId]

    def share(self, head: PeerId) -> int:
        """Members that belong to `head`, itself included."""
        return sum(1 for other in self.head_of.values() if other == head)


def deal(looking: Mapping[PeerId, Role], bits: str, target: int | None, minimum: int) -> Deal:
    """Split `looking` into groups of at most `target` (`None` = one group) and, where possible, at least `minimum`.

    ceil(n / target) groups, at most as many as can lead, fewer if the smallest would be under `minimum`. The first leaders
    in order are heads; the rest are dealt evenly, so that 5 with a target of 4 make 3 + 2.
    """
    ordered = sorted(looking, key=lambda peer: order_key(bits, peer))
    leaders = [peer for peer in ordered if looking[peer].leads]
    if not leaders:
        return Deal((), {})
    groups = min(len(leaders), -(-len(ordered) // (target or len(ordered))))
    while groups > 1 and len(ordered) // groups < minimum:
        groups -= 1
    heads = tuple(leaders[:groups])
    head_of = {head: head for head in heads}
    rest = [peer for peer in ordered if peer not in head_of]
    head_of.update({peer: heads[index % groups] for index, peer in enumerate(rest)})
    return Deal(heads, head_of)
