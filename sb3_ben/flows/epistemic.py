"""The epistemic flow: what is not known yet, as a density over the weights phi of the aleatoric flow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal

from sb3_ben.flows.base import float_state, standard_normal_log_prob, zuko

__all__ = ["EpistemicFlow", "MeanField", "antithetic_noise", "default_prior", "make_epistemic_flow", "prior_log_prob"]

# Past this size the masked networks and the dense linear layer cost more than the dependencies they model are worth.
MAX_FLOW_DIM = 300


def default_prior(phi_dim: int, variance: float = 0.1) -> Distribution:
    r"""The paper's prior :math:`\mathcal{N}(0, 0.1 I)`.

    :param phi_dim: number of coordinates of phi
    :param variance: variance of each of them
    """
    return Independent(Normal(torch.zeros(phi_dim), torch.full((phi_dim,), variance**0.5)), 1)


def prior_log_prob(prior: Distribution, phi: Tensor) -> Tensor:
    """Log density of weights under the prior, computed where the prior is: distributions cannot be moved to another device.

    :param prior: distribution over R^d
    :param phi: weights (..., d)
    """
    return prior.log_prob(phi.to(_device_of(prior))).to(phi.device)


def _device_of(distribution: Distribution) -> torch.device:
    """The device of the first tensor in a distribution, or in those that it is made of."""
    for part in vars(distribution).values():
        if isinstance(part, Tensor):
            return part.device
        if isinstance(part, Distribution):
            return _device_of(part)
    return torch.device("cpu")


class EpistemicFlow(nn.Module):
    r"""The variational posterior :math:`q_\psi(\phi)`, a flow that samples in one pass.

    The paper's list of layers (ActNorm, masked autoregressive, ActNorm, masked autoregressive, LU linear, permutation) is read as
    the map :math:`\phi = t_\psi(z)` from noise to weights. Learning needs samples and their own density only,

    .. math:: \log q_\psi(t_\psi(z)) = \log \mathcal{N}(z; 0, I) - \log |\det \partial_z t_\psi(z)|,

    which is one pass in this orientation; the density of *given* weights (:meth:`log_prob`) takes ``phi_dim`` passes.

    :param phi_dim: number of coordinates of phi
    :param prior: prior over phi that psi is fitted to at construction, N(0, 0.1 I) if not given
    :param hidden_size: width of the masked networks, raised to ``phi_dim`` where it is smaller
    """

    def __init__(self, phi_dim: int, prior: Distribution | None = None, hidden_size: int = 64) -> None:
        super().__init__()
        self.phi_dim = phi_dim
        self.transform = zuko.lazy.LazyComposedTransform(*self._layers(phi_dim, hidden_size))
        float_state(self)
        self.fit_to_prior(prior if prior is not None else default_prior(phi_dim))

    @staticmethod
    def _layers(phi_dim: int, hidden_size: int) -> list[nn.Module]:
        """ActNorm, masked autoregressive, ActNorm, masked autoregressive, LU linear, permutation."""
        order = torch.arange(phi_dim)
        # A hidden layer narrower than phi silently drops dependencies between coordinates.
        hidden = [max(hidden_size, phi_dim)]
        masked = zuko.flows.MaskedAutoregressiveTransform
        return [
            _act_norm(phi_dim),
            masked(phi_dim, order=order, hidden_features=hidden),
            _act_norm(phi_dim),
            masked(phi_dim, order=order.flip(0), hidden_features=hidden),
            zuko.lazy.UnconditionalTransform(zuko.transforms.LULinearTransform, torch.eye(phi_dim)),
            zuko.lazy.UnconditionalTransform(zuko.transforms.PermutationTransform, order.flip(0), buffer=True),
        ]

    def forward(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Map noise to weights.

        :param noise: standard normal noise (..., d)
        :return: phi (..., d) and log q(phi) (...)
        """
        phi, ladj = self.transform().call_and_ladj(noise)
        return phi, standard_normal_log_prob(noise).sum(-1) - ladj

    def rsample_and_log_prob(self, n: int) -> tuple[Tensor, Tensor]:
        """Draw hypotheses, differentiable with respect to psi, in antithetic pairs.

        :param n: number of samples
        :return: phi (n, d) and log q(phi) (n,)
        """
        return self(antithetic_noise((), n, self.phi_dim, next(self.parameters())))

    def log_prob(self, phi: Tensor) -> Tensor:
        """Log density of given weights, by the slow direction.

        :param phi: weights (..., d)
        """
        for layer in reversed(self.transform.transforms):
            phi = _invert(layer(), phi)
        return self(phi)[1]

    def fit_to_prior(self, prior: Distribution, steps: int = 1000, n_samples: int = 256) -> float:
        """Set psi to psi_0, the prior: exactly where the prior is Gaussian, otherwise by minimising KL(q || prior).

        :param prior: distribution over R^d
        :param steps: gradient steps, where the prior is not Gaussian
        :param n_samples: samples per gradient step
        :return: Monte Carlo estimate of KL(q || prior) after the fit
        """
        gaussian = _gaussian_moments(prior)
        if gaussian is None or not self._set_gaussian(*gaussian):
            _minimise_kl(self, prior, steps, n_samples)
        with torch.no_grad():
            phi, log_q = self.rsample_and_log_prob(1024)
            return float((log_q - prior_log_prob(prior, phi)).mean())

    @torch.no_grad()
    def _set_gaussian(self, mean: Tensor, covariance: Tensor) -> bool:
        r"""Make the flow :math:`\mathcal{N}(\mu, \Sigma)`, and say whether it is now.

        With the masked networks at zero only the last ActNorm, the LU layer and the flip of coordinates act:
        :math:`\phi = J L (D z + m)` with :math:`J \Sigma J = L D D L^\top`, L unit lower triangular and :math:`m = L^{-1} J \mu`.
        """
        layers = self.transform.transforms
        for layer in layers[1], layers[3]:
            _zero_output(layer)
        cholesky = torch.linalg.cholesky(covariance.flip(0, 1))
        scale = cholesky.diagonal()
        unit = cholesky / scale
        shift = torch.linalg.solve_triangular(unit, mean.flip(0)[:, None], upper=False, unitriangular=True)[:, 0]
        _set_act_norm(layers[0], torch.zeros_like(mean), torch.ones_like(mean))
        _set_act_norm(layers[2], shift, scale)
        layers[4]._0.copy_(unit)
        return True


