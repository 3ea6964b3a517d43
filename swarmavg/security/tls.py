"""TLS contexts from a key and certificates: TLS 1.3 with a certificate on both sides, by the standard library's `ssl`.

Knows nothing about tokens and peers' ids: who may be at the other end is decided by whoever made the certificates.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import ssl
import tempfile
from collections.abc import Iterator, Sequence

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from swarmavg.security.identity import Identity

ALPN_PROTOCOL = "swarmavg/1"


def make_contexts(
    identity: Identity, leaf: x509.Certificate, trusted: Sequence[x509.Certificate]
) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts for accepting and for dialling that show `leaf` and accept what one of the `trusted` authorities signed."""
    server = _bare_context(ssl.PROTOCOL_TLS_SERVER, trusted)
    server.num_tickets = 0  # no resumption: every connection proves again who is there
    client = _bare_context(ssl.PROTOCOL_TLS_CLIENT, trusted)
    passphrase = secrets.token_hex(32)
    with _passing_file(identity.encrypted_pem(passphrase.encode()) + leaf.public_bytes(Encoding.PEM)) as name:
        server.load_cert_chain(name, password=passphrase)
        client.load_cert_chain(name, password=passphrase)
    return server, client


def _bare_context(protocol: int, trusted: Sequence[x509.Certificate]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # peers have ids, not names: the transport compares the id in the certificate
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=b"".join(authority.public_bytes(Encoding.DER) for authority in trusted))
    context.set_alpn_protocols([ALPN_PROTOCOL])
    return context


@contextlib.contextmanager
def _passing_file(content: bytes) -> Iterator[str]:
    """A file that exists inside the block: `ssl` takes keys from files only, so `content` must hold them encrypted."""
    descriptor, name = tempfile.mkstemp(prefix="swarmavg-", suffix=".pem")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        yield name
    finally:
        os.unlink(name)  # noqa: PTH108  (a name, not a Path, is what ssl takes)
