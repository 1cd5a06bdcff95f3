"""The transform between b and noise: affine, then a monotonic spline, with the moments of what it makes of normal noise.

Shapes: parameters belong to contexts (*B, N, ...) and are shared by the S hypotheses of each, (*B, N, S).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sb3_ben.flows.base import standard_normal_log_prob, zuko

__all__ = ["Layer", "Spline", "squash"]


class Spline(zuko.transforms.MonotonicRQSTransform):
    """zuko's monotonic rational-quadratic spline for values (*B, N, Q) that share knots (*B, N, K + 1), safe in float32."""

    def searchsorted(self, seq: Tensor, value: Tensor) -> Tensor:
        seq = seq.detach().expand(*value.shape[:-1], -1)
        return torch.searchsorted(seq.contiguous(), value.detach().contiguous())

    def bin(self, k: Tensor) -> tuple[Tensor, ...]:
        mask = torch.logical_and(k >= 0, k < self.bins)
        k = k.clamp(0, self.bins - 1)
        knots = [x.expand(*k.shape[:-1], -1) for x in (self.horizontal, self.vertical, self.derivatives)]
        (x0, y0, d0), (x1, y1, d1) = ([x.gather(-1, i) for x in knots] for i in (k, k + 1))
        return mask, x0, x1, y0, y1, d0, d1, (y1 - y0) / (x1 - x0)

    def _inverse(self, y: Tensor) -> Tensor:
        mask, x0, x1, y0, y1, d0, d1, s = self.bin(self.searchsorted(self.vertical, y) - 1)
        height = torch.where(mask, (y - y0) / (y1 - y0), 0.0)
        curve = height * (d0 + d1 - 2 * s)
        a, b, c = s - d0 + curve, d0 - curve, -s * height
        # Rounding can push the discriminant below zero (zuko: NaN), and the gradient of a root is infinite at zero.
        root = (b.square() - 4 * a * c).clamp_min(1e-12).sqrt()
        return torch.where(mask, x0 + (2 * c / (-b - root)).clamp(0.0, 1.0) * (x1 - x0), y)

    def nodes(self, positions: Iterable[float]) -> Iterator[Tensor]:
        """The spline at relative positions t of all bins, (..., K) for each t: no search needed."""
        y0, rise = self.vertical[..., :-1].contiguous(), self.vertical.diff(dim=-1)
        d0, slope = self.derivatives[..., :-1].contiguous(), rise / self.horizontal.diff(dim=-1)
        curve = d0 + self.derivatives[..., 1:] - 2 * slope
        for t in positions:
            mixed = t * (1 - t)
            yield y0 + rise * (t**2 * slope).add(d0, alpha=mixed) / slope.add(curve, alpha=mixed)


class Layer(NamedTuple):
    """One transform of b: subtract ``loc``, divide by exp(``log_scale``), bend by ``spline``."""

    loc: Tensor
    log_scale: Tensor
    spline: Spline

    def push(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """Towards noise: the value and the log derivative."""
        z, ladj = self.spline.call_and_ladj((b - self.loc) * torch.exp(-self.log_scale))
        return z, ladj - self.log_scale

    def pull(self, z: Tensor) -> Tensor:
        """From noise."""
        return self.loc + torch.exp(self.log_scale) * self.spline._inverse(z)

    def moments(self, shift: Tensor, tilt: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of b, each (*B, N, S), moved by ``shift`` and with noise of mean ``tilt``."""
        mean, variance = _integrate(self.spline, tilt)
        scale = torch.exp(self.log_scale)
        return shift + self.loc + scale * mean, scale.square() * variance


def _integrate(spline: Spline, tilt: Tensor, n_nodes: int = 4) -> tuple[Tensor, Tensor]:
    r"""Mean and variance of x, each (..., S), where z(x) is normal with mean ``tilt`` (..., S) and unit variance.

    Between neighbouring knots integration by parts gives :math:`\int x\, dF = x_0 \Delta F + \int (F_1 - F)\, dx`, and F is
    smooth there. Compared with two nodes of the quantile function per bin this is ten times as exact, and needs no inverse.
    Beyond the last knots z grows as x does, which leaves moments of a cut normal distribution.
    """
    edges, center, (positions, weights) = spline.horizontal.unsqueeze(-2), tilt.unsqueeze(-1), _legendre(n_nodes)
    cdf = _cdf(spline.vertical.unsqueeze(-2) - center)
    left, width, mass = edges[..., :-1], edges.diff(dim=-1), cdf.diff(dim=-1)
    area = lever = torch.zeros_like(mass)
    for z, t, weight in zip(spline.nodes(positions), positions, weights, strict=True):
        above = cdf[..., 1:] - _cdf(z.unsqueeze(-2) - center)
        area, lever = area.add(above, alpha=weight), lever.add(above, alpha=weight * t)
    ends = (spline.vertical[..., i].unsqueeze(-1) - tilt for i in (0, -1))
    tails = [_tail(edges[..., i], sign * z, sign) for i, sign, z in zip((0, -1), (1.0, -1.0), ends, strict=True)]
    mean = (left * mass + width * area).sum(-1) + sum(edge * p + first for edge, p, first, _ in tails)
    offset = left - mean.unsqueeze(-1)
    variance = (offset.square() * mass + 2 * width * (offset * area + width * lever)).sum(-1)
    for edge, p, first, second in tails:
        variance = variance + (edge - mean).square() * p + 2 * (edge - mean) * first + second
    return mean, variance.clamp_min(0.0)


def _tail(edge: Tensor, z: Tensor, sign: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""An edge, the mass beyond it and two moments around it, :math:`\int_{-\infty}^z (u - z)^k\, d\Phi(u)` for k = 0, 1, 2.

    :param edge: the edge
    :param z: noise at the edge, mirrored for the upper tail
    :param sign: 1 for the lower tail, -1 for the upper one
    """
    mass, density = _cdf(z), torch.exp(standard_normal_log_prob(z))
    return edge, mass, -sign * (density + z * mass), (1 + z.square()) * mass + z * density


def _cdf(z: Tensor) -> Tensor:
    """Standard normal distribution function; unlike torch.special.ndtr it is vectorised."""
    return 0.5 + 0.5 * torch.erf(z * math.sqrt(0.5))


@lru_cache  # numpy solves an eigenvalue problem for them
def _legendre(n: int) -> tuple[list[float], list[float]]:
    """Gauss-Legendre nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(n)
    return ((nodes + 1) / 2).tolist(), (weights / 2).tolist()


def squash(log_scale: Tensor) -> Tensor:
    """Keep scales between 1e-3 and 1e3, as zuko does."""
    return log_scale / (1 + (log_scale / math.log(1e-3)).abs())
