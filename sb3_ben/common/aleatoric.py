"""The aleatoric flow: what the world leaves to chance, as a density of Bellman samples b given a context and one hypothesis phi.

Shapes: S hypotheses phi (S, d), N contexts (N, C) and N Bellman samples (N,) give (S, N). Leading batch dimensions are carried
along: with E environments, each with hypotheses of its own, (E, S, d), (E, N, C) and (E, N) give (E, S, N).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sb3_ben.common.flows import float_state, standard_normal_log_prob, zuko

__all__ = ["AleatoricFlow", "Spline", "WeightSubspace"]

BOUND = 5.0


class WeightSubspace(nn.Module):
    r"""A network whose last layer is uncertain: phi are coordinates of a fixed subspace of its weights.

    .. math:: \theta(c, \phi) = f(c) \Big( W_0 + \sum_k \phi_k P_k \Big), \qquad \|f(c)\|^2 = H

    The directions :math:`P_k` are random and never learned. The features are normalised, so that the prior spread of output j is
    ``spread[j]`` in *every* context and learning cannot talk it down:
    :math:`\mathrm{Var}_\phi[\theta_j(c, \phi)] = \sigma^2 \sum_k (f(c) \cdot P_{kj})^2 \approx \mathrm{spread}_j^2` for
    :math:`\phi \sim \mathcal{N}(0, \sigma^2 I)` and entries of P of variance :math:`\mathrm{spread}_j^2 / (\sigma^2 d H)`.

    :param context_dim: size C of the context
    :param phi_dim: number d of coordinates of phi
    :param spread: prior standard deviation of each output (O,)
    :param hidden_size: number H of features
    :param activation: activation of the feature network
    :param prior_variance: variance of phi under the prior
    :param learn_base: whether W_0 is learned or stays as drawn
    :param n_random: number of features that are random and fixed
    :param seed: seed of the directions
    """

    base: Tensor
    directions: Tensor

    def __init__(
        self,
        context_dim: int,
        phi_dim: int,
        spread: Tensor,
        hidden_size: int = 64,
        activation: type[nn.Module] = nn.SiLU,
        prior_variance: float = 0.1,
        learn_base: bool = True,
        n_random: int = 0,
        base_scale: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.trunk = nn.Sequential(
            nn.Linear(context_dim, hidden_size), activation(), nn.Linear(hidden_size, hidden_size), activation()
        )
        self.n_random = n_random
        if n_random:
            self.register_buffer("omega", torch.randn(context_dim, n_random, generator=generator))
            self.register_buffer("tau", torch.rand(n_random, generator=generator) * 2 * math.pi)
        hidden_size += n_random
        base = torch.randn(hidden_size, len(spread), generator=generator) * base_scale / hidden_size**0.5
        if learn_base:
            self.base = nn.Parameter(base)
        else:
            self.register_buffer("base", base)
        scale = spread / math.sqrt(prior_variance * phi_dim * hidden_size)
        self.register_buffer("directions", torch.randn(phi_dim, hidden_size, len(spread), generator=generator) * scale)

    def features(self, context: Tensor) -> Tensor:
        """Features (..., H) of unit mean square."""
        features = self.trunk(context)
        features = nn.functional.rms_norm(features, features.shape[-1:], eps=1e-6)
        if self.n_random:
            features = torch.cat([features, math.sqrt(2) * torch.cos(context @ self.omega + self.tau)], -1)
        return features

    def forward(self, context: Tensor, phi: Tensor) -> Tensor:
        """Outputs (*B, N, S, O) for contexts (*B, N, C) and hypotheses (*B, S, d)."""
        d, h, o = self.directions.shape
        weights = self.base + (phi @ self.directions.view(d, -1)).unflatten(-1, (h, o))
        # One product for all hypotheses (N, H) x (H, S O) is three times as fast as a batch of S products.
        outputs = self.features(context) @ weights.transpose(-3, -2).flatten(-2)
        return outputs.unflatten(-1, (-1, o))


class Spline(zuko.transforms.MonotonicRQSTransform):
    """zuko's monotonic rational-quadratic spline for values (..., Q) that share knots (..., K + 1), safe in float32."""

    @staticmethod
    def searchsorted(seq: Tensor, value: Tensor) -> Tensor:
        return torch.searchsorted(seq.detach(), value.detach().contiguous())

    def bin(self, k: Tensor) -> tuple[Tensor, ...]:
        mask = torch.logical_and(0 <= k, k < self.bins)
        k = k.clamp(0, self.bins - 1)
        x0, y0, d0 = (knots.gather(-1, k) for knots in (self.horizontal, self.vertical, self.derivatives))
        x1, y1, d1 = (knots.gather(-1, k + 1) for knots in (self.horizontal, self.vertical, self.derivatives))
        return mask, x0, x1, y0, y1, d0, d1, (y1 - y0) / (x1 - x0)

    def _inverse(self, y: Tensor) -> Tensor:
        mask, x0, x1, y0, y1, d0, d1, s = self.bin(self.searchsorted(self.vertical, y) - 1)
        rise = torch.where(mask, y - y0, 0.0)
        curve = rise * (d0 + d1 - 2 * s)
        a, b, c = (y1 - y0) * (s - d0) + curve, (y1 - y0) * d0 - curve, -s * rise
        # Rounding can push the discriminant below zero, and the root's gradient is infinite at zero.
        root = (b.square() - 4 * a * c).clamp_min(1e-12).sqrt()
        t = (2 * c / (-b - root)).clamp(0.0, 1.0)
        return torch.where(mask, x0 + t * (x1 - x0), y)

    def nodes(self, positions: Iterable[float]) -> Iterator[Tensor]:
        """The spline at relative positions t of all bins, (..., K) for each t: no search needed."""
        y0, rise = self.vertical[..., :-1].contiguous(), self.vertical.diff(dim=-1)
        d0, slope = self.derivatives[..., :-1].contiguous(), rise / self.horizontal.diff(dim=-1)
        curve = d0 + self.derivatives[..., 1:] - 2 * slope
        for t in positions:
            m = t * (1 - t)
            yield y0 + rise * (t**2 * slope).add(d0, alpha=m) / slope.add(curve, alpha=m)


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


