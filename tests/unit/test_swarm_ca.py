"""Certificates and TLS contexts of a swarm, checked by handshakes in memory."""

from __future__ import annotations

import datetime as dt
import itertools
import os
import ssl
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarmavg.errors import AuthenticationError, ClosedError, TokenError
from swarmavg.security import swarm_ca, tls
from swarmavg.security.identity import Identity
from swarmavg.security.swarm import NO_SWARM_ID, SwarmSecurity, open_swarm_security, utc_now
from swarmavg.security.swarm_ca import CLOCK_SKEW, LEAF_LIFETIME, RENEW_BEFORE, issue_leaf, make_authority
from swarmavg.security.tls_errors import explain_tls_error
from swarmavg.security.tokens import derive_signing_key, generate_token

TOKEN, OTHER_TOKEN = generate_token(), generate_token()


class Clock:
    """A clock that stands where it is put."""

    def __init__(self, now: dt.datetime) -> None:
        self.now = now

    def __call__(self) -> dt.datetime:
        return self.now


def member(token: str | list[str] | None = TOKEN, *, clock: Callable[[], dt.datetime] = utc_now) -> SwarmSecurity:
    return open_swarm_security(Identity.generate(), token, clock=clock)


def server_of(security: SwarmSecurity) -> ssl.SSLContext:
    context = security.server_context()
    assert context is not None
    return context


def client_of(security: SwarmSecurity) -> ssl.SSLContext:
    context = security.client_context()
    assert context is not None
    return context


class Link:
    """Two TLS ends joined in memory."""

    def __init__(self, client: ssl.SSLContext, server: ssl.SSLContext) -> None:
        self.up, self.down = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = client.wrap_bio(self.down, self.up, server_side=False)
        self.server = server.wrap_bio(self.up, self.down, server_side=True)
        self.errors: dict[str, ssl.SSLError] = {}

    def shake_hands(self) -> Link:
        """Let both sides do what they can, to the point where each has read the other's verdict."""
        for _ in range(4):
            for name, side in (("client", self.client), ("server", self.server)):
                if name not in self.errors:
                    self._advance(name, side)
        return self

    def _advance(self, name: str, side: ssl.SSLObject) -> None:
        try:
            side.do_handshake()
            side.read(1)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.errors[name] = error

    @property
    def explained(self) -> dict[str, str]:
        return {name: explain_tls_error(error) for name, error in self.errors.items()}


def certificate_of(side: ssl.SSLObject) -> bytes:
    """What the other end showed to this one."""
    shown = side.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def test_members_of_one_swarm_prove_their_ids_to_each_other() -> None:
    dialler, listener = member(), member()
    link = Link(client_of(dialler), server_of(listener)).shake_hands()
    assert not link.errors
    assert link.client.version() == "TLSv1.3"
    assert link.client.selected_alpn_protocol() == "swarmavg/1"
    assert dialler.peer_of(certificate_of(link.client)) == listener.peer_id
    assert listener.peer_of(certificate_of(link.server)) == dialler.peer_id
    assert dialler.swarm_id == listener.swarm_id
    assert not link.client.session_reused


def test_no_session_tickets_are_handed_out() -> None:
    link = Link(client_of(member()), server_of(member())).shake_hands()
    assert link.client.session is not None
    assert not link.client.session.has_ticket


def test_the_authority_of_a_token_is_the_same_for_all_who_know_it() -> None:
    first, second = (make_authority(derive_signing_key(TOKEN)) for _ in range(2))
    encoding = serialization.Encoding.DER
    assert first.certificate.public_bytes(encoding) == second.certificate.public_bytes(encoding)
    assert first.swarm_id == second.swarm_id != make_authority(derive_signing_key(OTHER_TOKEN)).swarm_id


def test_another_token_is_named_on_both_sides() -> None:
    link = Link(client_of(member(OTHER_TOKEN)), server_of(member())).shake_hands()
    assert "signed by another swarm's token" in link.explained["client"]
    assert "it uses another token" in link.explained["server"]


