"""The units that b is measured in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["RunningStandardizer"]


class RunningStandardizer(nn.Module):
    """Running mean and variance of b, and the change of units they define.

    The count is capped, so that old Bellman samples (of a worse Q) are forgotten in time. While b has been constant up to
    rounding its unit is 1.

    :param max_count: number of samples after which the average becomes an exponential one
    """

    mean: Tensor
    var: Tensor
    count: Tensor
    std: Tensor  # the unit of b

    def __init__(self, max_count: float = 1e6) -> None:
        super().__init__()
        self.max_count = max_count
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("var", torch.ones(()))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    @torch.no_grad()
    def update(self, b: Tensor, mask: Tensor | None = None) -> None:
        """Take new samples into account (Chan's parallel formula).

        :param b: Bellman samples (...)
        :param mask: which of them count (...), all if not given
        """
        b = b.flatten() if mask is None else b[mask.bool()]
        if b.numel() == 0:
            return
        mean = b.mean()
        delta, share = mean - self.mean, b.numel() / (self.count + b.numel())
        variance = (1 - share) * self.var + share * (b - mean).square().mean() + share * (1 - share) * delta.square()
        self.var.copy_(variance)
        self.mean.add_(share * delta)
        self.count.add_(b.numel()).clamp_(max=self.max_count)
        # relative to the mean: single precision cannot tell a spread below about 1e-6 of it from rounding
        is_constant = self.var <= (1e-5 * self.mean).square()
        self.std.copy_(torch.where(is_constant, torch.ones_like(self.var), self.var).sqrt())

    def standardize(self, b: Tensor) -> Tensor:
        """From the units of rewards to standard deviations."""
        return (b - self.mean) / self.std

    def unstandardize(self, b: Tensor) -> Tensor:
        """From standard deviations to the units of rewards."""
        return self.mean + self.std * b
