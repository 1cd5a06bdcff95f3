"""The algorithm as the paper prints it, for reproduction: double sampling, the printed ELBO, a posterior for each episode and the
two-dimensional flow with a slice. The errata say why BEN does otherwise. No other module of the package knows of this one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import numpy as np
import torch as th
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.utils import update_learning_rate
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor, nn
from torch.func import functional_call, vmap

from sb3_ben.ben.ben import BEN
from sb3_ben.ben.learning import Batch, BellmanSamples, Estimate, FlowOperator, Seen, uncertainties
from sb3_ben.ben.objectives import masked_mean, negative_elbo
from sb3_ben.ben.policies import BENPolicy, Encoding, MlpGruPolicy
from sb3_ben.common.checks import check, check_choice
from sb3_ben.flows.aleatoric import ConditionalDensity, UncertainWeights, mlp, zero
from sb3_ben.flows.base import float_state, standard_normal_log_prob, zuko
from sb3_ben.flows.epistemic import EpistemicFlow, antithetic_noise
from sb3_ben.flows.spline import squash
from sb3_ben.history.replay import HistoryReplayBuffer
from sb3_ben.history.samples import HistoryReplaySamples

__all__ = ["PaperBEN", "SliceFlow", "StackedEpistemicFlow"]

#: of the posteriors of episodes: steps and hypotheses that fit them nearly as well as many more
BELIEF_STEPS, BELIEF_RATE, BELIEF_SAMPLES = 20, 3e-3, 32
#: by option and name, whether it is as printed
CHOICES = {
    "msbbe": {"double": True, "semi": False},
    "elbo": {"paper": True, "exact": False},
    "belief_scope": {"episode": True, "run": False},
}


# ---------------------------------------------------------------------- losses


def printed_normal_log_prob(z: Tensor) -> Tensor:
    r""":math:`-z^2 - \tfrac{1}{2} \log 2\pi`, without the half that belongs before the square."""
    return standard_normal_log_prob(z) - 0.5 * z.square()


def msbbe_double(q: Tensor, b1: Tensor, b2: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""The paper's residual-gradient estimator, :math:`(b_1 - q)(b_2 - q)`.

    For independent :math:`b_1, b_2`, each with its own hypothesis and noise, the expectation of the product is the squared
    expected error, and its gradient is unbiased: :math:`\mathbb{E}[\nabla (b_1 - q)(b_2 - q)] = \nabla (\mathbb{E}[b] - q)^2`.

    :param q: values Q(h_t, a_t) (...)
    :param b1: Bellman samples from the flows, in the units of q and with their gradients (...)
    :param b2: as many independent ones (...)
    :param mask: which entries count (...), all if not given
    """
    return masked_mean((b1 - q) * (b2 - q), mask)


# ---------------------------------------------------------------------- a posterior for each episode


