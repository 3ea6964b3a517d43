"""What every `swarmavg.transport.interface.Transport` must do, as checks to run on an implementation.

Each check is an async function that takes a `TransportHarness` and raises `AssertionError` when the implementation falls short.
Nothing here depends on a test runner; with pytest:

    @pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        async def run():
            async with MyHarness() as harness:
                await check(harness)

        asyncio.run(run())

The checks run in virtual time as well as in real time.
"""

from __future__ import annotations

from typing import Final

from swarmavg.testing.contracts.transport_dialling import DIALLING_CHECKS
from swarmavg.testing.contracts.transport_endings import ENDING_CHECKS
from swarmavg.testing.contracts.transport_harness import TransportCheck, TransportHarness
from swarmavg.testing.contracts.transport_messages import MESSAGE_CHECKS

__all__ = ["TRANSPORT_CHECKS", "TransportCheck", "TransportHarness"]

TRANSPORT_CHECKS: Final[tuple[TransportCheck, ...]] = (*MESSAGE_CHECKS, *ENDING_CHECKS, *DIALLING_CHECKS)
