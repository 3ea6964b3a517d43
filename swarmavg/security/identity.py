"""Who a peer is: an Ed25519 key pair, fresh or kept in a file, and the signatures made and checked with such keys.

Knows nothing about swarms, tokens and certificates.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarmavg.errors import ClosedError, ForkedError, IdentityError
from swarmavg.identifiers import PeerId
from swarmavg.security.key_file import KeyFile, create_key_file

SIGNATURE_BYTES = 64
PUBLIC_KEY_BYTES = 44
_SPKI_PREFIX = bytes.fromhex("302a300506032b6570032100")  # RFC 8410: what DER puts before the 32 bytes of an Ed25519 key


class Identity:
    """A peer's key pair. Whoever holds it, and nobody else, can speak as `peer_id`."""

    def __init__(self, key: Ed25519PrivateKey, file: KeyFile | None = None) -> None:
        self._key: Ed25519PrivateKey | None = key
        self._file = file
        self._forked = False
        self.public_key: bytes = public_key_bytes(key.public_key())
        """DER SubjectPublicKeyInfo, 44 bytes."""
        self.peer_id: PeerId = PeerId.from_public_key(self.public_key)
        _living.add(self)

    @classmethod
    def generate(cls) -> Self:
        """A fresh identity that lives in memory only."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> Self:
        """The identity kept at `path` (``~`` is expanded), made there first if the file is missing.

        The file is PKCS #8 in PEM, mode 0600, and stays locked until `close`: two processes with one id would be taken for
        one peer. Raises `IdentityError` for a file that is in use, open to other users, damaged or out of reach.
        """
        place = _place_of(path)
        try:
            file = KeyFile.open(place)
        except FileNotFoundError:
            file = _create_and_open(place)
        try:
            return cls(_parse_key(place, file.read()), file)
        except BaseException:
            file.close()
            raise

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature of `data`, 64 bytes. Raises `ClosedError` after `close`, `ForkedError` in a forked child."""
        return self._usable_key().sign(data)

    def encrypted_pem(self, passphrase: bytes) -> bytes:
        """The private key as PKCS #8 in PEM, encrypted with `passphrase`. Raises what `sign` raises."""
        return self._usable_key().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(passphrase),
        )

    def close(self) -> None:
        """Forget the private key and unlock its file. Idempotent."""
        self._key = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _usable_key(self) -> Ed25519PrivateKey:
        if self._forked:
            raise ForkedError(f"the identity {self.peer_id.short} belongs to the parent process: make one after the fork")
        if self._key is None:
            raise ClosedError(f"the identity {self.peer_id.short} is closed")
        return self._key

    def _after_fork_in_child(self) -> None:
        self._forked = True
        self.close()

    def __repr__(self) -> str:
        return f"Identity({self.peer_id.short})"


_living: weakref.WeakSet[Identity] = weakref.WeakSet()


def _disown_after_fork() -> None:
    """A forked child must neither speak as its parent nor keep the parent's lock alive after the parent's death."""
    for identity in list(_living):
        identity._after_fork_in_child()  # noqa: SLF001  (same module)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_after_fork)


def public_key_bytes(key: Ed25519PublicKey) -> bytes:
    """DER SubjectPublicKeyInfo, of which a peer id is the hash."""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def verify_signature(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `signature` of `data` was made by the owner of `public_key` (DER). False for anything malformed; never raises.

    Only the one canonical DER encoding of an Ed25519 key is a public key here, so that a key has a single peer id.
    """
    try:
        if len(public_key) != PUBLIC_KEY_BYTES or bytes(public_key[:12]) != _SPKI_PREFIX:
            return False
        Ed25519PublicKey.from_public_bytes(bytes(public_key[12:])).verify(signature, data)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True


def _place_of(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"identity must be None, the path of a key file or an Identity, got {path!r}")
    place = Path(path).expanduser()
    if "\0" in str(place):
        raise IdentityError(f"identity={str(path)!r} is no path: it holds a null character")
    return place


def _create_and_open(path: Path) -> KeyFile:
    pem = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with contextlib.suppress(FileExistsError):  # another process was faster: whoever locks the file first has it
        create_key_file(path, pem)
    try:
        return KeyFile.open(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise IdentityError(f"the key file {path} is a symbolic link to a file that is not there") from None
        raise IdentityError(f"the key file {path} vanished while it was opened") from None


def _parse_key(path: Path, content: bytes) -> Ed25519PrivateKey:
    advice = "restore it, or move it away to start as a new peer"
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except TypeError:
        raise IdentityError(f"the key file {path} is encrypted with a passphrase, which is not supported") from None
    except (ValueError, UnsupportedAlgorithm):
        raise IdentityError(f"the key file {path} is damaged, it holds no private key in PEM: {advice}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(f"the key file {path} holds a {type(key).__name__}; an Ed25519 key is needed: {advice}")
    return key