class StackedEpistemicFlow(nn.Module):
    r"""One :class:`EpistemicFlow` per environment, evaluated together: the episodic belief.

    Every parameter has a leading dimension E. Row e is psi of environment e, and psi_0 is kept beside them for the resets.

    :param flow: the flow whose parameters are psi_0; it is copied
    :param n_envs: number of environments E
    """

    def __init__(self, flow: EpistemicFlow, n_envs: int) -> None:
        super().__init__()
        self.n_envs = n_envs
        self.phi_dim = flow.phi_dim
        self.initial = copy.deepcopy(flow).requires_grad_(False)
        keys = {name: name.replace(".", "__") for name, _ in self.initial.named_parameters()}  # a ParameterDict forbids dots
        rows = {keys[name]: value.expand(n_envs, *value.shape) for name, value in self.initial.named_parameters()}
        self.psi = nn.ParameterDict({key: nn.Parameter(value.clone()) for key, value in rows.items()})

    def forward(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Map noise to weights, each row with its own psi.

        :param noise: standard normal noise (E, n, d)
        :return: phi (E, n, d) and log q(phi) (E, n)
        """
        psi = {name: self.psi[name.replace(".", "__")] for name, _ in self.initial.named_parameters()}
        return vmap(lambda row, z: functional_call(self.initial, row, (z,)))(psi, noise)

    def rsample_and_log_prob(self, n: int) -> tuple[Tensor, Tensor]:
        """Draw n hypotheses for every environment: phi (E, n, d) and log q(phi) (E, n)."""
        return self(antithetic_noise((self.n_envs,), n, self.phi_dim, next(self.parameters())))

    @th.no_grad()
    def reset(self, mask: Tensor) -> None:
        """Copy psi_0 into the chosen rows (the optimiser has rows of its own: :meth:`RowAdam.reset`).

        :param mask: environments whose episode starts (E,)
        """
        for name, value in self.initial.named_parameters():
            self.psi[name.replace(".", "__")][mask.bool()] = value


class RowAdam(th.optim.Optimizer):
    """Adam for stacked parameters: each row counts its own steps, so that resetting a row gives a fresh Adam for it.

    ``th.optim.Adam`` shares one step count: with its moments zeroed late in a run, a row starts with steps thrice as long.

    :param params: parameters with a leading dimension E
    :param lr: learning rate
    :param betas: decay rates of the two moments
    :param eps: added to the root of the second moment
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @th.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, **{k: group[k] for k in ("lr", "betas", "eps")})

    def _update(self, parameter: Tensor, grad: Tensor, lr: float, betas: tuple[float, float], eps: float) -> None:
        state, (beta1, beta2) = self._state(parameter), betas
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
        scale = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(eps)
        parameter.sub_(lr * state["exp_avg"] / (1 - beta1 ** state["step"]) / scale)

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = parameter.new_zeros(len(parameter), *[1] * (parameter.dim() - 1))
            state["exp_avg"], state["exp_avg_sq"] = th.zeros_like(parameter), th.zeros_like(parameter)
        return state

    def reset(self, mask: Tensor) -> None:
        """Forget the moments and the step counts of the chosen rows.

        :param mask: rows to reset (E,)
        """
        for state in self.state.values():
            for value in state.values():
                value[mask.bool()] = 0.0


# ---------------------------------------------------------------------- the flow


