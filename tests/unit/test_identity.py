"""Key pairs, signatures, and the file that keeps a key."""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.errors import ClosedError, IdentityError
from swarmavg.identifiers import PeerId
from swarmavg.security import key_file
from swarmavg.security.identity import Identity, verify_signature

posix_only = pytest.mark.skipif(os.name == "nt", reason="POSIX permissions and fork")


def test_the_peer_id_is_the_hash_of_the_public_key() -> None:
    identity = Identity.generate()
    assert identity.peer_id.digest == hashlib.sha256(identity.public_key).digest()
    loaded = serialization.load_der_public_key(identity.public_key)
    assert isinstance(loaded, ed25519.Ed25519PublicKey)
    assert Identity.generate().peer_id != identity.peer_id


def test_a_signature_holds_for_its_data_and_key_only() -> None:
    identity, other = Identity.generate(), Identity.generate()
    signature = identity.sign(b"data")
    assert verify_signature(identity.public_key, signature, b"data")
    assert not verify_signature(identity.public_key, signature, b"date")
    assert not verify_signature(other.public_key, signature, b"data")
    for position in range(len(signature)):
        tampered = bytearray(signature)
        tampered[position] ^= 1
        assert not verify_signature(identity.public_key, bytes(tampered), b"data")


@settings(max_examples=100, deadline=None)
@given(key=st.binary(max_size=64), signature=st.binary(max_size=80), data=st.binary(max_size=40))
def test_noise_is_never_a_signature_and_never_raises(key: bytes, signature: bytes, data: bytes) -> None:
    identity = Identity.generate()
    assert verify_signature(key, signature, data) is False
    assert verify_signature(identity.public_key, signature, data) is False
    assert verify_signature(identity.public_key[:12] + key[:32].ljust(32, b"\0"), signature.ljust(64, b"\1"), data) is False


@pytest.mark.parametrize("bad", [None, 7, "text", [], b""])
def test_values_of_a_wrong_type_are_no_signature(bad: object) -> None:
    identity = Identity.generate()
    signature = identity.sign(b"x")
    assert verify_signature(bad, signature, b"x") is False  # type: ignore[arg-type]
    assert verify_signature(identity.public_key, bad, b"x") is False  # type: ignore[arg-type]
    if bad != b"":
        assert verify_signature(identity.public_key, signature, bad) is False  # type: ignore[arg-type]


def test_a_key_of_another_kind_or_encoding_is_no_public_key() -> None:
    identity = Identity.generate()
    signature = identity.sign(b"x")
    assert not verify_signature(identity.public_key[12:], signature, b"x")  # raw
    assert not verify_signature(identity.public_key + b"\0", signature, b"x")
    curve = ec.generate_private_key(ec.SECP256R1()).public_key()
    der = curve.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert not verify_signature(der, signature, b"x")


def test_an_identity_is_kept_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    first = Identity.load_or_create(path)
    first.close()
    second = Identity.load_or_create(str(path))
    assert second.peer_id == first.peer_id
    assert verify_signature(first.public_key, second.sign(b"x"), b"x")
    second.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["peer.key"]


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    Identity.load_or_create("~/peer.key").close()
    assert (tmp_path / "peer.key").exists()


@posix_only
def test_the_file_is_made_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Identity.load_or_create(tmp_path / "peer.key").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "peer.key").stat().st_mode) == 0o600


