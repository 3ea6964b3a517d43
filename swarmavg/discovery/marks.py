"""High-water marks: the versions of records that are gone, in bounded memory."""

from __future__ import annotations

from swarmavg.discovery.digests import Fingerprint
from swarmavg.discovery.interface import Version
from swarmavg.identifiers import PeerId


class Marks:
    """At most `limit` versions. When they are full, the source that filled most of them loses its oldest one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._versions: dict[Fingerprint, tuple[Version, PeerId | None]] = {}
        self._of_source: dict[PeerId | None, dict[Fingerprint, None]] = {}

    def __len__(self) -> int:
        return len(self._versions)

    def get(self, name: Fingerprint) -> Version | None:
        found = self._versions.get(name)
        return found[0] if found else None

    def put(self, name: Fingerprint, version: Version, source: PeerId | None) -> None:
        """Remember `version`, charged to the source whose record it was."""
        self.forget(name)
        if len(self._versions) >= self._limit:
            fullest = max(self._of_source.values(), key=len)
            self.forget(next(iter(fullest)))
        self._versions[name] = (version, source)
        self._of_source.setdefault(source, {})[name] = None

    def forget(self, name: Fingerprint) -> None:
        found = self._versions.pop(name, None)
        if found is None:
            return
        names = self._of_source[found[1]]
        del names[name]
        if not names:
            del self._of_source[found[1]]
