"""The aleatoric flow: what the world leaves to chance, as a density of Bellman samples b given a context and one hypothesis phi.

Shapes: S hypotheses phi (S, d), N contexts (N, C) and N Bellman samples (N,) give (S, N). Leading batch dimensions *B are carried
along: with E environments, each with hypotheses of its own, (E, S, d), (E, N, C) and (E, N) give (E, S, N).
"""

from __future__ import annotations

import abc
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sb3_ben.flows.base import standard_normal_log_prob
from sb3_ben.flows.spline import Layer, Spline, squash

__all__ = ["AleatoricFlow", "ConditionalDensity", "UncertainWeights", "mlp", "zero"]


class UncertainWeights(nn.Module):
    r"""The uncertain part of the conditioner: phi are the weights of its last layer on fixed random features.

    Written out, the parameters of the flow are :math:`\theta(c, \phi) = (f(c), g(c)) (W_0 + \sum_k \phi_k P_k)` with learned
    features f and random features g. The learned :math:`W_0` acts on f alone (``shape`` in :class:`AleatoricFlow`); each
    :math:`P_k` has a single entry, from one random feature to one of two outputs:

    - ``shift`` moves b. Its information grows with the sharpness of the density, so that it is soon known where b was seen.
    - ``tilt`` moves the noise z. It moves probability between the values b can take and leaves the values in place; one sample of
      b carries one unit of information about it, whatever the density, so that it is known to :math:`1 / \sqrt{n}`.

    Were g learned too, learning would bend it until the data say nothing about phi, and contexts never seen would inherit the
    certainty of those seen. Random Fourier features of the context at unit mean square, with frequencies
    :math:`\omega \sim \mathcal{N}(0, \kappa^2 I / C)`, give both outputs the prior deviation ``spread`` in every context,
    and contexts at distance :math:`\Delta` the correlation :math:`\exp(-\kappa^2 \Delta^2 / 2 C)`.

    :param context_dim: size C of the context
    :param phi_dim: number d of weights; the first half belongs to the shift, the rest to the tilt
    :param spread: prior standard deviation of the shift and of the tilt, in standard deviations of b
    :param prior_variance: variance of phi under the prior
    :param feature_scale: :math:`\kappa`, how fast the features change with the context
    :param seed: seed of the features
    """

    frequencies: Tensor
    phases: Tensor
    amplitudes: Tensor

    def __init__(
        self,
        context_dim: int,
        phi_dim: int,
        spread: float = 0.5,
        prior_variance: float = 0.1,
        feature_scale: float = 2.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.n_shift = (phi_dim + 1) // 2
        generator = torch.Generator().manual_seed(seed)
        # cosine and sine of each frequency: their squares add up to one, so that the prior spread is the same in every context
        frequencies = torch.randn(context_dim, (phi_dim + 1) // 2, generator=generator).repeat_interleave(2, 1)[:, :phi_dim]
        self.register_buffer("frequencies", frequencies * feature_scale / math.sqrt(context_dim))
        self.register_buffer("phases", (torch.arange(phi_dim) % 2) * math.pi / 2)
        sizes = torch.full((phi_dim,), float(self.n_shift))
        sizes[self.n_shift :] = phi_dim - self.n_shift
        self.register_buffer("amplitudes", spread * torch.sqrt(2 / (prior_variance * sizes)))

    def forward(self, context: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Shift and tilt, each (*B, N, S), for contexts (*B, N, C) and hypotheses (*B, S, d)."""
        # detached: the likelihood would bend the encoding to the random features, and the values would follow them
        angles = F.rms_norm(context.detach(), context.shape[-1:], eps=1e-6) @ self.frequencies
        weighted = phi * self.amplitudes
        shift, tilt = (
            features @ weights.mT
            for features, weights in zip(
                torch.cos(angles - self.phases).tensor_split([self.n_shift], -1),
                weighted.tensor_split([self.n_shift], -1),
                strict=True,
            )
        )
        return shift, tilt


class ConditionalDensity(nn.Module, abc.ABC):
    """Interface of the aleatoric flows: a density of standardised Bellman samples given contexts and hypotheses.

    :param context_dim: size C of the context
    :param feature_dim: number of entries that follow in each context and do not change with learning: the uncertain weights look
        at these alone; with ``None`` they look at the context itself
    """

    def __init__(self, context_dim: int, feature_dim: int | None = None) -> None:
        super().__init__()
        self.context_dim, self.feature_dim = context_dim, feature_dim

    def _learned(self, context: Tensor) -> Tensor:
        """The part of the context that the learned networks look at."""
        return context[..., : self.context_dim]

    def _fixed(self, context: Tensor) -> Tensor:
        """The part of the context that the uncertain weights look at."""
        return context if self.feature_dim is None else context[..., self.context_dim :]

    @abc.abstractmethod
    def push(self, b: Tensor, context: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Towards standard normal noise: the noise (*B, S, N, k) that b is made of and the log derivative (*B, S, N).

        :param b: Bellman samples (*B, N)
        :param context: contexts (*B, N, C)
        :param phi: hypotheses (*B, S, d)
        """

    def log_prob(self, b: Tensor, context: Tensor, phi: Tensor) -> Tensor:
        """Log density (*B, S, N); see :meth:`push`."""
        z, ladj = self.push(b, context, phi)
        return standard_normal_log_prob(z).sum(-1) + ladj

    @abc.abstractmethod
    def moments(self, context: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of b, each (*B, S, N).

        :param context: contexts (*B, N, C)
        :param phi: hypotheses (*B, S, d)
        """

    @abc.abstractmethod
    def rsample(self, context: Tensor, phi: Tensor, n: int) -> Tensor:
        """Differentiable samples of b (*B, S, N, n).

        :param context: contexts (*B, N, C)
        :param phi: hypotheses (*B, S, d)
        :param n: number of samples
        """

    def log_prob_and_moments(self, b: Tensor, context: Tensor, phi: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Both at once, the moments without gradients; see :meth:`log_prob` and :meth:`moments`."""
        log_prob = self.log_prob(b, context, phi)
        with torch.no_grad():
            return log_prob, self.moments(context, phi)

    def mean(self, context: Tensor, phi: Tensor) -> Tensor:
        """Mean of b (*B, S, N); see :meth:`moments`."""
        return self.moments(context, phi)[0]

    @torch.no_grad()
    def sample(self, context: Tensor, phi: Tensor, n: int) -> Tensor:
        """Samples of b (*B, S, N, n) without gradients; see :meth:`rsample`."""
        return self.rsample(context, phi, n)


class AleatoricFlow(ConditionalDensity):
    r"""One-dimensional spline flow with an exact density and a mean by quadrature.

    Noise :math:`z \sim \mathcal{N}(0, 1)` becomes

    .. math:: b = \delta_\phi(c) + \mu(c) + \sigma(c)\, g_c^{-1}(z + \tau_\phi(c))

    with a monotonic rational-quadratic spline g, and the shift :math:`\delta_\phi` and tilt :math:`\tau_\phi` of
    :class:`UncertainWeights`. The density needs no inverse of g, the affine part reaches values outside of the spline's interval
    [-5, 5], and a fresh flow is a standard normal density around the prior's shift. Knots are computed once per context, not once
    per hypothesis.

    :param context_dim: size C of the context
    :param phi_dim: number d of coordinates of phi
    :param hidden_size: width of the network of the learned part
    :param n_bins: bins of each spline
    :param activation: activation of the network
    :param prior_spread: prior standard deviation of shift and tilt, in standard deviations of b
    :param prior_variance: variance of phi under the prior
    :param feature_scale: how fast the random features change with the context
    :param feature_dim: size of the part of the context that the random features are taken of, see :class:`ConditionalDensity`
    :param seed: seed of the random features
    """

    def __init__(
        self,
        context_dim: int,
        phi_dim: int,
        hidden_size: int = 64,
        n_bins: int = 16,
        activation: type[nn.Module] = nn.SiLU,
        prior_spread: float = 0.5,
        prior_variance: float = 0.1,
        feature_scale: float = 2.0,
        feature_dim: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(context_dim, feature_dim)
        self.sizes = [1, 1, n_bins, n_bins, n_bins - 1]
        self.shape = mlp(context_dim, hidden_size, sum(self.sizes), activation)
        self.uncertain = UncertainWeights(feature_dim or context_dim, phi_dim, prior_spread, prior_variance, feature_scale, seed)

    def layer(self, context: Tensor) -> Layer:
        """The learned transform between b and noise, with parameters (*B, N, ...)."""
        # split and not slices: the gradient of a slice fills a whole tensor with zeros, which took half of the backward pass
        loc, log_scale, *knots = self.shape(self._learned(context)).split(self.sizes, -1)
        return Layer(loc, squash(log_scale), Spline(*knots))

    def push(self, b: Tensor, context: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        shift, tilt = self.uncertain(self._fixed(context), phi)
        z, ladj = self.layer(context).push(b.unsqueeze(-1) - shift)
        return (z - tilt).mT.unsqueeze(-1), ladj.mT

    def moments(self, context: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of b, each (*B, S, N), by quadrature of the distribution function (four nodes per bin)."""
        mean, variance = self.layer(context).moments(*self.uncertain(self._fixed(context), phi))
        return mean.mT, variance.mT

    def log_prob_and_moments(self, b: Tensor, context: Tensor, phi: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        layer, (shift, tilt) = self.layer(context), self.uncertain(self._fixed(context), phi)
        z, ladj = layer.push(b.unsqueeze(-1) - shift)
        with torch.no_grad():
            mean, variance = layer.moments(shift, tilt)
        return (standard_normal_log_prob(z - tilt) + ladj).mT, (mean.mT, variance.mT)

    def rsample(self, context: Tensor, phi: Tensor, n: int) -> Tensor:
        shift, tilt = self.uncertain(self._fixed(context), phi)
        z = (tilt.unsqueeze(-1) + torch.randn(*tilt.shape, n, dtype=tilt.dtype, device=tilt.device)).flatten(-2)
        v = self.layer(context).pull(z)
        return (shift.unsqueeze(-1) + v.unflatten(-1, (-1, n))).transpose(-2, -3)


def mlp(in_size: int, hidden_size: int, out_size: int, activation: type[nn.Module], zero_output: bool = True) -> nn.Sequential:
    """Two hidden layers; with ``zero_output`` it starts at zero."""
    last = nn.Linear(hidden_size, out_size)
    hidden = [nn.Linear(in_size, hidden_size), activation(), nn.Linear(hidden_size, hidden_size), activation()]
    return nn.Sequential(*hidden, zero(last) if zero_output else last)


def zero(layer: nn.Linear) -> nn.Linear:
    """The layer, which now gives zero."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
