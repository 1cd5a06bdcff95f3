"""The aleatoric and the epistemic flow against exact results."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Laplace, MultivariateNormal, Normal

from sb3_ben.ben.objectives import negative_elbo, total_variance
from sb3_ben.ben.paper import SliceFlow, StackedEpistemicFlow
from sb3_ben.flows.aleatoric import AleatoricFlow, ConditionalDensity, UncertainWeights
from sb3_ben.flows.epistemic import EpistemicFlow, MeanField, default_prior, make_epistemic_flow, prior_log_prob
from sb3_ben.flows.spline import Spline

CONTEXT_DIM, PHI_DIM = 6, 8


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def shaken(module: nn.Module, scale: float) -> None:
    """Move the parameters away from their special initial values."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


def random_flow(scale: float = 0.2) -> AleatoricFlow:
    flow = AleatoricFlow(CONTEXT_DIM, PHI_DIM, hidden_size=16).double()
    shaken(flow, scale)
    return flow


def random_inputs(n: int = 5, s: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(n, CONTEXT_DIM).double(), math.sqrt(0.1) * torch.randn(s, PHI_DIM).double()


def dense_density(flow: AleatoricFlow, context: Tensor, phi: Tensor, n: int = 40_001) -> tuple[Tensor, Tensor]:
    """A fine grid of b and the density on it, for one context and one hypothesis."""
    b = torch.linspace(-20, 20, n, dtype=torch.float64)
    return b, flow.log_prob(b, context.expand(n, -1), phi).exp()[0]


@torch.no_grad()
def test_density_integrates_to_one_and_moments_match_it() -> None:
    flow = random_flow()
    context, phi = random_inputs(2, 2)
    mean, variance = flow.moments(context, phi)
    for i in range(2):
        for j in range(2):
            b, density = dense_density(flow, context[i : i + 1], phi[j : j + 1])
            exact = torch.trapezoid(b * density, b)
            spread = torch.trapezoid((b - exact).square() * density, b)
            assert torch.trapezoid(density, b) == pytest.approx(1.0, abs=1e-4)
            assert abs(mean[j, i] - exact) < 1e-4 * spread.sqrt()
            assert variance[j, i] == pytest.approx(float(spread), rel=1e-3)


def test_density_and_moments_at_once() -> None:
    flow = random_flow()
    context, phi = random_inputs()
    b = torch.randn(context.shape[0]).double()
    log_prob, moments = flow.log_prob_and_moments(b, context, phi)
    assert torch.equal(log_prob, flow.log_prob(b, context, phi))
    assert all(torch.equal(one, other) for one, other in zip(moments, flow.moments(context, phi), strict=True))
    assert log_prob.requires_grad
    assert not any(moment.requires_grad for moment in moments)


def test_tails_of_the_quadrature() -> None:
    """A tilt of four standard deviations pushes mass out of the spline's interval."""
    flow, phi = AleatoricFlow(CONTEXT_DIM, PHI_DIM).double(), torch.zeros(1, PHI_DIM).double()
    context = torch.randn(1, CONTEXT_DIM).double()
    features = flow.uncertain(context, torch.eye(PHI_DIM).double())[1][0]
    phi[0] = 4 * features / features.square().sum()
    mean, variance = flow.moments(context, phi)
    assert mean.item() == pytest.approx(4.0, abs=1e-6)
    assert variance.item() == pytest.approx(1.0, abs=1e-6)


def test_samples_follow_the_density() -> None:
    flow = random_flow()
    context, phi = random_inputs()
    mean, variance = flow.moments(context, phi)
    b = flow.sample(context, phi, 20_000)
    assert b.shape == (3, 5, 20_000)
    torch.testing.assert_close(b.mean(-1), mean, atol=0.05, rtol=0)
    torch.testing.assert_close(b.var(-1), variance, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("scale", [0.5, 3.0, 30.0])
def test_spline_inverse(scale: float) -> None:
    widths, heights, derivatives = (scale * torch.randn(100, 1, k, dtype=torch.float64) for k in (16, 16, 15))
    spline = Spline(widths, heights, derivatives)
    x = torch.linspace(-6, 6, 201, dtype=torch.float64).expand(100, 1, 201)
    torch.testing.assert_close(spline._inverse(spline(x)), x, atol=1e-5, rtol=0)
    y, ladj = spline.call_and_ladj(x.clone().requires_grad_())
    assert torch.isfinite(y).all()
    assert torch.isfinite(ladj).all()


def test_gradient_of_the_mean() -> None:
    flow = random_flow()
    context, phi = random_inputs(2, 2)
    context.requires_grad_()
    phi.requires_grad_()
    nothing = torch.zeros_like(phi)  # no gradient reaches the context through the random features that phi weighs
    b = torch.ones(2).double()
    assert torch.autograd.gradcheck(lambda c: flow.mean(c, nothing), (context,), atol=1e-6, rtol=1e-5)
    assert torch.autograd.gradcheck(lambda p: flow.mean(context.detach(), p), (phi,), atol=1e-6, rtol=1e-5)
    assert torch.autograd.gradcheck(lambda c: flow.log_prob(b, c, nothing), (context,), atol=1e-5)
    assert torch.autograd.gradcheck(lambda p: flow.log_prob(b, context.detach(), p), (phi,), atol=1e-5)


def test_random_features_do_not_bend_the_encoding() -> None:
    context, phi = random_inputs(2, 2)
    shift, tilt = random_flow().uncertain(context.requires_grad_(), phi)
    assert not shift.requires_grad
    assert not tilt.requires_grad


def test_batch_dimensions() -> None:
    flow = AleatoricFlow(CONTEXT_DIM, PHI_DIM, hidden_size=16)
    shaken(flow, 0.1)
    context, phi, b = torch.randn(4, 5, CONTEXT_DIM), torch.randn(4, 3, PHI_DIM), torch.randn(4, 5)
    assert flow.log_prob(b, context, phi).shape == (4, 3, 5)
    assert flow.mean(context[0], phi).shape == (4, 3, 5)
    assert flow.sample(context, phi[0], 7).shape == (4, 3, 5, 7)
    for method in (flow.mean, lambda c, p: flow.log_prob(b[0], c, p)):
        looped = torch.stack([method(c, p) for c, p in zip(context, phi, strict=True)])
        torch.testing.assert_close(method(context, phi), looped)


def test_prior_predictive_spread() -> None:
    flow = AleatoricFlow(CONTEXT_DIM, 64, prior_spread=0.5)
    context = 10 ** torch.linspace(-3, 3, 50)[:, None] * torch.randn(50, CONTEXT_DIM)
    mean, variance = flow.moments(context, default_prior(64).sample((4000,)))
    torch.testing.assert_close(mean.std(0), torch.full((50,), math.sqrt(0.5)), atol=0.04, rtol=0)
    torch.testing.assert_close(variance.mean(0), torch.ones(50), atol=1e-3, rtol=0)


def test_uncertain_weights_forget_distant_contexts() -> None:
    weights, context = UncertainWeights(32, 512), torch.randn(2, 32)
    shift, tilt = weights(context, default_prior(512).sample((2000,)))
    for output in (shift, tilt):
        assert abs(torch.corrcoef(output)[0, 1]) < 0.25


@pytest.mark.parametrize("raw", [1.0, 30.0, 1e4])
def test_single_precision_is_safe(raw: float) -> None:
    """Extreme raw parameters, outliers of a thousand standard deviations and constants: finite values and gradients."""
    flow = AleatoricFlow(CONTEXT_DIM, PHI_DIM)
    nn.init.normal_(flow.shape[-1].weight, std=raw)  # type: ignore[arg-type]
    b = torch.tensor([-1e3, -50.0, -5.0, 0.0, 0.0, 1e-6, 5.0, 1e3])
    context = torch.randn(8, CONTEXT_DIM)
    context[3:5] = 0.0
    context.requires_grad_()
    phi = torch.randn(16, PHI_DIM, requires_grad=True)
    values = [flow.log_prob(b, context, phi), *flow.moments(context, phi), flow.rsample(context, phi, 64)]
    torch.stack([value.mean() for value in values]).sum().backward()
    for tensor in (*values, context.grad, phi.grad, *(p.grad for p in flow.parameters())):
        assert tensor is not None
        assert torch.isfinite(tensor).all()


def test_an_outlier_pulls() -> None:
    flow = AleatoricFlow(CONTEXT_DIM, PHI_DIM)
    flow.log_prob(torch.tensor([1e3]), torch.randn(1, CONTEXT_DIM), torch.zeros(1, PHI_DIM)).sum().backward()
    assert flow.shape[-1].bias.grad[0] > 100  # type: ignore[index]


def fit(
    flow: ConditionalDensity, belief: EpistemicFlow, context: Tensor, b: Tensor, steps: int, lr: float = 1e-2, learn: bool = True
) -> None:
    """Minimise the negative ELBO on all data at once."""
    prior = default_prior(belief.phi_dim)
    parameters = [*belief.parameters(), *(flow.parameters() if learn else [])]
    optimizer = torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        phi, log_q = belief.rsample_and_log_prob(16)
        loss = negative_elbo(flow.log_prob(b, context, phi), prior.log_prob(phi), log_q) / len(b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def epistemic_std(flow: ConditionalDensity, belief: EpistemicFlow, context: Tensor) -> Tensor:
    return total_variance(*flow.moments(context, belief.rsample_and_log_prob(1000)[0]))[1]


def test_uncertainty_shrinks_with_data_and_stays_elsewhere() -> None:
    """Unit noise around unknown means in four contexts: their sd falls as 1/sqrt(n), four other contexts keep theirs."""
    sizes, contexts = [16, 64, 256, 1024], torch.randn(8, 16)
    seen, unseen = [], []
    for n in sizes:
        flow, belief = AleatoricFlow(16, 32), EpistemicFlow(32)
        index = torch.arange(n) % 4
        fit(flow, belief, contexts[index], torch.randn(n) + 0.5 * index - 0.75, steps=250, learn=False)
        std = epistemic_std(flow, belief, contexts)
        seen.append(float(std[:4].square().mean().sqrt()))
        unseen.append(float(std[4:].mean()))
    expected = [1 / math.sqrt(1 / 0.5 + n / 4) for n in sizes]
    assert seen == pytest.approx(expected, rel=0.25)
    slope = (math.log(seen[-1]) - math.log(seen[0])) / (math.log(sizes[-1]) - math.log(sizes[0]))
    assert -0.57 < slope < -0.4
    assert min(unseen) > 0.6 * math.sqrt(0.5)


def test_learning_the_shape_leaves_the_uncertainty() -> None:
    """Two-valued b: the learned density finds the two values, the uncertain tilt keeps the doubt about their odds."""
    n, contexts = 256, torch.randn(2, 16)
    index = torch.arange(n) % 2
    b = torch.where(torch.rand(n) < 0.3, 1.5, -0.6) + 0.1 * torch.randn(n)
    flow, belief = AleatoricFlow(16, 16, hidden_size=32), EpistemicFlow(16)
    fit(flow, belief, contexts[index], b, steps=400)
    mean, std = flow.mean(contexts, belief.rsample_and_log_prob(500)[0]).mean(0), epistemic_std(flow, belief, contexts)
    for i in range(2):
        values = b[index == i]
        assert mean[i].item() == pytest.approx(float(values.mean()), abs=0.1)
        assert std[i].item() == pytest.approx(float(values.std()) / math.sqrt(len(values)), rel=0.5)
    check_quadrature(flow.double(), contexts[:1].double())


@torch.no_grad()
def check_quadrature(flow: AleatoricFlow, context: Tensor) -> None:
    """The mean of a density with two sharp peaks, against a fine grid."""
    phi = torch.zeros(1, flow.uncertain.frequencies.shape[1]).double()
    b, density = dense_density(flow, context, phi)
    mean, variance = flow.moments(context, phi)
    assert abs(mean - torch.trapezoid(b * density, b)) < 1e-3 * variance.sqrt()


@pytest.mark.parametrize("flow_class", [EpistemicFlow, MeanField])
@pytest.mark.parametrize("phi_dim", [1, 2, 16])
def test_fresh_belief_is_the_prior(flow_class: type[EpistemicFlow], phi_dim: int) -> None:
    belief, prior = flow_class(phi_dim), default_prior(phi_dim)
    phi, log_q = belief.rsample_and_log_prob(100)
    torch.testing.assert_close(log_q, prior.log_prob(phi), atol=1e-4, rtol=0)


def test_belief_is_any_gaussian_prior() -> None:
    root = torch.randn(5, 5)
    prior = MultivariateNormal(torch.randn(5), root @ root.T + 0.1 * torch.eye(5))
    phi, log_q = EpistemicFlow(5, prior).rsample_and_log_prob(100)
    torch.testing.assert_close(log_q, prior.log_prob(phi), atol=1e-3, rtol=0)


def test_belief_is_fitted_to_other_priors() -> None:
    prior = Independent(Laplace(torch.ones(3), 0.3 * torch.ones(3)), 1)
    belief = EpistemicFlow(3)
    kl = belief.fit_to_prior(prior, steps=200)
    assert kl < 0.3
    assert belief.rsample_and_log_prob(2000)[0].mean().item() == pytest.approx(1.0, abs=0.1)


def test_large_beliefs_are_mean_fields() -> None:
    assert type(make_epistemic_flow(300)) is EpistemicFlow
    assert type(make_epistemic_flow(301)) is MeanField


@pytest.mark.parametrize("phi_dim", [1, 2, 20])
def test_belief_density_of_given_weights(phi_dim: int) -> None:
    belief = EpistemicFlow(phi_dim).double()
    shaken(belief, 0.1)
    phi, log_q = belief.rsample_and_log_prob(50)
    torch.testing.assert_close(belief.log_prob(phi), log_q)


def test_belief_jacobian() -> None:
    belief = EpistemicFlow(5).double()
    shaken(belief, 0.2)
    z = torch.randn(5).double()
    jacobian = torch.autograd.functional.jacobian(lambda x: belief(x)[0], z)
    exact = Independent(Normal(torch.zeros(5).double(), 1.0), 1).log_prob(z) - torch.linalg.slogdet(jacobian)[1]
    torch.testing.assert_close(belief(z)[1], exact)
    assert (jacobian != 0).all()


def all_modules() -> list[nn.Module]:
    belief = EpistemicFlow(4)
    return [
        AleatoricFlow(CONTEXT_DIM, 4),
        SliceFlow(CONTEXT_DIM, 4, hidden_size=8),
        belief,
        MeanField(4),
        StackedEpistemicFlow(belief, 2),
    ]


@pytest.mark.parametrize("module", all_modules(), ids=lambda module: type(module).__name__)
def test_state_dicts_copies_and_pickles(module: nn.Module) -> None:
    assert all(value.is_floating_point() for value in module.state_dict().values())
    shaken(module, 0.1)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), twin.state_dict().values(), strict=True))
    other = copy.deepcopy(module)
    shaken(other, 0.1)
    other.load_state_dict(module.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_argument_checks_of_torch_stay_on() -> None:
    assert Distribution._validate_args
    with pytest.raises(ValueError, match="scale"):
        Normal(0.0, -1.0)


def test_prior_is_evaluated_where_it_is() -> None:
    """On a machine without a second device, fake tensors tell where they would be."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    normal = Normal(torch.zeros(6), torch.ones(6), validate_args=False)
    prior = Independent(normal, 1, validate_args=False)
    assert torch.equal(prior_log_prob(prior, torch.ones(4, 6)), prior.log_prob(torch.ones(4, 6)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert prior_log_prob(prior, torch.ones(4, 6, device="cuda")).device.type == "cuda"
