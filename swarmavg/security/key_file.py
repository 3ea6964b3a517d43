"""The file that keeps a peer's private key: made whole or not at all, closed to others, and held by one process at a time.

Knows bytes and permissions, nothing about what the bytes mean.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import stat
import sys
from pathlib import Path

from swarmavg.errors import IdentityError

if sys.platform == "win32":  # pragma: no cover
    import msvcrt
else:
    import fcntl

MAX_KEY_FILE_BYTES = 64 * 1024
_LOCK_OFFSET = 1 << 30  # Windows locks are mandatory: lock a byte beyond the content, so that the content stays readable
_OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_BINARY = getattr(os, "O_BINARY", 0)


class KeyFile:
    """An open key file and the lock on it. The lock lasts until `close` or the end of the process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def open(cls, path: Path) -> KeyFile:
        """Open and lock an existing file. Raises `FileNotFoundError`, and `IdentityError` for one that may not be used."""
        try:
            descriptor = _open_existing(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise IdentityError(f"cannot open the key file {path}: {error.strerror}") from error
        try:
            _check_permissions(path, os.fstat(descriptor))
            _lock(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    def read(self) -> bytes:
        """The whole content. Raises `IdentityError` if it is too long to be a key, or unreadable."""
        if self._descriptor is None:
            raise IdentityError(f"the key file {self.path} is closed")
        content = b""
        try:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            while len(content) <= MAX_KEY_FILE_BYTES:
                piece = os.read(self._descriptor, MAX_KEY_FILE_BYTES + 1 - len(content))
                if not piece:
                    return content
                content += piece
        except OSError as error:
            raise IdentityError(f"cannot read the key file {self.path}: {error.strerror}") from error
        raise IdentityError(f"{self.path} is no key file: it is longer than {MAX_KEY_FILE_BYTES} bytes")

    def close(self) -> None:
        """Let go of the file and its lock. Idempotent.

        In a forked child this leaves the parent's lock in place: the lock belongs to the open file, which both share.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def create_key_file(path: Path, content: bytes) -> None:
    """Make a file with mode 0600 that appears with its whole content or not at all.

    Raises `FileExistsError` when somebody else made one first, `IdentityError` when it cannot be made.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        _write_new(draft, content)
        _publish(draft, path)
    except FileExistsError:
        raise
    except OSError as error:
        raise IdentityError(f"cannot make the key file {path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def _write_new(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _publish(draft: Path, path: Path) -> None:
    """Give the finished draft its name, never over another file."""
    if sys.platform == "win32":  # pragma: no cover
        draft.rename(path)  # refuses an existing target there
        return
    try:
        path.hardlink_to(draft)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links (FAT, some network mounts)
        if path.exists():
            raise FileExistsError(path) from None
        draft.rename(path)


def _open_existing(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | _BINARY)  # over NFS an exclusive lock needs a writable descriptor
    except FileNotFoundError:
        raise
    except OSError:  # a read-only mount, such as a container's secret
        return os.open(path, os.O_RDONLY | _BINARY)


def _check_permissions(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise IdentityError(f"{path} is no key file: it is not a regular file")
    mode = stat.S_IMODE(status.st_mode)
    if sys.platform != "win32" and mode & _OPEN_TO_OTHERS:  # Windows has no such bits
        raise IdentityError(
            f"the key file {path} is open to other users (mode {mode:04o}): run  chmod 600 {shlex.quote(str(path))}"
        )


def _lock(path: Path, descriptor: int) -> None:
    try:
        if sys.platform == "win32":  # pragma: no cover
            os.lseek(descriptor, _LOCK_OFFSET, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise IdentityError(
            f"the key file {path} is in use by another process or peer: give each peer an identity file of its own"
        ) from None
    except OSError as error:
        raise IdentityError(f"cannot lock the key file {path}: {error.strerror}") from error
