"""The secret that makes a swarm: writing and reading it, and deriving the key that signs certificates of its members.

A **token** is ``swarm1-`` and 56 characters of base32: 32 random bytes and 3 bytes of checksum, so that a slip of the hand is
told from another swarm's token. Any other string of at least 16 characters is a **passphrase**: allowed, slow to derive, warned
about. No function here puts any part of a secret into a message.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import unicodedata

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from swarmavg.errors import TokenError
from swarmavg.telemetry.logs import get_logger

TOKEN_PREFIX = "swarm1-"  # noqa: S105  (the public part)
SECRET_BYTES = 32
MIN_PASSPHRASE_CHARS = 16
MIN_DISTINCT_CHARS = 8

_CHECKSUM_BYTES = 3
_BODY_CHARS = 56  # base32 of 35 bytes, without padding
_VERSIONED = re.compile(r"swarm\d+-")
_LOOKS_LIKE_A_TOKEN = re.compile(r"[a-z2-7]{40}")
_MAKE_ONE = "make one with  swarmavg token"
_SCRYPT_COST = 1 << 17  # with r = 8: 128 MiB and some tenths of a second for each guess

_log = get_logger(__name__)


def generate_token() -> str:
    """A fresh token. Give it to every peer of the swarm, and to nobody else: who has it is a member."""
    secret = secrets.token_bytes(SECRET_BYTES)
    body = base64.b32encode(secret + _checksum(secret)).decode("ascii").lower()
    return TOKEN_PREFIX + body


def missing_token_message(where: str) -> str:
    """What to tell someone who goes beyond loopback without a token; `where` is the address or setting that does."""
    return (
        f"{where} is reachable from other machines, and that needs a token: run  swarmavg token  once and give its output to "
        f"every peer as token=... (insecure=True gives up encryption and proof of identity instead)"
    )


def derive_signing_key(token: str) -> Ed25519PrivateKey:
    """The key that signs certificates of the swarm's members: equal for everyone who knows the token.

    A passphrase takes some tenths of a second and 128 MiB: call this off the event loop. Raises `TokenError` for what is
    mistyped, truncated or weak, and `TypeError` for what is no string.
    """
    if not isinstance(token, str):
        raise TypeError(f"token must be a str, got a {type(token).__name__}")
    text = token.strip()
    folded = text.lower()
    if folded.startswith(TOKEN_PREFIX):
        secret, kind = _read_token(folded[len(TOKEN_PREFIX) :]), b"token"
    else:
        _refuse_weak(text, folded)
        secret, kind = _stretch(text), b"passphrase"
    seed = HKDF(hashes.SHA256(), 32, salt=b"swarmavg/ca/1", info=kind).derive(secret)
    return Ed25519PrivateKey.from_private_bytes(seed)


def _read_token(body: str) -> bytes:
    """The 32 bytes in the part after the prefix."""
    if len(body) != _BODY_CHARS:
        problem = "truncated" if len(body) < _BODY_CHARS else "too long"
        raise TokenError(f"the token is {problem}: {len(body)} characters follow {TOKEN_PREFIX!r}, {_BODY_CHARS} should")
    try:
        content = base64.b32decode(body.upper())
    except ValueError:
        raise TokenError("the token is mistyped: it holds a character that no token has (a-z and 2-7 are used)") from None
    secret, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    if not hmac.compare_digest(checksum, _checksum(secret)):
        raise TokenError("the token is mistyped: its checksum does not fit; copy it again from where it was made")
    return secret


def _checksum(secret: bytes) -> bytes:
    return hashlib.sha256(b"swarmavg/token checksum/1" + secret).digest()[:_CHECKSUM_BYTES]


def _refuse_weak(text: str, folded: str) -> None:
    if not text:
        raise TokenError(f"the token is empty: {_MAKE_ONE}")
    if _VERSIONED.match(folded):
        raise TokenError("the token is of a kind that this version does not know: it was made by another version of swarmavg")
    if _LOOKS_LIKE_A_TOKEN.search(folded):
        raise TokenError(f"the token lacks its beginning: it should start with {TOKEN_PREFIX!r}")
    if len(text) < MIN_PASSPHRASE_CHARS or len(set(text)) < MIN_DISTINCT_CHARS:
        raise TokenError(
            f"the token is too weak, it could be guessed off-line: {_MAKE_ONE}  "
            f"(a passphrase needs at least {MIN_PASSPHRASE_CHARS} characters, {MIN_DISTINCT_CHARS} of them different)"
        )


def _stretch(passphrase: str) -> bytes:
    _log.warning(
        "the swarm's token is a passphrase, which outsiders can try to guess off-line: make a token with  swarmavg token"
    )
    normal = unicodedata.normalize("NFC", passphrase).encode("utf-8")
    return Scrypt(salt=b"swarmavg/passphrase/1", length=SECRET_BYTES, n=_SCRYPT_COST, r=8, p=1).derive(normal)