class SliceFlow(ConditionalDensity):
    r"""The paper's own aleatoric flow: a two-dimensional inverse autoregressive flow, cut down to one dimension.

    Noise :math:`z \in \mathbb{R}^2` passes ``n_layers`` times through an inverse autoregressive transform, an LU linear map and a
    permutation; of the result v, :math:`b = \delta_\phi(c) + \mu(c) + \sigma(c) v_1` is kept and :math:`v_2` dropped. With a
    learned :math:`r(v_2 \mid v_1, c)` that lifts b back to two dimensions, there is only a lower bound of the log density,

    .. math:: \log p(b \mid c, \phi) + \log \sigma(c)
              \ge \mathbb{E}_{v_2 \sim r} [\log p(v_1, v_2 \mid c, \phi) - \log r(v_2 \mid v_1, c)],

    of which :meth:`log_prob` draws one sample. Mean and variance are estimated with stratified noise. The paper's Abs layers are
    left out: they forbid negative b. An option for comparison; :class:`AleatoricFlow` is exact and faster.

    :param context_dim: size C of the context
    :param phi_dim: number d of coordinates of phi
    :param hidden_size: width of the networks
    :param n_layers: number of autoregressive transforms
    :param activation: activation of the networks
    :param prior_spread: prior standard deviation of shift and tilt, in standard deviations of b
    :param prior_variance: variance of phi under the prior
    :param feature_scale: how fast the random features change with the context
    :param feature_dim: size of the part of the context that the random features are taken of, see :class:`ConditionalDensity`
    :param n_strata: strata per dimension of the noise
    :param seed: seed of the random features
    """

    def __init__(
        self,
        context_dim: int,
        phi_dim: int,
        hidden_size: int = 64,
        n_layers: int = 1,
        activation: type[nn.Module] = nn.SiLU,
        prior_spread: float = 0.5,
        prior_variance: float = 0.1,
        feature_scale: float = 2.0,
        feature_dim: int | None = None,
        n_strata: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__(context_dim, feature_dim)
        self.n_layers, self.n_strata = n_layers, n_strata
        self.trunk = nn.Sequential(mlp(context_dim, hidden_size, hidden_size, activation, zero_output=False), activation())
        self.affine = zero(nn.Linear(hidden_size, 2))
        self.lift = mlp(hidden_size + 1, hidden_size, 2, activation)
        blocks = [layer for _ in range(n_layers) for layer in _slice_layers(hidden_size, activation)]
        self.transform = zuko.lazy.LazyComposedTransform(*blocks)
        self.uncertain = UncertainWeights(feature_dim or context_dim, phi_dim, prior_spread, prior_variance, feature_scale, seed)
        float_state(self)

    def push(self, b: Tensor, context: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        shift, tilt = self.uncertain(self._fixed(context), phi)
        features, loc, log_scale = self._condition(context, shift)
        v1 = (b.unsqueeze(-1) - shift - loc) * th.exp(-log_scale)
        v2, log_r = self._sample_lift(v1, features)
        z, ladj = self.transform(features).inv.call_and_ladj(th.stack([v1, v2], -1))
        return (z - self._tilted(tilt)).transpose(-2, -3), (ladj - log_r - log_scale).mT

    def moments(self, context: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of b, each (*B, S, N), estimated with stratified noise."""
        noise = _stratified_noise(self.n_strata, phi)
        b = self._generate(context, phi, noise.view(-1, *[1] * max(context.dim(), phi.dim()), 2))
        return b.mean(-1), b.var(-1)

    def rsample(self, context: Tensor, phi: Tensor, n: int) -> Tensor:
        n_contexts, n_hypotheses = context.shape[-2], phi.shape[-2]
        batch = th.broadcast_shapes(context.shape[:-2], phi.shape[:-2])
        noise = th.randn(n, *batch, n_contexts, n_hypotheses, 2, dtype=phi.dtype, device=phi.device)
        return self._generate(context, phi, noise)

    def _generate(self, context: Tensor, phi: Tensor, noise: Tensor) -> Tensor:
        """Bellman samples (*B, S, N, n) from noise (n, *B, N, S, 2)."""
        shift, tilt = self.uncertain(self._fixed(context), phi)
        features, loc, log_scale = self._condition(context, shift)
        v1 = self.transform(features)(noise + self._tilted(tilt))[..., 0]
        return (shift + loc + th.exp(log_scale) * v1).mT.movedim(0, -1)

    def _tilted(self, tilt: Tensor) -> Tensor:
        """The tilt in two dimensions (..., 2): on the coordinate that the permutations carry to b."""
        pair = (tilt, th.zeros_like(tilt)) if self.n_layers % 2 == 0 else (th.zeros_like(tilt), tilt)
        return th.stack(pair, -1)

    def _condition(self, context: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features (*B, N, S, H), the same for all hypotheses, and location and log scale (*B, N, 1)."""
        features = self.trunk(self._learned(context))
        loc, log_scale = self.affine(features).split(1, -1)
        return features.unsqueeze(-2).expand(*shift.shape, -1), loc, squash(log_scale)

    def _sample_lift(self, v1: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """A sample of the dropped coordinate and its log density."""
        loc, log_scale = self.lift(th.cat([features, v1.unsqueeze(-1)], -1)).unbind(-1)
        noise, log_scale = th.randn_like(loc), squash(log_scale)
        return loc + th.exp(log_scale) * noise, standard_normal_log_prob(noise) - log_scale


def _slice_layers(context_dim: int, activation: type[nn.Module]) -> list[nn.Module]:
    """Autoregressive in the noise, so that samples take one pass; then LU linear and permutation."""
    return [
        zuko.flows.MaskedAutoregressiveTransform(2, context_dim, hidden_features=[context_dim], activation=activation),
        zuko.lazy.UnconditionalTransform(zuko.transforms.LULinearTransform, th.eye(2)),
        zuko.lazy.UnconditionalTransform(zuko.transforms.PermutationTransform, th.tensor([1, 0]), buffer=True),
    ]


def _stratified_noise(n_strata: int, like: Tensor) -> Tensor:
    """Normal noise (n_strata^2, 2) with one point in each cell of a grid of equal probabilities."""
    cells = th.cartesian_prod(*[th.arange(n_strata, dtype=like.dtype, device=like.device)] * 2)
    uniform = (cells + th.rand_like(cells)) / n_strata
    return th.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))


# ---------------------------------------------------------------------- the algorithm


class EpisodeReplayBuffer(HistoryReplayBuffer):
    """Replay of the running episodes alone."""

    def running_episodes(self, env: VecNormalize | None = None) -> HistoryReplaySamples:
        """The newest episode of every environment, or its last ``sequence_length`` steps.

        :param env: associated ``VecNormalize``, to normalise observations and rewards
        """
        envs = np.arange(self.n_envs)
        newest = np.full(self.n_envs, self.n_added - 1)
        starts, lengths = self._windows(newest, envs, np.full(self.n_envs, self.sequence_length - 1))
        return self._get_histories(starts, lengths, envs, env)


class PaperOperator(FlowOperator):
    """Both flows as printed.

    :param policy: the policy
    :param n_samples: number of hypotheses in each gradient step
    :param beliefs: a posterior for each environment's episode, ``None`` for one over all
    :param doubles: whether the MSBBE is estimated by double sampling
    :param printed: whether the ELBO is the printed one
    """

    def __init__(
        self, policy: BENPolicy, n_samples: int, beliefs: StackedEpistemicFlow | None, doubles: bool, printed: bool
    ) -> None:
        super().__init__(policy, n_samples)
        self.beliefs, self.doubles, self.printed = beliefs, doubles, printed

    @property
    def posterior(self) -> Any:
        return super().posterior if self.beliefs is None else self.beliefs

    def arrange(self, histories: HistoryReplaySamples, encoding: Encoding, samples: BellmanSamples, seen: Seen) -> Batch:
        """A row of transitions ``(E, T, ...)`` for each environment's own posterior, or one for all."""
        if self.beliefs is None:
            return super().arrange(histories, encoding, samples, seen)
        encoding = encoding.map(lambda part: part[:-1].transpose(0, 1))
        actions, b, gaps, mask = (part.transpose(0, 1) for part in (histories.actions, *samples, histories.mask))
        q = encoding.q_values.gather(-1, actions[..., None])[..., 0]
        return Batch(self.policy.context(encoding, actions), q, b, gaps, mask, mask)

    def density(self, b: Tensor, context: Tensor, phi: Tensor, with_moments: bool) -> tuple[Tensor, Any]:
        if not self.printed:
            return super().density(b, context, phi, with_moments)
        z, ladj = self.policy.aleatoric.push(b, context, phi)
        with th.no_grad():
            moments = self.policy.aleatoric.moments(context, phi) if with_moments else None
        return printed_normal_log_prob(z).sum(-1) + ladj, moments

    def negative_elbo(self, log_likelihood: Tensor, log_prior: Tensor, log_q: Tensor, *args: Any) -> Tensor:
        """Without the entropy where it is the printed one: its minimiser is a point."""
        return negative_elbo(log_likelihood, log_prior, th.zeros_like(log_q) if self.printed else log_q, *args)

    def msbbe(self, batch: Batch, estimate: Estimate) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.doubles:
            return super().msbbe(batch, estimate)
        aleatoric, (_, logs) = self.policy.aleatoric, uncertainties(self.policy, estimate, batch.mask)
        with th.no_grad():
            other, _ = self.posterior.rsample_and_log_prob(1)
        # the ELBO sees q_t as a mere input; here the gradient of the samples with respect to it is what the paper is about
        before, _, after = batch.context.tensor_split([aleatoric.context_dim - 1, aleatoric.context_dim], -1)
        context = th.cat((before, batch.q[..., None], after), -1)
        aleatoric.requires_grad_(False)  # the MSBBE is minimised over Q alone: flows that followed it would predict what Q wants
        b1, b2 = (aleatoric.rsample(context, one, 1)[..., 0, :, 0] for one in (estimate.phi[..., :1, :], other))
        aleatoric.requires_grad_(True)
        return msbbe_double(batch.q, b1, b2, batch.mask), logs


class SliceGruPolicy(MlpGruPolicy):
    """With the paper's recurrent cell and its own aleatoric flow."""

    aleatoric_class = SliceFlow


class PaperBEN(BEN):
    """BEN as printed; each of the three arguments can be set back to what BEN does.

    :param args: arguments of :class:`~sb3_ben.ben.ben.BEN`
    :param msbbe: ``"double"`` for the paper's double sampling, ``"semi"`` for semi-gradients to the predictive mean
    :param elbo: ``"paper"`` for the printed ELBO, whose posterior collapses, or ``"exact"``
    :param belief_scope: ``"episode"``: each environment has a posterior of its own, reset to the prior when an episode begins and
        fitted to that episode alone; ``"run"``: one posterior over all transitions
    :param kwargs: keyword arguments of :class:`~sb3_ben.ben.ben.BEN`, of which
        ``n_posterior_steps`` is 20 with a posterior for each episode, unless given
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        **BEN.policy_aliases,
        "SliceGruPolicy": SliceGruPolicy,
    }
    operator: PaperOperator

    def __init__(
        self,
        *args: Any,
        msbbe: str = "double",
        elbo: str = "paper",
        belief_scope: str = "episode",
        _init_setup_model: bool = True,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("n_posterior_steps", BELIEF_STEPS if CHOICES["belief_scope"].get(belief_scope) else 1)
        super().__init__(*args, **kwargs, _init_setup_model=False)  # type: ignore[misc]
        self.msbbe, self.elbo, self.belief_scope = msbbe, elbo, belief_scope
        self._is_behind = False  # of the steps that were made, until the next gradient step
        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        for name, table in CHOICES.items():
            check_choice(name, getattr(self, name), table)
        doubles, printed, self.by_episode = (table[getattr(self, name)] for name, table in CHOICES.items())
        self.replay_buffer_class = self.replay_buffer_class or EpisodeReplayBuffer
        super()._setup_model()
        check(self.operator.has_flows, "What is printed has flows: leave `bellman` as it is, and exact models to BEN")
        if self.by_episode:
            is_fit = isinstance(self.replay_buffer, EpisodeReplayBuffer) and self.known.simulations is None
            check(is_fit, "Posteriors of episodes see running ones alone: they need an EpisodeReplayBuffer, and no simulations")
        self.beliefs = StackedEpistemicFlow(self.policy.epistemic, self.n_envs).to(self.device)
        self.beliefs_optimizer = RowAdam(self.beliefs.psi.parameters(), lr=BELIEF_RATE)
        self.operator = PaperOperator(
            self.policy, self.n_phi_samples, self.beliefs if self.by_episode else None, doubles, printed
        )

    def _sample_action(
        self, learning_starts: int, action_noise: ActionNoise | None = None, n_envs: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.by_episode:
            starts = th.as_tensor(self._last_episode_starts, device=self.device)
            if self._is_behind and self._n_updates > 0 and starts.any():
                self.train(1, self.batch_size)  # the last transitions of an episode count before its posterior is forgotten
            self.beliefs.reset(starts)
            self.beliefs_optimizer.reset(starts)
        return super()._sample_action(learning_starts, action_noise, n_envs)

    def _see_step(self, *args: Any) -> None:
        super()._see_step(*args)
        self._is_behind = True

    def replay(self, batch_size: int) -> HistoryReplaySamples:
        """Replayed histories, or the running episodes where each has a posterior of its own."""
        if not self.by_episode:
            return super().replay(batch_size)
        return cast(EpisodeReplayBuffer, self.replay_buffer).running_episodes(self._vec_normalize_env)

    def fit_posterior(self, batch: Batch) -> None:
        """Algorithm 3: N_posterior steps on the ELBO, for the posteriors of the running episodes alone where there are such."""
        if not self.by_episode:
            return super().fit_posterior(batch)
        batch = batch._replace(context=batch.context.detach())
        for left in np.linspace(1, 0, self.n_posterior_steps, endpoint=False):  # ever smaller steps: their noise averages out
            update_learning_rate(self.beliefs_optimizer, BELIEF_RATE * left)
            self.beliefs_optimizer.zero_grad()
            self.operator.estimate(batch, with_moments=False, n_samples=BELIEF_SAMPLES).negative_elbo.backward()
            self.beliefs_optimizer.step()

    def train(self, gradient_steps: int, batch_size: int = 16) -> None:
        super().train(gradient_steps, batch_size)
        self._is_behind = False

    def _state(self) -> dict[str, Any]:
        beliefs = {"flows": self.beliefs.state_dict(), "optimizer": self.beliefs_optimizer.state_dict()}
        return super()._state() | {"beliefs": beliefs}

    def _set_state(self, state: dict[str, Any]) -> None:
        super()._set_state(state)
        self.beliefs.load_state_dict(state["beliefs"]["flows"])
        self.beliefs_optimizer.load_state_dict(state["beliefs"]["optimizer"])

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "beliefs", "beliefs_optimizer"]
