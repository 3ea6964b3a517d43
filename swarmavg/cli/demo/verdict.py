"""The demo's judgement of its own outcome: did the peers end as one, and did averaging pay? Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from swarmavg.cli.demo.session import Outcome

MARGIN = 0.10
"""The averaged model must name at least this fraction of the held-out digits more than the best model trained alone."""


def summary(outcome: Outcome) -> list[str]:
    """The accuracies, side by side, as lines to print."""
    rows = [(f"peer {number} alone on its share", peer.alone) for number, peer in enumerate(outcome.peers)]
    rows.append((f"{len(outcome.peers)} peers together", worst_together(outcome)))
    rows.append(("one process on all data", outcome.everything))
    width = max(len(label) for label, _ in rows)
    heading = f"accuracy on held-out digits ({outcome.parameters:,} parameters):"
    return [heading, *(f"  {label:<{width}}  {accuracy:6.1%}" for label, accuracy in rows)]


def failures(outcome: Outcome) -> list[str]:
    """Why the demo has failed; empty if it has not."""
    found = []
    digests = [peer.digest for peer in outcome.peers]
    if len(set(digests)) > 1:
        found.append(f"the peers ended with different parameters (sha256: {_abbreviated(digests)})")
    if worst_together(outcome) < best_alone(outcome) + MARGIN:
        found.append(
            f"the averaged model ({worst_together(outcome):.1%}) is not at least {MARGIN * 100:.0f} points better "
            f"than the best lone one ({best_alone(outcome):.1%})"
        )
    return found


def praise(outcome: Outcome) -> str:
    """The passing verdict in one line."""
    return (
        f"{len(outcome.peers)} peers hold identical parameters (sha256 {outcome.peers[0].digest[:12]}); averaged "
        f"{worst_together(outcome):.1%}, best lone {best_alone(outcome):.1%} (margin asked {MARGIN * 100:.0f} points), "
        f"one process on all data {outcome.everything:.1%}"
    )


def worst_together(outcome: Outcome) -> float:
    return min(peer.together for peer in outcome.peers)


def best_alone(outcome: Outcome) -> float:
    return max(peer.alone for peer in outcome.peers)


def _abbreviated(digests: Sequence[str]) -> str:
    return ", ".join(f"peer {number} {digest[:12]}" for number, digest in enumerate(digests))
