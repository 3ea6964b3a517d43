"""Transports by URL scheme, found as entry points of the group ``swarmavg.transports``."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Final

from swarmavg.errors import AddressError
from swarmavg.transport.interface import Transport, TransportContext

ENTRY_POINTS: Final = "swarmavg.transports"


def known_schemes() -> tuple[str, ...]:
    """Every scheme for which a transport is installed, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINTS)}))


def create_transport(scheme: str, context: TransportContext) -> Transport:
    """Make the transport of a URL scheme.

    Raises `AddressError` for an unknown scheme, listing what is installed, and for one that two packages claim.
    """
    points = _points(scheme)
    if not points:
        known = ", ".join(known_schemes()) or "none"
        raise AddressError(f"no transport for scheme {scheme!r}; installed (entry points {ENTRY_POINTS}): {known}")
    if len(points) > 1:
        raise AddressError(f"several transports for scheme {scheme!r}: {', '.join(point.value for point in points)}")
    transport: Transport = points[0].load()(context)
    return transport


def _points(scheme: str) -> list[EntryPoint]:
    by_value = {point.value: point for point in entry_points(group=ENTRY_POINTS, name=scheme)}
    return [by_value[value] for value in sorted(by_value)]
