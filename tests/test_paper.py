"""The algorithm as printed: what its parts are, exactly, and that they fit into BEN."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sb3_ben import make_vec
from sb3_ben.ben.paper import (
    PaperBEN,
    PaperOperator,
    RowAdam,
    SliceFlow,
    StackedEpistemicFlow,
    msbbe_double,
    printed_normal_log_prob,
)
from sb3_ben.flows.aleatoric import AleatoricFlow
from sb3_ben.flows.epistemic import EpistemicFlow
from tests.test_ben import TINY
from tests.test_flows import CONTEXT_DIM, PHI_DIM, random_inputs, shaken
from tests.test_objectives import fit_linear_model, linear_problem

AS_BEN: dict[str, Any] = {"msbbe": "semi", "elbo": "exact", "belief_scope": "run"}


def tiny(policy: str = "MlpGruPolicy", n_envs: int = 2, **kwargs: Any) -> PaperBEN:
    return PaperBEN(policy, make_vec("Tiger-v0", n_envs, seed=0), **{**TINY, **kwargs})


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def test_double_sampling_is_unbiased() -> None:
    """b depends on q and takes three values: all nine pairs can be listed."""
    probabilities, slopes = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.5, -1.0, 2.0])

    def samples(q: Tensor) -> Tensor:
        return torch.tensor([1.0, -2.0, 0.5]) + slopes * q.square()

    def exact(q: Tensor) -> Tensor:
        return ((probabilities * samples(q)).sum() - q).square()

    q = torch.tensor(0.7, requires_grad=True)
    b = samples(q)
    terms = [probabilities[i] * probabilities[j] * msbbe_double(q, b[i], b[j]) for i in range(3) for j in range(3)]
    (gradient,) = torch.autograd.grad(sum(terms), q, retain_graph=True)  # type: ignore[arg-type]
    (expected,) = torch.autograd.grad(exact(q), q, retain_graph=True)
    difference = (exact(torch.tensor(0.701)) - exact(torch.tensor(0.699))) / 0.002
    torch.testing.assert_close(gradient, expected)
    assert gradient.item() == pytest.approx(difference.item(), rel=1e-2)
    single = [probabilities[i] * msbbe_double(q, b[i], b[i]) for i in range(3)]
    (biased,) = torch.autograd.grad(sum(single), q)  # type: ignore[arg-type]
    assert abs(biased - expected) > 0.1


def test_double_sampling_through_the_flow() -> None:
    """With one sample for each of many pairs the mean is that of the exact squared error."""
    flow, context, phi = AleatoricFlow(3, 4), torch.randn(1, 3), torch.randn(2, 4)
    q = torch.tensor(0.3)
    b1, b2 = (flow.sample(context, phi, 50_000).transpose(0, 2).flatten() for _ in range(2))
    shuffled = b2[torch.randperm(len(b2))]
    exact = (flow.mean(context, phi).mean() - q).square()
    assert msbbe_double(q, b1, shuffled).item() == pytest.approx(exact.item(), abs=0.05)


def test_printed_elbo_collapses() -> None:
    features, b, mean, covariance = linear_problem()
    operator = PaperOperator(None, 0, None, doubles=False, printed=True)  # type: ignore[arg-type]  # of which only this is asked
    belief = fit_linear_model(features, b, 0.5, steps=500, loss=operator.negative_elbo)
    with torch.no_grad():
        phi, _ = belief.rsample_and_log_prob(1000)
    torch.testing.assert_close(phi.mean(0), mean, atol=0.05, rtol=0)
    assert (phi.std(0) / covariance.diagonal().sqrt()).max() < 0.2


def test_printed_density_lacks_the_half() -> None:
    flow = AleatoricFlow(CONTEXT_DIM, PHI_DIM)
    b, context, phi = torch.randn(5), torch.randn(5, CONTEXT_DIM), torch.zeros(1, PHI_DIM)
    z, ladj = flow.push(b, context, phi)
    difference = flow.log_prob(b, context, phi) - (printed_normal_log_prob(z).sum(-1) + ladj)
    torch.testing.assert_close(difference[0], 0.5 * b.square())


@torch.no_grad()
def test_slice_flow_is_a_lower_bound() -> None:
    """With one layer b is, given the first noise coordinate, Gaussian: the density is a one-dimensional integral."""
    flow = SliceFlow(CONTEXT_DIM, PHI_DIM, hidden_size=16).double()
    shaken(flow, 0.2)
    context, phi = random_inputs(1, 1)
    samples = flow.sample(context, phi, 200_000)[0, 0]
    mean, variance = flow.moments(context, phi)
    assert mean.item() == pytest.approx(samples.mean().item(), abs=0.15)
    assert variance.item() == pytest.approx(samples.var().item(), rel=0.5)
    b = torch.linspace(-8, 8, 81).double() * samples.std() + samples.mean()
    bound = torch.stack([flow.log_prob(b, context.expand(81, -1), phi)[0] for _ in range(400)])
    assert torch.trapezoid(bound.mean(0).exp(), b) <= 1.0
    # averaging the weights instead of their logarithms gives the density itself
    assert torch.trapezoid(bound.exp().mean(0), b).item() == pytest.approx(1.0, abs=0.1)


def test_batch_dimensions_of_the_slice_flow() -> None:
    flow = SliceFlow(CONTEXT_DIM, PHI_DIM, hidden_size=16)
    shaken(flow, 0.1)
    context, phi, b = torch.randn(4, 5, CONTEXT_DIM), torch.randn(4, 3, PHI_DIM), torch.randn(4, 5)
    assert flow.log_prob(b, context, phi).shape == (4, 3, 5)
    assert flow.mean(context[0], phi).shape == (4, 3, 5)
    assert flow.sample(context, phi[0], 7).shape == (4, 3, 5, 7)


def stacked_and_singles(n_envs: int = 3, phi_dim: int = 6) -> tuple[StackedEpistemicFlow, list[EpistemicFlow]]:
    """A stack with different rows, and a single flow for each of them."""
    stack = StackedEpistemicFlow(EpistemicFlow(phi_dim), n_envs)
    shaken(stack.psi, 0.1)
    singles = [copy.deepcopy(stack.initial).requires_grad_(True) for _ in range(n_envs)]
    with torch.no_grad():
        for i, single in enumerate(singles):
            for name, parameter in single.named_parameters():
                parameter.copy_(stack.psi[name.replace(".", "__")][i])
    return stack, singles


def test_stack_equals_single_flows() -> None:
    stack, singles = stacked_and_singles()
    noise = torch.randn(3, 10, 6)
    phi, log_q = stack(noise)
    (phi.square().sum() + log_q.sum()).backward()
    for i, single in enumerate(singles):
        phi_i, log_q_i = single(noise[i])
        torch.testing.assert_close(phi[i], phi_i)
        torch.testing.assert_close(log_q[i], log_q_i)
        (phi_i.square().sum() + log_q_i.sum()).backward()
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(stack.psi[name.replace(".", "__")].grad[i], parameter.grad, atol=1e-4, rtol=1e-4)


def test_row_adam_equals_adam_and_forgets_rows() -> None:
    start, targets = torch.randn(3, 4), torch.randn(3, 4)

    def run(optimizer_class: type[torch.optim.Optimizer], row: int, steps: int) -> Tensor:
        parameter = nn.Parameter(start[row : row + 1].clone())
        optimizer = optimizer_class([parameter], lr=0.1)  # type: ignore[call-arg]
        descend(parameter, targets[row : row + 1], optimizer, steps)
        return parameter.detach()[0]

    parameter = nn.Parameter(start.clone())
    optimizer = RowAdam([parameter], lr=0.1)
    descend(parameter, targets, optimizer, 7)
    torch.testing.assert_close(parameter.detach()[1], run(torch.optim.Adam, 1, 7))
    mask = torch.tensor([True, False, True])
    optimizer.reset(mask)
    with torch.no_grad():
        parameter[mask] = start[mask]
    descend(parameter, targets, optimizer, 5)
    for row, steps in ((0, 5), (1, 12), (2, 5)):
        torch.testing.assert_close(parameter.detach()[row], run(torch.optim.Adam, row, steps))


def descend(parameter: nn.Parameter, target: Tensor, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (parameter - target).pow(4).sum().backward()
        optimizer.step()


def test_reset_of_rows() -> None:
    stack, singles = stacked_and_singles()
    stack.reset(torch.tensor([True, False, True]))
    noise = torch.randn(1, 10, 6).expand(3, -1, -1)
    phi, _ = stack(noise)
    initial, _ = stack.initial(noise[0])
    torch.testing.assert_close(phi[0], initial)
    torch.testing.assert_close(phi[2], initial)
    torch.testing.assert_close(phi[1], singles[1](noise[1])[0])


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {**AS_BEN, "msbbe": "double"},
        {**AS_BEN, "elbo": "paper"},
        {**AS_BEN, "belief_scope": "episode"},
        {"n_posterior_steps": 2},
        {"policy": "SliceGruPolicy"},
        {**AS_BEN, "policy": "SliceGruPolicy"},
    ],
)
def test_options_learn_are_saved_and_loaded(kwargs: dict[str, Any], tmp_path: Path) -> None:
    model = tiny(n_envs=4, **kwargs)
    before = [values.clone() for values in model.q_net.parameters()]
    model.learn(160)
    assert not any(torch.equal(old, new) for old, new in zip(before, model.q_net.parameters(), strict=True))
    assert all(torch.isfinite(values).all() for values in model.policy.parameters())
    model.save(tmp_path / "model")
    loaded = PaperBEN.load(tmp_path / "model", env=model.get_env())
    assert (loaded.msbbe, loaded.elbo, loaded.belief_scope) == (model.msbbe, model.elbo, model.belief_scope)
    pairs = zip(model.policy.parameters(), loaded.policy.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", list(AS_BEN))
def test_unknown_options(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        tiny("MlpGruPolicy", 2, **{name: "best"})


def test_without_flows_nothing_is_printed() -> None:
    with pytest.raises(ValueError, match="bellman"):
        tiny(bellman="point")


def test_double_sampling_moves_values_and_no_flows() -> None:
    model = tiny(**{**AS_BEN, "msbbe": "double"}).learn(60)
    batch = model.operator.evaluate(model.replay(8), model.rule, model.seen)
    model.policy.zero_grad()
    operator = model.operator
    assert isinstance(operator, PaperOperator)
    operator.msbbe(batch, operator.estimate(batch))[0].backward()
    assert all(part.grad is None for part in model.policy.aleatoric.parameters())
    assert all(part.requires_grad for part in model.policy.aleatoric.parameters())
    gradient = next(model.q_net.parameters()).grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


def test_running_episodes() -> None:
    model = tiny(n_envs=3, learning_starts=1000).learn(3 * 8)
    histories = model.replay(8)
    assert histories.mask.shape == (5, 3)  # the last five of eight steps
    assert np.array_equal(histories.actions.numpy(), model.replay_buffer.actions[3:8, :, 0])


def test_double_sampling_keeps_the_elbo_out_of_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient of the ELBO reaches the head of Q. That of the double samples does, also through q in the flow's context."""
    model = tiny(**{**AS_BEN, "msbbe": "double"}).learn(60)
    with torch.no_grad():
        for parameter in model.policy.aleatoric.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # or b would not depend on q yet
    batch, operator = model.operator.evaluate(model.replay(8), model.rule, model.seen), model.operator
    head, estimate = model.policy.q_net.q_head.weight, operator.estimate(batch)
    assert torch.autograd.grad(estimate.negative_elbo, head, retain_graph=True, allow_unused=True)[0] is None

    def slope() -> Tensor:
        torch.manual_seed(0)
        return torch.autograd.grad(operator.msbbe(batch, estimate)[0], head, retain_graph=True)[0]

    whole = slope()
    fixed = lambda q, b1, b2, mask: msbbe_double(q, b1.detach(), b2.detach(), mask)  # noqa: E731
    monkeypatch.setattr("sb3_ben.ben.paper.msbbe_double", fixed)
    assert not torch.allclose(whole, slope(), rtol=1e-3)


