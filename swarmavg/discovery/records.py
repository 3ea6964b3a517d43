"""The signed record: what one owner says under one topic, in bytes that anybody can relay and nobody can alter.

Encoding, decoding and checking only; which record wins is the business of `store`. On the wire a record is
its body and a signature of the body; how old it is travels beside it, told anew by each relay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from swarmavg.discovery.interface import MAX_VALUE_BYTES, Version
from swarmavg.discovery.limits import check_topic, check_ttl, check_value
from swarmavg.errors import RemoteProtocolError
from swarmavg.identifiers import PeerId
from swarmavg.security.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, verify_signature
from swarmavg.transport.packing import pack, unpack

SIGNATURE_DOMAIN: Final = b"swarmavg directory record 1\0"
"""Signed in front of every record, so that no other signature of the same key can be passed off as one."""
SWARM_ID_BYTES: Final = 32
MAX_BODY_BYTES: Final = MAX_VALUE_BYTES + 1024
MAX_VERSION: Final = 2**62
"""Largest incarnation and counter: numbers that a peer has to exceed must leave room above them."""


class Signer(Protocol):
    """A peer's key; `swarmavg.security.identity.Identity` is one."""

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def public_key(self) -> bytes:
        """DER SubjectPublicKeyInfo."""

    def sign(self, data: bytes) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRecord:
    """A record with the bytes that prove it. `withdrawn` marks a tombstone, whose value is empty."""

    topic: str
    owner: PeerId
    public_key: bytes
    version: Version
    ttl: float
    value: bytes
    urgent: bool
    withdrawn: bool
    body: bytes
    signature: bytes

    @property
    def size(self) -> int:
        """Bytes it takes on the wire and, roughly, in memory."""
        return len(self.body) + len(self.signature)

    def is_authentic(self, swarm_id: bytes) -> bool:
        """Whether its owner signed it for this swarm."""
        return verify_signature(self.public_key, self.signature, _signed_bytes(swarm_id, self.body))


def sign_record(
    signer: Signer,
    swarm_id: bytes,
    *,
    topic: str,
    version: Version,
    ttl: float,
    value: bytes = b"",
    urgent: bool = False,
    withdrawn: bool = False,
) -> SignedRecord:
    """A record of the signer. Raises `TypeError` or `ValueError` for what no record may hold."""
    check_topic(topic)
    check_value(value)
    if withdrawn and value:
        raise ValueError(f"a withdrawn record has no value, got {len(value)} bytes")
    if not (0 <= version.incarnation <= MAX_VERSION and 0 <= version.counter <= MAX_VERSION):
        raise ValueError(f"version must be within 0 and 2**62, got {version!r}")
    ttl = check_ttl(ttl)
    body = pack([topic, signer.public_key, version.incarnation, version.counter, ttl, value, urgent, withdrawn])
    return SignedRecord(
        topic=topic,
        owner=signer.peer_id,
        public_key=signer.public_key,
        version=version,
        ttl=ttl,
        value=value,
        urgent=urgent,
        withdrawn=withdrawn,
        body=body,
        signature=signer.sign(_signed_bytes(swarm_id, body)),
    )


def decode_record(body: bytes, signature: bytes) -> SignedRecord:
    """Read a record of a peer. Raises `RemoteProtocolError` for anything no correct peer sends.

    The signature is not verified: that costs a hundred times more, and most arriving records are known already.
    """
    if not isinstance(body, bytes) or not isinstance(signature, bytes) or len(signature) != SIGNATURE_BYTES:
        raise RemoteProtocolError("malformed record: a body and a signature of 64 bytes are needed")
    fields = unpack(body, what="record", max_bytes=MAX_BODY_BYTES, max_depth=1)
    try:
        return _from_fields(fields, body, signature)
    except (TypeError, ValueError) as error:
        raise RemoteProtocolError(f"malformed record: {error}") from None


def _from_fields(fields: Any, body: bytes, signature: bytes) -> SignedRecord:
    if not isinstance(fields, list) or len(fields) != 8:
        raise ValueError("8 fields are needed")
    topic, public_key, incarnation, counter, ttl, value, urgent, withdrawn = fields
    if not isinstance(public_key, bytes) or len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"a public key takes {PUBLIC_KEY_BYTES} bytes")
    if type(urgent) is not bool or type(withdrawn) is not bool:
        raise TypeError("flags must be booleans")
    if withdrawn and value:
        raise ValueError("a withdrawn record has no value")
    return SignedRecord(
        topic=check_topic(topic),
        owner=PeerId.from_public_key(public_key),
        public_key=public_key,
        version=Version(check_number(incarnation), check_number(counter)),
        ttl=check_ttl(ttl),
        value=check_value(value),
        urgent=urgent,
        withdrawn=withdrawn,
        body=body,
        signature=signature,
    )


def check_number(value: Any) -> int:
    """A part of a version as a peer sent it. Raises `ValueError`."""
    if type(value) is not int or not 0 <= value <= MAX_VERSION:
        raise ValueError(f"a version number must be an integer from 0 to 2**62, got {value!r:.80}")
    return value


def _signed_bytes(swarm_id: bytes, body: bytes) -> bytes:
    if len(swarm_id) != SWARM_ID_BYTES:  # of a fixed length, or swarm id and body could be shifted against each other
        raise ValueError(f"swarm_id must be {SWARM_ID_BYTES} bytes, got {len(swarm_id)}")
    return SIGNATURE_DOMAIN + swarm_id + body