class AleatoricFlow(nn.Module):
    r"""Conditional density of Bellman samples, :math:`p(b \mid c, \phi)`, in standardised units of b.

    Noise :math:`z \sim \mathcal{N}(0, 1)` becomes :math:`b = \mu + \sigma\, g^{-1}(z)` with a monotonic rational-quadratic spline g;
    ``n_layers`` of these pairs may be stacked. Their parameters are the outputs of one :class:`WeightSubspace`. The density needs no
    inverse, and the affine part in front of the spline reaches values outside of its interval [-5, 5].

    :param context_dim: size C of the context
    :param phi_dim: number d of coordinates of phi
    :param hidden_size: width of the feature network
    :param n_layers: number of affine-and-spline pairs, the paper's capacity ablation
    :param n_bins: bins K of each spline
    :param activation: activation of the feature network
    :param prior_spread: prior standard deviation of the location, in standard deviations of b
    :param prior_variance: variance of phi under the prior
    :param learn_base: whether the base weights are learned
    :param seed: seed of the directions
    """

    def __init__(
        self,
        context_dim: int,
        phi_dim: int,
        hidden_size: int = 64,
        n_layers: int = 1,
        n_bins: int = 16,
        activation: type[nn.Module] = nn.SiLU,
        prior_spread: float = 0.5,
        prior_variance: float = 0.1,
        seed: int = 0,
        **kw
    ) -> None:
        super().__init__()
        self.n_layers, self.n_bins = n_layers, n_bins
        self.sizes = [1, 1, n_bins, n_bins, n_bins - 1] * n_layers
        spread = torch.full((sum(self.sizes),), 0.5 * prior_spread)
        spread[0] = prior_spread
        self.conditioner = WeightSubspace(context_dim, phi_dim, spread, hidden_size, activation, prior_variance, seed=seed, **kw)

    def layers(self, context: Tensor, phi: Tensor) -> list[Layer]:
        """The transforms from b to noise, with parameters (*B, N, S, ...)."""
        # split and not slices: the gradient of a slice fills a whole tensor with zeros, which took half of the backward pass
        parts = self.conditioner(context, phi).split(self.sizes, -1)
        return [Layer(loc, _squash(log_scale), Spline(*knots)) for loc, log_scale, *knots in _chunks(parts, 5)]

    def log_prob(self, b: Tensor, context: Tensor, phi: Tensor, base_precision: float = 1.0) -> Tensor:
        """Log density.

        :param b: Bellman samples (*B, N)
        :param context: contexts (*B, N, C)
        :param phi: hypotheses (*B, S, d)
        :param base_precision: 1 for the standard normal, 2 for the density as printed in the paper (without the 1/2)
        :return: log p(b | c, phi) (*B, S, N)
        """
        z, ladj = _push(self.layers(context, phi), b[..., None, None])
        return (standard_normal_log_prob(z, base_precision) + ladj).squeeze(-1).mT

    def moments(self, context: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        r"""Mean and variance of b, by quadrature of the distribution function.

        Between neighbouring knots, :math:`\int x\, dF = x_0 \Delta F + \int (F_1 - F)\, dx`, and F is a smooth function of x there.

        :param context: contexts (*B, N, C)
        :param phi: hypotheses (*B, S, d)
        :return: means and variances (*B, S, N)
        """
        first, *rest = self.layers(context, phi)
        mean, variance = _bin_moments(first.spline) if not rest else _stacked_moments(first.spline, rest)
        scale = torch.exp(first.log_scale).squeeze(-1)
        return (first.loc.squeeze(-1) + scale * mean).mT, (scale.square() * variance).mT

    def mean(self, context: Tensor, phi: Tensor) -> Tensor:
        """Mean of b (*B, S, N); see :meth:`moments`."""
        return self.moments(context, phi)[0]

    def rsample(self, context: Tensor, phi: Tensor, n: int) -> Tensor:
        """Differentiable samples of b (*B, S, N, n)."""
        layers = self.layers(context, phi)
        z = torch.randn(*layers[0].loc.shape[:-1], n, dtype=phi.dtype, device=phi.device)
        for layer in reversed(layers):
            z = layer.pull(z)
        return z.transpose(-2, -3)

    @torch.no_grad()
    def sample(self, context: Tensor, phi: Tensor, n: int) -> Tensor:
        """Samples of b (*B, S, N, n)."""
        return self.rsample(context, phi, n)


def _squash(log_scale: Tensor) -> Tensor:
    """Keep scales between 1e-3 and 1e3, as zuko does."""
    return log_scale / (1 + (log_scale / math.log(1e-3)).abs())


def _chunks(parts: Sequence[Tensor], size: int) -> list[Sequence[Tensor]]:
    return [parts[i : i + size] for i in range(0, len(parts), size)]


def _push(layers: Sequence[Layer], b: Tensor) -> tuple[Tensor, Tensor]:
    """Through all layers towards noise: the value and the log derivative."""
    total = torch.zeros_like(b)
    for layer in layers:
        b, ladj = layer.push(b.expand(*layer.loc.shape[:-1], b.shape[-1]))
        total = total + ladj
    return b, total


def _legendre(n: int) -> tuple[list[float], list[float]]:
    """Gauss-Legendre nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(n)
    return ((nodes + 1) / 2).tolist(), (weights / 2).tolist()


def _bin_moments(spline: Spline, n_nodes: int = 4) -> tuple[Tensor, Tensor]:
    """Moments of x where spline(x) is standard normal; outside of the spline's interval there is no mass to speak of (6e-7)."""
    t, weights = _legendre(n_nodes)
    return _integrate(spline.horizontal, _cdf(spline.vertical), map(_cdf, spline.nodes(t)), t, weights)


def _cdf(z: Tensor) -> Tensor:
    """Standard normal distribution function; torch.special.ndtr is the same but not vectorised."""
    return 0.5 + 0.5 * torch.erf(z * math.sqrt(0.5))


def _integrate(
    edges: Tensor, cdf_edges: Tensor, cdf_nodes: Iterable[Tensor], t: Sequence[float], weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Mean and variance from a distribution function.

    :param edges: points (..., M + 1)
    :param cdf_edges: the distribution function there
    :param cdf_nodes: its values (..., M) at each relative position t between neighbouring edges
    :param t: the positions, in [0, 1]
    :param weights: quadrature weights of the positions
    """
    left, width, mass = edges[..., :-1], edges.diff(dim=-1), cdf_edges.diff(dim=-1)
    area = lever = torch.zeros_like(width)
    for cdf, position, weight in zip(cdf_nodes, t, weights, strict=True):
        above = cdf_edges[..., 1:] - cdf
        area, lever = area.add(above, alpha=weight), lever.add(above, alpha=weight * position)
    mean = (left * mass + width * area).sum(-1)
    offset = left - mean[..., None]
    square = offset.square() * mass + 2 * width * (offset * area + width * lever)
    return mean, square.sum(-1).clamp_min(0.0)


def _stacked_moments(first: Spline, rest: Sequence[Layer], n_nodes: int = 4) -> tuple[Tensor, Tensor]:
    raise NotImplementedError
