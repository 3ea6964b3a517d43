"""The demo's data: scikit-learn's handwritten digits, a held-out part to judge by, and one skewed share per peer.

Everything follows from the seed, so that each process computes the same split by itself and no data has to be sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

CLASSES = 10
FEATURES = 64
_TEST_FRACTION = 0.25
# Each digit has its home with one peer (with several, where there are more peers than digits); a few examples of it stray.
_STRAY_FRACTION = 0.02


@dataclass(frozen=True, slots=True)
class Examples:
    """`inputs`: float32, (n, 64), pixels scaled to 0..1. `labels`: int64, (n,)."""

    inputs: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: torch.Tensor) -> Examples:
        return Examples(self.inputs[rows], self.labels[rows])


class BatchStream:
    """Endless minibatches of `size` examples, drawn with replacement; the same ones for the same seed."""

    def __init__(self, examples: Examples, size: int, seed: int) -> None:
        self._examples = examples
        self._size = size
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> Examples:
        return self._examples.take(torch.randint(len(self._examples), (self._size,), generator=self._generator))


def load_split(seed: int) -> tuple[Examples, Examples]:
    """All 1,797 digits, shuffled, as (training part, held-out part)."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  (takes a second)

    pixels, labels = load_digits(return_X_y=True)
    everything = Examples(torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels).long())
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(everything)))
    held_out = int(len(everything) * _TEST_FRACTION)
    return everything.take(order[held_out:]), everything.take(order[:held_out])


def home_digits(peer: int, peers: int) -> list[int]:
    """The digits that are mostly seen by the peer with this number."""
    return [digit for digit in range(CLASSES) if peer in _homes(digit, peers)]


def share_of(examples: Examples, peer: int, peers: int, seed: int) -> Examples:
    """The part that one of `peers` peers trains on. The shares of all peers are disjoint and together are everything."""
    random = np.random.default_rng([seed, peers])
    owners = np.array([random.choice(_homes(int(digit), peers)) for digit in examples.labels])
    strays = random.random(len(examples)) < _STRAY_FRACTION
    owners[strays] = random.integers(peers, size=int(strays.sum()))
    return examples.take(torch.from_numpy(np.flatnonzero(owners == peer)))


def _homes(digit: int, peers: int) -> list[int]:
    return [peer for peer in range(peers) if peer % CLASSES == digit % min(peers, CLASSES)]