def test_the_posterior_of_an_episode_is_fitted_to_it() -> None:
    """Of what the best posterior gains over the prior, most is there while the episode runs."""
    kwargs: dict[str, Any] = {**AS_BEN, "belief_scope": "episode", "learning_starts": 128, "sequence_length": 11, "seed": 1}
    model = tiny(n_envs=4, **kwargs, train_freq=1, policy_kwargs={"net_arch": [16], "rnn_hidden_size": 16, "phi_dim": 16})
    model.learn(4 * 11 * 12 + 4 * 8)  # eight steps of a new episode
    operator, histories = model.operator, model.replay(8)
    with torch.no_grad():
        batch = operator.evaluate(histories, model.rule, model.seen)
    assert batch.mask.sum(dim=1).tolist() == [8] * 4

    @torch.no_grad()
    def elbo() -> float:
        return -float(operator.estimate(batch, with_moments=False, n_samples=2000).negative_elbo)

    fitted = elbo()
    model.beliefs.reset(torch.ones(4))
    prior = elbo()
    optimizer = torch.optim.Adam(model.beliefs.psi.parameters())
    for left in np.linspace(1, 0, 400, endpoint=False):
        optimizer.param_groups[0]["lr"] = 1e-2 * left
        optimizer.zero_grad()
        operator.estimate(batch, with_moments=False, n_samples=64).negative_elbo.backward()
        optimizer.step()
    best = elbo()
    assert best > prior + 0.005
    assert fitted > prior + 0.6 * (best - prior)


def test_the_last_transitions_of_an_episode_count() -> None:
    """Training every four steps would leave out three of the eleven of an episode."""
    model = tiny(n_envs=2, learning_starts=0, train_freq=4, sequence_length=11)
    seen = []
    update = model.update

    def watch(histories: Any) -> Any:
        seen.append(int(histories.mask.sum(dim=0)[0]))
        return update(histories)

    model.update = watch  # type: ignore[method-assign]
    model.learn(2 * 24)
    assert seen == [4, 8, 11, 1, 5, 9, 11, 2]