class MeanField(EpistemicFlow):
    """The variational posterior without dependencies between coordinates: one affine layer."""

    @staticmethod
    def _layers(phi_dim: int, hidden_size: int) -> list[nn.Module]:
        return [_act_norm(phi_dim)]

    @torch.no_grad()
    def _set_gaussian(self, mean: Tensor, covariance: Tensor) -> bool:
        _set_act_norm(self.transform.transforms[0], mean, covariance.diagonal().sqrt())
        return torch.equal(covariance, covariance.diagonal().diag())


def make_epistemic_flow(phi_dim: int, prior: Distribution | None = None) -> EpistemicFlow:
    """The paper's flow, or mean field where it would cost more than the dependencies that it models are worth.

    :param phi_dim: number of coordinates of phi
    :param prior: prior over phi that psi is fitted to
    """
    return (EpistemicFlow if phi_dim <= MAX_FLOW_DIM else MeanField)(phi_dim, prior)


def _affine(shift: Tensor, log_scale: Tensor) -> Any:
    """Elementwise affine map of vectors."""
    return zuko.transforms.DependentTransform(zuko.transforms.MonotonicAffineTransform(shift, log_scale), 1)


def _act_norm(phi_dim: int) -> nn.Module:
    """Elementwise affine layer with free shift and log scale."""
    return zuko.lazy.UnconditionalTransform(_affine, torch.zeros(phi_dim), torch.zeros(phi_dim))


def _set_act_norm(layer: nn.Module, shift: Tensor, scale: Tensor) -> None:
    """Set the affine layer; zuko squashes the log scale to keep it between 1e-3 and 1e3, so the squashing is inverted here."""
    log_scale = scale.log()
    bound = -torch.log(torch.tensor(1e-3, dtype=scale.dtype))
    layer._0.copy_(shift)  # type: ignore[operator]
    layer._1.copy_(log_scale / (1 - (log_scale / bound).abs()))  # type: ignore[operator]


def _zero_output(layer: nn.Module) -> None:
    """Make a masked autoregressive layer the identity."""
    # For phi_dim = 1 zuko returns an elementwise layer without a network.
    output = layer.hyper[-1] if hasattr(layer, "hyper") else layer  # type: ignore[index]
    for parameter in output.parameters():  # type: ignore[union-attr]
        parameter.zero_()


def _invert(transform: Any, y: Tensor) -> Tensor:
    """Invert one layer; zuko solves the triangular systems once per sample, one solve for all is far faster."""
    if not isinstance(transform, zuko.transforms.LULinearTransform):
        return transform.inv(y)
    columns = y.reshape(-1, y.shape[-1]).T
    columns = torch.linalg.solve_triangular(transform.L, columns, upper=False)
    return torch.linalg.solve_triangular(transform.U, columns, upper=True, unitriangular=True).T.reshape(y.shape)


def _gaussian_moments(prior: Distribution) -> tuple[Tensor, Tensor] | None:
    """Mean and covariance of a Gaussian prior, ``None`` for any other."""
    base = prior.base_dist if isinstance(prior, Independent) else prior
    if isinstance(base, Normal):
        return base.mean, base.variance.diag()
    if isinstance(prior, MultivariateNormal):
        return prior.mean, prior.covariance_matrix
    return None


def _minimise_kl(flow: EpistemicFlow, prior: Distribution, steps: int, n_samples: int, lr: float = 1e-2) -> None:
    """Fit the flow to a prior by gradient descent on KL(q || prior)."""
    optimizer = torch.optim.Adam(flow.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        phi, log_q = flow.rsample_and_log_prob(n_samples)
        optimizer.zero_grad()
        (log_q - prior_log_prob(prior, phi)).mean().backward()
        optimizer.step()
        schedule.step()


def antithetic_noise(batch: tuple[int, ...], n: int, dim: int, like: Tensor) -> Tensor:
    """Standard normal noise (*batch, n, dim) in pairs z, -z.

    What is linear in phi cancels within a pair: the predictive mean that Q is pulled to is far less noisy for it.
    """
    noise = torch.randn(*batch, (n + 1) // 2, dim, device=like.device, dtype=like.dtype)
    return torch.cat((noise, -noise), dim=-2)[..., :n, :]
