"""A belief about search and rescue that is learned from the rewards of doors opened at random, in place of the exact filter.

What is remembered of an episode is given: sums over listens of products of what was heard and where (see
:mod:`sb3_ben.oracles.rescue_filter`), and which doors were opened. What these sums say about the doors has to be learned: the
network knows neither where the doors are nor how readings depend on distances, nor the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm  # type: ignore[import-untyped]

from sb3_ben.envs.search_and_rescue import LISTEN, NO_DOOR, SearchAndRescueConfig, SearchAndRescueVecEnv
from sb3_ben.oracles.rescue_filter import Door, FilterState, RescueFilter
from sb3_ben.oracles.rescue_prior import RescueBelief, config_of
from sb3_ben.priors import Prior

__all__ = [
    "EvidenceNetwork",
    "LearnFromOpenings",
    "LearnedRescueBelief",
    "Openings",
    "learned_belief",
    "learned_filter",
    "random_openings",
    "unlearned_filter",
]

NOTHING, VICTIM, HAZARD = range(3)
SMALLEST = 1e-4  # probability
CUT_OFF = -25.0  # log-likelihoods further below the largest count as this: of no weight, and faster to compute
N_EXCLUSIONS = 2  # rounds in which entities make room for each other


def learned_filter(env: VecEnv, progress_bar: bool | None = None, **kwargs: Any) -> Prior:
    """A belief learned from random actions in simulated worlds, for ``BEN(prior=learned_filter)``.

    :param env: environments like which worlds are simulated
    :param progress_bar: whether to show a progress bar; by default if there is a terminal to show it on
    :param kwargs: further arguments of :func:`learned_belief`
    """
    return Prior(belief=learned_belief(config_of(env), progress_bar=progress_bar, **kwargs))


def learned_belief(
    config: SearchAndRescueConfig,
    n_episodes: int = 80_000,
    n_steps: int = 15_000,
    n_anchors: int = 16,
    progress_bar: bool | None = False,
) -> LearnedRescueBelief:
    """A belief learned from random actions in simulated worlds.

    :param config: the arguments of the environment
    :param n_episodes: number of simulated episodes of 60 steps
    :param n_steps: number of gradient steps on what was found
    :param n_anchors: anchors for each door, see :class:`EvidenceNetwork`
    :param progress_bar: whether to show a progress bar; ``None``: if there is a terminal
    """
    belief = LearnedRescueBelief(config, n_anchors)
    openings = random_openings(config, n_episodes, seed=np.random.randint(2**31))
    belief.fit(openings, n_steps, learning_rate=3e-2, progress_bar=progress_bar)
    return belief


def unlearned_filter(env: VecEnv, n_anchors: int = 4) -> Prior:
    """The same with nothing learned yet, for :class:`LearnFromOpenings`, which sees less: fewer anchors do not overfit."""
    return Prior(belief=LearnedRescueBelief(config_of(env), n_anchors))


class Openings(NamedTuple):
    """Doors opened for the first time.

    :param heard: what had been heard of each entity, ``(n, n_entities, 4, 4)``
    :param doors: the :class:`~sb3_ben.oracles.rescue_filter.Door` codes before, ``(n, n_doors)``
    :param gone: which victims were known to be rescued, ``(n, n_entities)``
    :param opened: the doors that were opened, ``(n,)``
    :param found: 0 for nothing, 1 for a victim, 2 for a hazard, ``(n,)``
    """

    heard: np.ndarray
    doors: np.ndarray
    gone: np.ndarray
    opened: np.ndarray
    found: np.ndarray


def random_openings(config: SearchAndRescueConfig, n_episodes: int, n_steps: int = 60, seed: int = 0) -> Openings:
    """What doors hold, from episodes of random actions.

    :param config: the arguments of the environment
    :param n_episodes: number of episodes, all side by side
    :param n_steps: steps of each
    :param seed: seed of worlds and actions
    """
    belief = RescueBelief(config, n_points=1)  # its memory is used, not its quadrature
    rng = np.random.default_rng(seed)
    arguments = {name: value for name, value in vars(config).items() if name != "horizon"}
    worlds = SearchAndRescueVecEnv(n_episodes, horizon=n_steps + 1, **arguments)
    worlds.seed(seed)
    first = np.asarray(worlds.reset())
    state = belief.filter.update(belief.filter.initial(n_episodes), first, np.full(n_episodes, -1), np.zeros(n_episodes))
    parts: list[Openings] = []
    for _ in range(n_steps):
        actions = rng.integers(LISTEN + 1, size=n_episodes)
        observations, rewards, _, _ = worlds.step(actions)
        parts.append(first_openings(belief.filter, state, actions, rewards))
        state = belief.filter.update(state, np.asarray(observations), actions, rewards)
    return join_openings(parts)


def first_openings(rescue_filter: RescueFilter, state: FilterState, actions: np.ndarray, rewards: np.ndarray) -> Openings:
    """The doors that actions opened for the first time.

    :param rescue_filter: the filter whose state follows
    :param state: what was known before the actions
    :param actions: actions ``(n_envs,)``
    :param rewards: rewards ``(n_envs,)``
    """
    config = rescue_filter.config
    opened = rescue_filter.opened_door(state.position, actions)
    is_first = (opened != NO_DOOR) & (state.doors[np.arange(len(actions)), opened] == Door.UNOPENED)
    found = np.select([rewards == config.reward_victim, rewards == config.reward_hazard], [VICTIM, HAZARD], NOTHING)
    heard, doors, gone = (part[is_first].astype(np.float32) for part in (state.heard, state.doors, state.gone))
    return Openings(heard, doors, gone, opened[is_first], found[is_first])


def join_openings(parts: Sequence[Openings]) -> Openings:
    return Openings(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class EvidenceNetwork(nn.Module):
    r"""What is behind each door, from sums of evidence about each entity.

    An entity is compared with ``n_anchors`` anchors for each door: the log-likelihood of anchor k is a quadratic form of all that
    was heard, :math:`b_k - \frac{1}{2} \phi_k^\top (\sum z z^\top) \phi_k`, with learned :math:`\phi_k`, the same for all
    entities. Among the doors that can still be its own, an entity is behind one in proportion to the sum over its anchors, and to
    the probability that no other entity is there. A small network makes probabilities of the sums over entities.

    :param config: the arguments of the environment
    :param n_anchors: anchors for each door
    """

    is_victim: th.Tensor
    units: th.Tensor

    def __init__(self, config: SearchAndRescueConfig, n_anchors: int = 8) -> None:
        super().__init__()
        self.anchors = nn.Parameter(0.5 * th.randn(config.n_doors, n_anchors, 4))
        self.bias = nn.Parameter(th.zeros(config.n_doors, n_anchors))
        self.correction = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 3))
        for parameter in self.correction[-1].parameters():
            nn.init.zeros_(parameter)
        self.register_buffer("is_victim", (th.arange(config.n_entities) < config.n_victims).float())
        half = max(config.half, 1)
        self.register_buffer("units", th.tensor([0.5, 1 / half, 1 / half, 1.0]))

    def forward(self, heard: th.Tensor, doors: th.Tensor, gone: th.Tensor) -> th.Tensor:
        """Log probabilities of nothing, a victim and a hazard, ``(n, n_doors, 3)``; arguments as in :class:`Openings`."""
        places = self._places(heard * self.units[:, None] * self.units, doors)
        kinds = (self.is_victim * (1 - gone), (1 - self.is_victim).expand_as(gone))
        counts = [(places * one[..., None]).sum(dim=1) for one in kinds]
        victims, hazards = (count.clamp(SMALLEST, 1 - SMALLEST) for count in counts)
        nobody = (1 - victims - hazards).clamp_min(10 * SMALLEST)
        logs = th.stack((nobody, victims, hazards), dim=-1).log()
        others = th.stack((victims, hazards, victims + hazards, victims * hazards), dim=-1)
        return (logs + self.correction(th.cat((logs / 4, others), dim=-1))).log_softmax(dim=-1)

    def _places(self, heard: th.Tensor, doors: th.Tensor) -> th.Tensor:
        """Probability that each entity is behind each door, ``(n, n_entities, n_doors)``."""
        forms = (self.anchors[..., :, None] * self.anchors[..., None, :]).flatten(-2)
        sums = heard.reshape(1, -1, forms.shape[-1]).expand(forms.shape[1], -1, -1)
        # anchors first: sums over a short last dimension took most of the time
        by_anchor = th.baddbmm(self.bias.T[:, None], sums, forms.permute(1, 2, 0), alpha=-0.5)
        scores = _LogSumExp.apply(by_anchor).view(*heard.shape[:2], -1)
        unopened = doors == Door.UNOPENED
        allowed = [unopened | (doors == code) for code in (Door.HAZARD, Door.RESCUED)]
        impossible = ~th.stack(allowed, dim=1)[:, self.is_victim.long()]
        scores = scores.masked_fill(impossible, -1e9)
        scores = (scores - scores.detach().amax(dim=-1, keepdim=True)).clamp_min(CUT_OFF)
        places = scores.softmax(dim=-1)
        for _ in range(N_EXCLUSIONS):  # a door that is another entity's is not free
            free = (1 - places.clamp(max=1 - SMALLEST)).log()
            places = (scores + free.sum(dim=1, keepdim=True) - free).softmax(dim=-1)
        return places


class LearnedRescueBelief(RescueBelief):
    """As :class:`~sb3_ben.oracles.rescue_prior.RescueBelief`, with the meaning of what was heard learned from random openings.

    :param config: the arguments of the environment
    :param n_anchors: anchors for each door, see :class:`EvidenceNetwork`
    """

    def __init__(self, config: SearchAndRescueConfig, n_anchors: int = 8) -> None:
        self.network = EvidenceNetwork(config, n_anchors)
        self.experience: list[Openings] = []  # of an agent that has not learned from it yet, see LearnFromOpenings
        super().__init__(config, n_points=1)

    def fit(
        self, data: Openings, n_steps: int, batch_size: int = 256, learning_rate: float = 1e-2, progress_bar: bool | None = False
    ) -> float:
        """Maximise the likelihood of what was found behind opened doors.

        :param data: opened doors
        :param n_steps: number of gradient steps
        :param batch_size: doors in each of them
        :param learning_rate: learning rate, reduced linearly
        :param progress_bar: whether to show a progress bar; ``None``: if there is a terminal
        :return: mean negative log-likelihood of the last tenth of the steps
        """
        optimizer = th.optim.Adam(self.network.parameters(), lr=learning_rate, fused=True)
        schedule = th.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, n_steps)
        losses = []
        for _ in tqdm(range(n_steps), "learning a belief", disable=None if progress_bar is None else not progress_bar):
            rows = np.random.randint(len(data.found), size=batch_size)
            loss = self._loss(Openings(*(part[rows] for part in data)))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), 10.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        self._prior = self._probabilities(self.filter.initial(1))
        return float(np.mean(losses[-max(n_steps // 10, 1) :]))

    @th.no_grad()
    def score(self, data: Openings) -> float:
        """Mean negative log-likelihood of what was found behind doors."""
        return float(self._loss(data))

    def _loss(self, data: Openings) -> th.Tensor:
        logs = self._evaluate(data.heard, data.doors, data.gone)
        at_door = logs[th.arange(len(logs)), th.as_tensor(data.opened)]
        return F.nll_loss(at_door, th.as_tensor(data.found, dtype=th.long))

    def _evaluate(self, *parts: np.ndarray) -> th.Tensor:
        return self.network(*(th.as_tensor(part, dtype=th.float32) for part in parts))

    @th.no_grad()
    def _probabilities(self, state: FilterState) -> np.ndarray:
        found = self._evaluate(state.heard, state.doors, state.gone)[..., 1:].exp().numpy().astype(float)
        found[state.doors != Door.UNOPENED] = 0.0
        found[state.doors == Door.HAZARD, 1] = 1.0
        return found


class _LogSumExp(th.autograd.Function):
    """The logarithm of the sum of exponentials over the first dimension.

    torch's own function takes all exponentials twice, the second time for the gradient, and ten times as long for large negative
    numbers, which most of them are once something has been learned.
    """

    @staticmethod
    def forward(ctx: Any, x: th.Tensor) -> th.Tensor:
        largest = x.amax(dim=0)
        shares = (x - largest).clamp_min_(CUT_OFF).exp_()
        total = shares.sum(dim=0)
        ctx.save_for_backward(shares, total)
        return largest + total.log()

    @staticmethod
    def backward(ctx: Any, gradient: th.Tensor) -> th.Tensor:
        shares, total = ctx.saved_tensors
        return shares * (gradient / total)


class LearnFromOpenings(BaseCallback):
    """Teaches the belief of an agent, a :class:`LearnedRescueBelief`, what the agent itself found behind doors: no simulations.

    What is replayed is read again each time the belief has learned. Up to the first time it says nothing, so ``learning_starts``
    should be a little later, and the agent begin with random actions.

    :param fit_at: numbers of environment steps after which the belief is fitted to all that was found
    :param n_steps: gradient steps of each fit
    :param learning_rate: learning rate of each fit, reduced linearly
    """

    def __init__(self, fit_at: Sequence[int], n_steps: int = 4000, learning_rate: float = 3e-2) -> None:
        super().__init__()
        self.fit_at, self.n_steps, self.learning_rate = sorted(fit_at), n_steps, learning_rate

    def _on_training_start(self) -> None:
        belief = self.model.known.belief  # type: ignore[attr-defined]
        if not isinstance(belief, LearnedRescueBelief):
            raise ValueError(f"LearnFromOpenings needs an agent with a LearnedRescueBelief, this one has {belief!r}")
        self.belief = belief
        believed = self.model._believed  # type: ignore[attr-defined]
        state = belief.filter.initial(self.model.n_envs) if believed is None else believed.state
        starts = np.asarray(self.model._last_episode_starts)
        self._before = self._restarted(state, np.asarray(self.model._last_obs), starts)

    def _on_step(self) -> bool:
        found = first_openings(self.belief.filter, self._before, self.locals["actions"], self.locals["rewards"])
        last_time = self.fit_at[-1]
        if self.num_timesteps <= last_time:
            self.belief.experience.append(found)
        step = self.training_env.num_envs
        if any(self.num_timesteps - step < time <= self.num_timesteps for time in self.fit_at):
            self._fit()
            if self.num_timesteps >= last_time:
                self.belief.experience.clear()
        after = self.model._believed.state  # type: ignore[attr-defined]
        self._before = self._restarted(after, self.locals["new_obs"], self.locals["dones"])
        return True

    def _fit(self) -> None:
        data = join_openings(self.belief.experience)
        loss = self.belief.fit(data, self.n_steps, learning_rate=self.learning_rate)
        self.logger.record("belief/n_openings", len(data.found))
        self.logger.record("belief/loss", loss)
        self.model.refresh_beliefs()  # type: ignore[attr-defined]

    def _restarted(self, state: Sequence[np.ndarray], observations: np.ndarray, starts: np.ndarray) -> FilterState:
        """States before the next action, of which some episodes have just begun."""
        first = self.belief.filter.initial(len(observations))._replace(position=np.asarray(observations)[:, :2].astype(float))
        return FilterState(
            *(np.where(starts.reshape(-1, *[1] * (new.ndim - 1)), new, old) for new, old in zip(first, state[:4], strict=True))
        )
