"""Writing and reading the swarm's secret."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.errors import TokenError
from swarmavg.security.identity import public_key_bytes
from swarmavg.security.tokens import TOKEN_PREFIX, derive_signing_key, generate_token, missing_token_message

ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
PASSPHRASE = "correct horse battery staple"


def public_key(token: str) -> bytes:
    return public_key_bytes(derive_signing_key(token).public_key())


def test_tokens_differ_and_equal_tokens_give_equal_keys() -> None:
    token, other = generate_token(), generate_token()
    assert token != other
    assert public_key(token) == public_key(token)
    assert public_key(token) != public_key(other)


def test_a_token_survives_what_terminals_and_mail_do_to_it() -> None:
    token = generate_token()
    assert public_key(f"  {token}\n") == public_key(token) == public_key(token.upper())


def test_the_derivation_stays_what_it_is() -> None:
    zero_to_31 = TOKEN_PREFIX + "aaaqeayeaudaocajbifqydiob4ibceqtcqkrmfyydenbwha5dypvwyng"
    raw = "a9a17f1ec6d971f585cac0493a9a5c72c9d0a2ea59293245ae05c3c242713a2e"
    assert public_key(zero_to_31).hex() == "302a300506032b6570032100" + raw


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 55), letter=st.sampled_from(ALPHABET))
def test_every_slip_of_one_letter_is_noticed(position: int, letter: str) -> None:
    token = generate_token()
    at = len(TOKEN_PREFIX) + position
    if token[at] == letter:
        return
    with pytest.raises(TokenError, match="mistyped"):
        derive_signing_key(token[:at] + letter + token[at + 1 :])


@settings(max_examples=100, deadline=None)
@given(position=st.integers(0, 54))
def test_swapped_letters_are_noticed(position: int) -> None:
    token = generate_token()
    at = len(TOKEN_PREFIX) + position
    swapped = token[:at] + token[at + 1] + token[at] + token[at + 2 :]
    if swapped == token:
        return
    with pytest.raises(TokenError, match="mistyped"):
        derive_signing_key(swapped)


def test_a_token_cut_off_anywhere_is_noticed_and_not_shown() -> None:
    token = generate_token()
    for length in range(len(token)):
        with pytest.raises(TokenError, match=r"truncated|weak|empty|kind|beginning") as caught:
            derive_signing_key(token[:length])
        assert token[:length] not in str(caught.value) or length <= len(TOKEN_PREFIX)
    for start in range(1, 16):
        with pytest.raises(TokenError, match="beginning"):
            derive_signing_key(token[start:])


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("short", "too weak"),
        ("aaaaaaaaaaaaaaaaaaaaaaaa", "too weak"),
        ("abababababababababababab", "too weak"),
        (generate_token() + "a", "too long"),
        (generate_token().replace(TOKEN_PREFIX, "swarm7-"), "another version"),
        (TOKEN_PREFIX + "!" * 56, "mistyped"),
        (TOKEN_PREFIX + "\u00e4" * 56, "mistyped"),
        (generate_token().replace(TOKEN_PREFIX, "swarml-"), "beginning"),
    ],
)
def test_a_bad_token_is_told_from_a_good_one_without_being_shown(bad: str, problem: str) -> None:
    with pytest.raises(TokenError, match=problem) as caught:
        derive_signing_key(bad)
    assert not bad.strip() or bad not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_weak_token_says_how_to_make_a_good_one() -> None:
    with pytest.raises(TokenError, match="swarmavg token"):
        derive_signing_key("password")


def test_a_token_of_a_wrong_type_is_not_shown() -> None:
    with pytest.raises(TypeError, match="got a bytes") as caught:
        derive_signing_key(b"secret bytes of someone")  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


def test_a_passphrase_works_with_a_warning_that_does_not_show_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="swarmavg"):
        first = public_key(PASSPHRASE)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "swarmavg token" in record.getMessage()
    assert "horse" not in caplog.text
    assert public_key(f" {PASSPHRASE} ") == first
    assert public_key(PASSPHRASE + "!") != first


def test_a_generated_token_is_used_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="swarmavg"):
        derive_signing_key(generate_token())
    assert not caplog.records


def test_the_message_for_a_missing_token_says_what_to_run() -> None:
    text = missing_token_message("tcp://0.0.0.0:0")
    assert "tcp://0.0.0.0:0" in text
    assert "swarmavg token" in text
