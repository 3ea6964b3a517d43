"""Certificates of a token swarm: one authority that every holder of the token can compute, and leaves over peers' own keys.

Pure functions of keys and times; nothing here opens files or connections.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from swarmavg.errors import AuthenticationError
from swarmavg.identifiers import PeerId
from swarmavg.security.identity import public_key_bytes

LEAF_LIFETIME = dt.timedelta(days=7)
CLOCK_SKEW = dt.timedelta(days=1)
"""How far the clocks of two peers may differ: a leaf is valid from this long before it was made."""
RENEW_BEFORE = dt.timedelta(days=3)
"""A leaf with less than this left is replaced: well over `CLOCK_SKEW`, so that no one ever meets an expired one."""

# Constants, not times of making: every token holder must arrive at the same bytes.
_CA_NOT_BEFORE = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
_CA_NOT_AFTER = dt.datetime(2199, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True)
class SwarmAuthority:
    """The certificate authority of one token."""

    swarm_id: bytes
    """sha256 of the authority's public key (DER): 32 bytes that name the swarm. No secret: every connection shows it."""
    certificate: x509.Certificate
    key: Ed25519PrivateKey

    def __repr__(self) -> str:
        return f"SwarmAuthority({self.swarm_id.hex()[:8]})"


def make_authority(key: Ed25519PrivateKey) -> SwarmAuthority:
    """The authority of a signing key. Deterministic, as Ed25519 signatures are: equal keys give equal certificates."""
    public_key = key.public_key()
    swarm_id = hashlib.sha256(public_key_bytes(public_key)).digest()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"swarmavg {swarm_id.hex()[:32]}")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public_key)
        .serial_number(int.from_bytes(swarm_id[:15]) | 1)
        .not_valid_before(_CA_NOT_BEFORE)
        .not_valid_after(_CA_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public_key), critical=False)
        .sign(key, None)
    )
    return SwarmAuthority(swarm_id, certificate, key)


def issue_leaf(
    authority: SwarmAuthority, public_key: bytes, now: dt.datetime, lifetime: dt.timedelta = LEAF_LIFETIME
) -> x509.Certificate:
    """A certificate for the owner of an Ed25519 `public_key` (DER), good for both ends of a connection."""
    key = serialization.load_der_public_key(public_key)
    if not isinstance(key, Ed25519PublicKey):
        raise TypeError(f"public_key must be an Ed25519 key, got a {type(key).__name__}")
    peer_id = PeerId.from_public_key(public_key)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(peer_id))]))
        .issuer_name(authority.certificate.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(f"{peer_id}.swarmavg.invalid")]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
        .sign(authority.key, None)
    )


def peer_id_of(certificate: bytes, now: dt.datetime) -> PeerId:
    """The id of the owner of the key in a DER certificate whose chain was verified.

    Raises `AuthenticationError` for a certificate that cannot be read, holds another kind of key, or has expired.
    """
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        key = parsed.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise AuthenticationError(f"the peer's certificate cannot be read: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise AuthenticationError(f"the peer's certificate holds a {type(key).__name__}; an Ed25519 key is needed")
    peer_id = PeerId.from_public_key(public_key_bytes(key))
    if now > parsed.not_valid_after_utc:
        raise AuthenticationError(
            f"the certificate of peer {peer_id.short} expired at {parsed.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, "
            f"and it is {now:%Y-%m-%d %H:%M} UTC here"
        )
    return peer_id


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