def test_a_dialler_of_another_token_that_checks_nothing_is_refused() -> None:
    careless = client_of(member(OTHER_TOKEN))
    careless.verify_mode = ssl.CERT_NONE
    link = Link(careless, server_of(member())).shake_hands()
    assert "signed by another swarm's token" in link.explained["server"]
    assert "it uses another token" in link.explained["client"]


def test_a_dialler_without_a_certificate_is_refused() -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.verify_mode = ssl.CERT_NONE
    link = Link(bare, server_of(member())).shake_hands()
    assert "showed no certificate" in link.explained["server"]
    assert "wants a certificate" in link.explained["client"]


def test_a_dialler_of_an_older_tls_is_refused() -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    link = Link(old, server_of(member())).shake_hands()
    assert "does not speak TLS 1.3" in link.explained["server"]
    assert "does not speak TLS 1.3" in link.explained["client"]


@pytest.mark.parametrize("late", ["client", "server"])
def test_an_expired_certificate_is_named_on_both_sides(late: str) -> None:
    long_ago = Clock(utc_now() - LEAF_LIFETIME - dt.timedelta(hours=1))
    stale, fresh = member(clock=long_ago), member()
    dialler, listener = (stale, fresh) if late == "client" else (fresh, stale)
    link = Link(client_of(dialler), server_of(listener)).shake_hands()
    on_time = "client" if late == "server" else "server"
    assert "its certificate has expired" in link.explained[on_time]
    assert "this side's certificate expired" in link.explained[late]


def test_clocks_may_differ_by_a_day_and_no_more() -> None:
    nearly, beyond = CLOCK_SKEW - dt.timedelta(minutes=5), CLOCK_SKEW + dt.timedelta(minutes=5)
    ahead = member(clock=Clock(utc_now() + nearly))
    behind = member(clock=Clock(utc_now() - nearly))
    assert not Link(client_of(ahead), server_of(behind)).shake_hands().errors
    link = Link(client_of(member()), server_of(member(clock=Clock(utc_now() + beyond)))).shake_hands()
    assert "not valid yet" in link.explained["client"]
    assert "not valid yet" in link.explained["server"]


