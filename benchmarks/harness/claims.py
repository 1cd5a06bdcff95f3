"""Claims and the numbers that decide them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import statistics
from benchmarks.harness.experiment import Claim, Experiment
from benchmarks.harness.statistics import Results, number


class Verdict(NamedTuple):
    """What the numbers say of a claim.

    :param holds: whether it holds; ``None`` where the numbers are missing
    :param evidence: the numbers
    :param note: what is still missing
    """

    holds: bool | None
    evidence: str
    note: str = ""

    def __str__(self) -> str:
        return {True: "**holds**", False: "**does not hold**", None: "not decided"}[self.holds] + self.note


def score_at_least(results: Results, agent: str, iqm: float, low: float = -np.inf, score: str = "greedy") -> Verdict:
    """The normalised interquartile mean reaches a value, and the lower end of its interval another."""
    found = statistics.iqm(results, score)[agent]
    return Verdict(found.value >= iqm and found.low >= low, f"IQM of {agent}: {found}")


def improves(results: Results, agent: str, over: list[str], probability: float = 0.9, score: str = "greedy") -> Verdict:
    """A run of one agent scores higher than one of others, with a probability above a value."""
    found = {other: statistics.improvement(results, agent, other, score) for other in over}
    evidence = "; ".join(f"P({agent} > {other}) = {interval}" for other, interval in found.items())
    return Verdict(all(interval.value > probability for interval in found.values()), evidence)


def no_worse(results: Results, agent: str, than: str, score: str = "greedy") -> Verdict:
    """The numbers do not show that runs of one agent score lower than those of another: even odds are not above the interval."""
    found = statistics.improvement(results, agent, than, score)
    means = statistics.mean(results, score)
    evidence = f"P({agent} > {than}) = {found}; means {means[agent]} and {means[than]}"
    return Verdict(found.high >= 0.5, evidence)


def statistic_between(
    results: Results, agent: str, name: str, low: float = -np.inf, high: float = np.inf, stage: str = "eval"
) -> Verdict:
    """The mean of the return or of a count lies between two values, after training (``eval``) or while learning (``train``)."""
    value = statistics.statistic(list(results.agents[agent].values()), name, stage)
    return Verdict(low <= value <= high, f"mean {name} of {agent}: {number(value)}")


def statistic_ratio(
    results: Results, agent: str, over: str, name: str, low: float = -np.inf, high: float = np.inf, stage: str = "eval"
) -> Verdict:
    """The mean of a count, divided by that of another agent, lies between two values."""
    mine, other = (statistics.statistic(list(results.agents[which].values()), name, stage) for which in (agent, over))
    ratio = mine / other if other else np.nan
    return Verdict(bool(low <= ratio <= high), f"mean {name}: {agent} {number(mine)}, {over} {number(other)}")


def increases(results: Results, agents: list[str], score: str = "greedy") -> Verdict:
    """The last of several agents is better than the first, and no step between them makes it worse beyond its interval."""
    found = statistics.iqm(results, score)
    row = [found[agent] for agent in agents]
    holds = row[-1].value > row[0].value and all(b.high >= a.low for a, b in pairwise(row))
    return Verdict(holds, "; ".join(f"{agent}: {interval}" for agent, interval in zip(agents, row, strict=True)))


def covers(results: Results, agent: str, level: float, tolerance: float) -> Verdict:
    """Realised Bellman samples fall into the central predicted interval of a level about as often as they should."""
    pit = np.concatenate([record.arrays["metric_pit"] for record in results.agents[agent].values()])
    share = float((np.abs(pit - 0.5) <= level / 2).mean())
    return Verdict(abs(share - level) <= tolerance, f"{agent}: {100 * share:.1f} % in the central {100 * level:.0f} %")


def metric_ratio(results: Results, agent: str, over: str, metric: str, low: float = 0.0, high: float = np.inf) -> Verdict:
    """The median of a metric, divided by that of another agent, lies between two values."""
    mine, other = (
        float(np.median([record.arrays[f"metric_{metric}"] for record in results.agents[which].values()]))
        for which in (agent, over)
    )
    return Verdict(bool(low <= mine / other <= high), f"{metric}: {agent} {number(mine)}, {over} {number(other)}")


TESTS: dict[str, Callable[..., Verdict]] = {
    function.__name__: function
    for function in (score_at_least, improves, no_worse, statistic_between, statistic_ratio, increases, covers, metric_ratio)
}


def decide(claim: Claim, experiment: Experiment, found: list[Results]) -> Verdict:
    """What the records say of a claim; a claim with no ``environment`` is about the first one."""
    arguments: dict[str, Any] = dict(claim.arguments)
    label = arguments.pop("environment", next(iter(experiment.environments)))
    results = next((results for results in found if results.environment == label), None)
    named = [arguments.get("agent"), arguments.get("than"), *arguments.get("agents", ())]
    named += arguments["over"] if isinstance(arguments.get("over"), list) else [arguments.get("over")]
    absent = [agent for agent in named if agent is not None and (results is None or agent not in results.agents)]
    if results is None or absent:
        return Verdict(None, "not run")
    seeds = min(len(results.agents[agent]) for agent in named if agent is not None)
    note = "" if seeds >= experiment.seeds else f" so far ({seeds} of {experiment.seeds} seeds)"
    return TESTS[claim.test](results, **arguments)._replace(note=note)
