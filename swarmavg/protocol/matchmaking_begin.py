"""The begin: the signed statement of a leader that a group stands, in its one binding order. Encoding and validation only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from swarmavg.errors import RemoteProtocolError
from swarmavg.identifiers import GROUP_ID_BYTES, GroupId, PeerId
from swarmavg.protocol.group import Group, Member, Role
from swarmavg.protocol.matchmaking_messages import MAX_BEGIN_BYTES, MAX_GATHER_BYTES, NONCE_BYTES, read_bandwidth
from swarmavg.protocol.matchmaking_presence import read_bits, read_bytes, read_text
from swarmavg.transport.packing import pack, unpack

MAX_GROUP_SIZE: Final = 1024
MAX_GATHERED_BYTES: Final = 6 * 1024 * 1024
"""Gathered values of one group: a leader accepts no more, so that a begin keeps below `MAX_BEGIN_BYTES`."""
_DOMAIN: Final = b"swarmavg begin 1\0"
_MAX_KEY_BYTES: Final = 128
_MAX_SIGNATURE_BYTES: Final = 128

Verify: TypeAlias = Callable[[bytes, bytes, bytes], bool]
"""``verify(public_key, signature, data)``: whether the owner of the key made the signature. Never raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """How this peer signs and checks begins; the calls come from the security layer."""

    public_key: bytes
    """DER SubjectPublicKeyInfo of the own key."""
    swarm_id: bytes
    accepted_swarm_ids: tuple[bytes, ...]
    """Begins signed for these are obeyed: `swarm_id`, and a second one while the swarm changes its token."""
    sign: Callable[[bytes], bytes]
    verify: Verify


def sign_begin(
    *,
    group_id: GroupId,
    leader: PeerId,
    members: tuple[Member, ...],
    bits: str,
    plan_hash: bytes,
    prefix: str,
    config_hash: bytes,
    signer: Signer,
) -> Group:
    """The group, with its begin signed by the leader, which is the local peer."""
    content = pack(
        {
            "group": group_id.digest,
            "leader": leader.digest,
            "bits": bits,
            "plan": plan_hash,
            "prefix": prefix,
            "config": config_hash,
            "members": [[m.peer_id.digest, m.nonce, m.role.value, m.bandwidth, m.gather] for m in members],
        }
    )
    signed = pack([content, signer.public_key, signer.sign(_to_sign(signer.swarm_id, content))])
    return Group(group_id=group_id, leader=leader, members=members, bits=bits, plan_hash=plan_hash, signed=signed)


def read_begin(signed: bytes, *, prefix: str, config_hash: bytes, signer: Signer) -> Group:
    """Read and verify a begin of this run.

    Raises `RemoteProtocolError` when it is malformed, when the signature is not its leader's, when the leader or a member
    appears wrongly, and when it belongs to another run or configuration. The plan hash is left to the caller.
    """
    envelope = unpack(signed, what="begin", max_bytes=MAX_BEGIN_BYTES)
    try:
        content, public_key, signature = envelope
        _check_bytes(content, MAX_BEGIN_BYTES)
        _check_bytes(public_key, _MAX_KEY_BYTES)
        _check_bytes(signature, _MAX_SIGNATURE_BYTES)
        fields = unpack(content, what="begin", max_bytes=MAX_BEGIN_BYTES)
        group = _read_group(fields, signed)
        run = read_text(fields["prefix"], 256), read_bytes(fields["config"], 32)
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(f"malformed begin: {error!r}") from None
    if PeerId.from_public_key(public_key) != group.leader:
        raise RemoteProtocolError(f"begin of {group.leader}: the key in it is another peer's")
    if not any(signer.verify(public_key, signature, _to_sign(swarm_id, content)) for swarm_id in signer.accepted_swarm_ids):
        raise RemoteProtocolError(f"begin of {group.leader}: the signature does not fit")
    if run != (prefix, config_hash):
        raise RemoteProtocolError(f"begin of {group.leader}: it belongs to another run or configuration ({run[0]!r})")
    return group


def _to_sign(swarm_id: bytes, content: bytes) -> bytes:
    return _DOMAIN + len(swarm_id).to_bytes(2) + swarm_id + content


def _check_bytes(value: Any, limit: int) -> None:
    if not isinstance(value, bytes) or len(value) > limit:
        raise ValueError(f"expected at most {limit} bytes")


def _read_group(fields: Any, signed: bytes) -> Group:
    if not isinstance(fields, Mapping):
        raise TypeError("not a map")
    members = fields["members"]
    if not isinstance(members, list) or not 0 < len(members) <= MAX_GROUP_SIZE:
        raise ValueError(f"members must be a list of 1 to {MAX_GROUP_SIZE}")
    group = Group(
        group_id=GroupId(read_bytes(fields["group"], GROUP_ID_BYTES)),
        leader=PeerId(read_bytes(fields["leader"], 32)),
        members=tuple(_read_member(*member) for member in members),
        bits=read_bits(fields["bits"]),
        plan_hash=read_bytes(fields["plan"], 32),
        signed=signed,
    )
    if len({member.peer_id for member in group.members}) != len(group.members):
        raise ValueError("a member appears twice")
    if not any(member.peer_id == group.leader and member.role.leads for member in group.members):
        raise ValueError("the leader is not a member that can lead")
    return group


def _read_member(peer: Any, nonce: Any, role: Any, bandwidth: Any, gather: Any) -> Member:
    _check_bytes(gather, MAX_GATHER_BYTES)
    return Member(
        peer_id=PeerId(read_bytes(peer, 32)),
        nonce=read_bytes(nonce, NONCE_BYTES),
        role=Role(role),
        bandwidth=read_bandwidth(bandwidth),
        gather=gather,
    )