def test_an_authority_made_by_a_member_is_refused() -> None:
    """Below an authority that the swarm's authority signed: what a token holder could make to let others in."""
    authority, middle = (make_authority(derive_signing_key(token)) for token in (TOKEN, OTHER_TOKEN))
    below = Identity.generate()
    key = middle.key.public_key()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(middle.certificate.subject)
        .issuer_name(authority.certificate.subject)
        .public_key(key)
        .serial_number(7)
        .not_valid_before(utc_now() - CLOCK_SKEW)
        .not_valid_after(utc_now() + LEAF_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(middle.certificate.extensions.get_extension_for_class(x509.KeyUsage).value, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
        .sign(authority.key, None)
    )
    leaf = issue_leaf(swarm_ca.SwarmAuthority(middle.swarm_id, certificate, middle.key), below.public_key, utc_now())
    server, _ = tls.make_contexts(below, leaf, [authority.certificate, certificate])
    error = Link(client_of(member()), server).shake_hands().errors["client"]
    assert isinstance(error, ssl.SSLCertVerificationError)
    assert error.verify_message == "path length constraint exceeded"


def test_a_certificate_signed_by_another_key_is_refused() -> None:
    authority = make_authority(derive_signing_key(TOKEN))
    pretended = swarm_ca.SwarmAuthority(authority.swarm_id, authority.certificate, derive_signing_key(OTHER_TOKEN))
    identity = Identity.generate()
    leaf = issue_leaf(pretended, identity.public_key, utc_now())  # the right issuer's name, another's signature
    server, _ = tls.make_contexts(identity, leaf, [authority.certificate])
    assert "another swarm's token" in Link(client_of(member()), server).shake_hands().explained["client"]


def test_a_tampered_certificate_is_refused() -> None:
    authority = make_authority(derive_signing_key(TOKEN))
    identity = Identity.generate()
    der = bytearray(issue_leaf(authority, identity.public_key, utc_now()).public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1  # in the signature
    server, _ = tls.make_contexts(identity, x509.load_der_x509_certificate(bytes(der)), [authority.certificate])
    assert "forged or damaged" in Link(client_of(member()), server).shake_hands().explained["client"]


@pytest.mark.parametrize("noise", [b"\1\0\0\x10\0\0\0\0" + bytes(16), b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"])
def test_plaintext_sent_to_a_tls_end_is_named(noise: bytes) -> None:
    link = Link(client_of(member()), server_of(member()))
    link.up.write(noise)
    link._advance("server", link.server)
    assert "does not speak TLS:" in link.explained["server"]


def test_plaintext_that_answers_tls_is_named() -> None:
    link = Link(client_of(member()), server_of(member()))
    link._advance("client", link.client)
    link.down.write(b"220 mail.example ESMTP ready\r\n")
    link._advance("client", link.client)
    assert "does not speak TLS:" in link.explained["client"]


def test_other_errors_are_explained_too() -> None:
    assert "closed the connection" in explain_tls_error(ConnectionResetError())
    assert "closed the connection" in explain_tls_error(ssl.SSLEOFError(8, "EOF"))
    assert "in time" in explain_tls_error(TimeoutError())
    assert "unheard of" in explain_tls_error(OSError("unheard of"))


def test_a_swarm_changes_its_token_without_a_stop() -> None:
    """Every stage of the change talks to the one before it: [old] -> [old, new] -> [new, old] -> [new]."""
    stages = [member([TOKEN]), member([TOKEN, OTHER_TOKEN]), member([OTHER_TOKEN, TOKEN]), member([OTHER_TOKEN])]
    for earlier, later in itertools.pairwise(stages):
        for dialler, listener in ((earlier, later), (later, earlier)):
            link = Link(client_of(dialler), server_of(listener)).shake_hands()
            assert not link.errors
            assert dialler.peer_of(certificate_of(link.client)) == listener.peer_id
            assert dialler.swarm_id in listener.accepted_swarm_ids
    assert Link(client_of(stages[0]), server_of(stages[3])).shake_hands().errors
    assert Link(client_of(stages[0]), server_of(stages[2])).shake_hands().errors


def test_contexts_are_kept_until_the_certificate_nears_its_end() -> None:
    clock = Clock(utc_now())
    security = member(clock=clock)
    first = security.server_context(), security.client_context()
    clock.now += LEAF_LIFETIME - RENEW_BEFORE - dt.timedelta(minutes=1)
    assert (security.server_context(), security.client_context()) == first
    clock.now += dt.timedelta(minutes=2)
    second = security.server_context(), security.client_context()
    assert second[0] is not first[0]
    assert second[1] is not first[1]
    assert (security.server_context(), security.client_context()) == second


def test_a_listener_that_keeps_its_first_context_shows_renewed_certificates() -> None:
    clock = Clock(utc_now() - LEAF_LIFETIME - dt.timedelta(hours=1))
    security = member(clock=clock)
    kept = server_of(security)
    assert Link(client_of(member()), kept).shake_hands().errors
    clock.now = utc_now()
    link = Link(client_of(member()), kept).shake_hands()
    assert not link.errors
    assert security.peer_of(certificate_of(link.client)) == security.peer_id
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.verify_mode = ssl.CERT_NONE
    assert Link(bare, kept).shake_hands().errors, "the renewed context still wants a certificate"
    assert "another swarm" in Link(_careless(OTHER_TOKEN), kept).shake_hands().explained["server"]


def _careless(token: str) -> ssl.SSLContext:
    context = client_of(member(token))
    context.verify_mode = ssl.CERT_NONE
    return context


def test_threads_that_ask_at_once_get_the_same_contexts() -> None:
    security = member()
    together = threading.Barrier(8)

    def ask() -> ssl.SSLContext:
        together.wait()
        return server_of(security)

    with ThreadPoolExecutor(8) as pool:
        got = {id(future.result()) for future in [pool.submit(ask) for _ in range(8)]}
    assert len(got) == 1


def test_no_private_key_lies_on_the_disk_in_clear_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[bytes] = []

    load = ssl.SSLContext.load_cert_chain

    def watch(context: ssl.SSLContext, name: str, *, password: str) -> None:
        path = Path(name)
        assert path.parent == tmp_path
        if os.name != "nt":
            assert path.stat().st_mode & 0o077 == 0
        seen.append(path.read_bytes())
        load(context, name, password=password)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watch)
    identity = Identity.generate()
    open_swarm_security(identity, TOKEN).server_context()
    assert len(seen) == 2
    for content in seen:
        key = content[: content.index(b"-----BEGIN CERTIFICATE")]
        assert key.startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY")
        with pytest.raises(TypeError, match="encrypted"):
            serialization.load_pem_private_key(key, password=None)
    assert list(tmp_path.iterdir()) == []


def test_the_passing_file_goes_even_when_loading_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    authority = make_authority(derive_signing_key(TOKEN))
    leaf_of_another = issue_leaf(authority, Identity.generate().public_key, utc_now())
    with pytest.raises(ssl.SSLError):
        tls.make_contexts(Identity.generate(), leaf_of_another, [authority.certificate])
    assert list(tmp_path.iterdir()) == []


def test_peer_of_refuses_what_is_no_certificate_of_a_peer() -> None:
    security = member()
    with pytest.raises(AuthenticationError, match="cannot be read"):
        security.peer_of(b"noise")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    builder = builder.not_valid_before(utc_now() - CLOCK_SKEW).not_valid_after(utc_now() + CLOCK_SKEW)
    with pytest.raises(AuthenticationError, match="Ed25519"):
        security.peer_of(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER))


def test_peer_of_goes_by_its_own_clock() -> None:
    clock = Clock(utc_now())
    security = member(clock=clock)
    identity = Identity.generate()
    leaf = issue_leaf(make_authority(derive_signing_key(TOKEN)), identity.public_key, utc_now())
    der = leaf.public_bytes(serialization.Encoding.DER)
    assert security.peer_of(der) == identity.peer_id
    clock.now += LEAF_LIFETIME + dt.timedelta(minutes=1)
    with pytest.raises(AuthenticationError, match="expired"):
        security.peer_of(der)


def test_without_a_token_there_is_no_tls() -> None:
    security = member(None)
    assert security.server_context() is None
    assert security.client_context() is None
    assert security.swarm_id == NO_SWARM_ID
    assert security.accepted_swarm_ids == (NO_SWARM_ID,)
    assert not security.insecure
    assert open_swarm_security(Identity.generate(), None, insecure=True).insecure


def test_arguments_that_make_no_sense_are_refused() -> None:
    identity = Identity.generate()
    with pytest.raises(ValueError, match="insecure=True"):
        open_swarm_security(identity, TOKEN, insecure=True)
    with pytest.raises(TokenError, match="the same"):
        open_swarm_security(identity, [TOKEN, TOKEN.upper()])
    for count in (0, 3):
        with pytest.raises(TokenError, match=f"sequence of {count}"):
            open_swarm_security(identity, [generate_token() for _ in range(count)])
    with pytest.raises(TypeError, match="got a bytes"):
        open_swarm_security(identity, TOKEN.encode())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got a int"):
        open_swarm_security(identity, [5])  # type: ignore[list-item]


def test_representations_show_no_secret() -> None:
    security = member()
    text = repr(security) + repr(make_authority(derive_signing_key(TOKEN))) + repr(vars(security))
    assert TOKEN not in text
    assert security.peer_id.short in repr(security)


def test_a_closed_identity_makes_no_new_certificates() -> None:
    identity = Identity.generate()
    security = open_swarm_security(identity, TOKEN)
    identity.close()
    with pytest.raises(ClosedError):
        security.server_context()
