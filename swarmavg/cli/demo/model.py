"""The demo's model: a multilayer perceptron large enough (2.2 million parameters, 8.7 MB) that a round moves real data."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from swarmavg.cli.demo.data import CLASSES, FEATURES, Examples

_WIDTH = 1024


def build_model(seed: int) -> nn.Sequential:
    """A fresh model; its parameters follow from the seed. The global random generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(FEATURES, _WIDTH),
            nn.ReLU(),
            nn.Linear(_WIDTH, _WIDTH),
            nn.ReLU(),
            nn.Linear(_WIDTH, _WIDTH),
            nn.ReLU(),
            nn.Linear(_WIDTH, CLASSES),
        )


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def backward(model: nn.Module, batch: Examples) -> float:
    """Add the gradients of the mean cross-entropy over the batch; returns that loss."""
    loss = nn.functional.cross_entropy(model(batch.inputs), batch.labels)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


@torch.no_grad()
def accuracy(model: nn.Module, examples: Examples) -> float:
    """The fraction of the examples whose digit the model names."""
    guesses = model(examples.inputs).argmax(dim=1)
    return float((guesses == examples.labels).float().mean())


@torch.no_grad()
def digest(model: nn.Module) -> str:
    """sha256 over the bytes of all parameters, as hex: equal for bit-identical models, and for no others."""
    state = hashlib.sha256()
    for parameter in model.parameters():
        state.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