@posix_only
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o666])
def test_a_file_open_to_others_is_refused_with_the_command_to_run(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "my peer.key"
    Identity.load_or_create(path).close()
    path.chmod(mode)
    with pytest.raises(IdentityError) as caught:
        Identity.load_or_create(path)
    assert f"mode {mode:04o}" in str(caught.value)
    command = str(caught.value).split("run  ")[1]
    assert shlex.split(command) == ["chmod", "600", str(path)]
    subprocess.run(shlex.split(command), check=True)
    Identity.load_or_create(path).close()


@posix_only
def test_a_read_only_key_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    Identity.load_or_create(path).close()
    path.chmod(0o400)
    Identity.load_or_create(path).close()


def test_two_identities_on_one_file_are_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    with_lock = Identity.load_or_create(path)
    with pytest.raises(IdentityError, match="in use") as caught:
        Identity.load_or_create(path)
    assert str(path) in str(caught.value)
    with_lock.close()
    Identity.load_or_create(path).close()


_HOLD = """
import sys
from swarmavg.security.identity import Identity
identity = Identity.load_or_create(sys.argv[1])
print(identity.peer_id, flush=True)
sys.stdin.read()
"""


def test_two_processes_on_one_file_are_an_error_until_the_first_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        peer_id = PeerId.parse(holder.stdout.readline().strip())
        with pytest.raises(IdentityError, match="in use"):
            Identity.load_or_create(path)
        holder.kill()
        holder.wait()
    again = Identity.load_or_create(path)
    assert again.peer_id == peer_id
    again.close()


_TRY = """
import sys
from swarmavg.errors import IdentityError
from swarmavg.security.identity import Identity
sys.stdin.readline()
try:
    identity = Identity.load_or_create(sys.argv[1])
except IdentityError as error:
    print("refused", error, flush=True)
else:
    print("have", identity.peer_id, flush=True)
sys.stdin.read()
"""


def test_of_processes_that_make_the_same_file_at_once_exactly_one_has_it(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    crowd = [
        subprocess.Popen([sys.executable, "-c", _TRY, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        for process in crowd:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in crowd if process.stdout is not None]
    finally:
        for process in crowd:
            process.communicate()
    assert sorted(answer.split()[0] for answer in answers) == ["have", "refused", "refused", "refused"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["peer.key"]


_FORK = """
import os, sys
from swarmavg.errors import ForkedError, IdentityError
from swarmavg.security.identity import Identity

path = sys.argv[1]
identity = Identity.load_or_create(path)
hold, release = os.pipe()
verdict, tell = os.pipe()
child = os.fork()
if child == 0:
    try:
        identity.sign(b"x")
    except ForkedError:
        os.write(tell, b"refused")
    finally:
        os.write(tell, b".")
        os.read(hold, 1)
        os._exit(0)
print("child", os.read(verdict, 7).decode())
try:
    Identity.load_or_create(path)
except IdentityError:
    print("parent holds")
identity.close()
Identity.load_or_create(path).close()
print("parent let go")
os.write(release, b".")
os.waitpid(child, 0)
"""


@posix_only
def test_a_forked_child_is_not_the_peer_and_does_not_hold_the_lock(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", _FORK, str(tmp_path / "peer.key")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["child refused", "parent holds", "parent let go"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "damaged"),
        (b"not a key", "damaged"),
        (b"-----BEGIN PRIVATE KEY-----\nMC4CAQ\n-----END PRIVATE KEY-----\n", "damaged"),
        (b"\0" * (key_file.MAX_KEY_FILE_BYTES + 1), "longer than"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "peer.key"
    key_file.create_key_file(path, content)
    for _ in range(2):  # the second time too: a failed attempt holds no lock
        with pytest.raises(IdentityError, match=problem) as caught:
            Identity.load_or_create(path)
        assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_a_truncated_key_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    Identity.load_or_create(path).close()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IdentityError, match="damaged"):
        Identity.load_or_create(path)


def test_keys_of_other_kinds_are_refused(tmp_path: Path) -> None:
    curve = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    key_file.create_key_file(tmp_path / "curve.key", curve)
    with pytest.raises(IdentityError, match="Ed25519"):
        Identity.load_or_create(tmp_path / "curve.key")
    key_file.create_key_file(tmp_path / "locked.key", Identity.generate().encrypted_pem(b"passphrase"))
    with pytest.raises(IdentityError, match="encrypted"):
        Identity.load_or_create(tmp_path / "locked.key")


def test_places_where_no_file_can_be_are_named(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="No such file") as caught:
        Identity.load_or_create(tmp_path / "absent" / "peer.key")
    assert "absent" in str(caught.value)
    with pytest.raises(IdentityError) as caught:
        Identity.load_or_create(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_things_that_are_no_paths_are_named() -> None:
    with pytest.raises(TypeError, match=r"identity must be .*, got 5"):
        Identity.load_or_create(5)  # type: ignore[arg-type]
    with pytest.raises(IdentityError, match="null character"):
        Identity.load_or_create("peer\0.key")


@posix_only
def test_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "peer.key").symlink_to(tmp_path / "absent.key")
    with pytest.raises(IdentityError, match="symbolic link"):
        Identity.load_or_create(tmp_path / "peer.key")


@posix_only
def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    Identity.load_or_create(tmp_path / "peer.key").close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["peer.key"]
    with pytest.raises(FileExistsError):
        key_file.create_key_file(tmp_path / "peer.key", b"")
    assert (tmp_path / "peer.key").read_bytes().startswith(b"-----BEGIN PRIVATE KEY")


def test_a_closed_identity_signs_nothing(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "peer.key")
    identity.close()
    identity.close()
    with pytest.raises(ClosedError):
        identity.sign(b"x")
    with pytest.raises(ClosedError):
        identity.encrypted_pem(b"x")


def test_the_representation_shows_no_key() -> None:
    identity = Identity.generate()
    assert repr(identity) == f"Identity({identity.peer_id.short})"
