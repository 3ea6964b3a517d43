"""What went wrong in a TLS handshake, in words that say what to do: OpenSSL's reasons, read for both ends of a swarm's link."""

from __future__ import annotations

import ssl
from typing import Final

_OTHER_SWARM = "it is not in this swarm: its certificate is signed by another swarm's token (compare the tokens of both sides)"
_NOT_TLS = "it does not speak TLS: a swarm without a token, or another service, is at that end"

# X509_V_ERR_* of OpenSSL: what this side holds against the other's certificate.
_BY_VERIFY_CODE: Final = {
    2: _OTHER_SWARM,  # unable to get issuer certificate
    7: "its certificate is forged or damaged: the signature does not fit",
    9: "its certificate is not valid yet: the clocks of the two machines differ by more than a day",
    10: "its certificate has expired: the clock of one machine is wrong, or its peer stopped renewing",
    18: _OTHER_SWARM,  # self-signed
    19: _OTHER_SWARM,  # self-signed in chain
    20: _OTHER_SWARM,  # unable to get local issuer certificate
    21: _OTHER_SWARM,  # unable to verify the first certificate
}

# OpenSSL's reason codes: alerts sent by the other side, and records that make no sense here.
_BY_REASON: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it showed no certificate: it is no member of any swarm",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it wants a certificate and this side showed none",
    "TLSV1_ALERT_UNKNOWN_CA": "it refuses this side's certificate: it uses another token (compare the tokens of both sides)",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it finds this side's certificate expired: check the clocks of both machines",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it finds this side's certificate damaged, or not valid yet: check the clocks of both sides",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it does not accept this side's certificate",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it does not accept the kind of this side's certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "it finds a signature in the handshake wrong",
    "TLSV1_ALERT_ACCESS_DENIED": "it does not let this peer in",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it does not speak TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3",
    "WRONG_VERSION_NUMBER": _NOT_TLS,
    "HTTP_REQUEST": _NOT_TLS,
    "HTTPS_PROXY_REQUEST": _NOT_TLS,
    "PACKET_LENGTH_TOO_LONG": _NOT_TLS,
    "RECORD_LAYER_FAILURE": _NOT_TLS,
    "BAD_RECORD_TYPE": _NOT_TLS,
    "BAD_PROTOCOL_VERSION_NUMBER": _NOT_TLS,
    "UNKNOWN_PROTOCOL": _NOT_TLS,
    "TLSV1_ALERT_NO_APPLICATION_PROTOCOL": "it speaks TLS, but not swarmavg/1",
    "NO_APPLICATION_PROTOCOL": "it speaks TLS, but not swarmavg/1",
}


def explain_tls_error(error: BaseException) -> str:
    """One clause about the other side (*it*), for a dialler's error and a listener's log, from what `ssl` raised."""
    if isinstance(error, ssl.SSLCertVerificationError):
        known = _BY_VERIFY_CODE.get(error.verify_code)
        return known or f"its certificate is not acceptable: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError | EOFError):
        return "it closed the connection during the TLS handshake: it does not speak TLS, or does not accept this side"
    if isinstance(error, TimeoutError):
        return "it did not finish the TLS handshake in time"
    if isinstance(error, ssl.SSLError):
        return _BY_REASON.get(error.reason) or f"the TLS handshake failed: {error.reason or error}"
    return f"the TLS handshake failed: {error}"
