"""What a forked child inherits from the worker thread's event loop: nothing that it could disturb the parent's peers with.

The child gets copies of all descriptors. Closed politely they would say goodbye in the parent's name; left open they would
keep its connections alive after its death. So each one is pointed at the null device: that closes the child's copy without a
byte on the wire, and the number stays taken, so that no later `close` of a left-over socket object hits a stranger's file.
"""

from __future__ import annotations

import os
import selectors
import stat
from collections.abc import Mapping
from typing import Any

Identity = tuple[int, int]
"""Device and inode: tells a descriptor from a later one of the same number."""


class RememberingSelector(selectors.DefaultSelector):
    """A selector that remembers which sockets its loop has ever waited for, as long as they may be open."""

    def __init__(self) -> None:
        super().__init__()
        self.sockets: dict[int, Identity] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        status = os.fstat(key.fd)
        self.sockets[key.fd] = (status.st_dev, status.st_ino)
        return key


def let_go(selector: RememberingSelector) -> None:
    """In a forked child: drop every inherited socket of the loop, and the polling descriptor it shares with the parent."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        for descriptor in _still_open(selector.sockets):
            os.dup2(null, descriptor, inheritable=False)
        poller = getattr(selector, "fileno", None)
        if poller is not None:
            _replace_poller(poller(), null)
    finally:
        os.close(null)


def _still_open(sockets: Mapping[int, Identity]) -> list[int]:
    found = []
    for descriptor, identity in sockets.items():
        try:
            status = os.fstat(descriptor)
        except OSError:  # closed before the fork
            continue
        if stat.S_ISSOCK(status.st_mode) and (status.st_dev, status.st_ino) == identity:
            found.append(descriptor)
    return found


def _replace_poller(descriptor: int, null: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:  # a kqueue is not inherited
        return
    os.dup2(null, descriptor, inheritable=False)
