"""The page of results: tables, figures and verdicts, all of them made from the raw records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from rliable import metrics, plot_utils

from benchmarks.harness import claims, statistics
from benchmarks.harness.claims import Verdict
from benchmarks.harness.experiment import (
    EVALUATION_SEED,
    FIRST_TEST_SEED,
    SEED_STRIDE,
    TUNING_EVALUATION_SEED,
    Experiment,
)
from benchmarks.harness.records import Record
from benchmarks.harness.references import World
from benchmarks.harness.statistics import Curve, Results, number

COLORS = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#949494", "#ece133", "#56b4e9")
IMAGES = Path("images", "benchmarks")  # beside the page
SCORE_TITLES = {"greedy": "score", "first": "first episode", "tail": "last fifth of training", "cumulative": "sum while learning"}
SOURCES = {"paper": "the paper", "ours": "this project"}
SHOWN_VERSIONS = ("stable_baselines3", "sb3_contrib", "rl_zoo3", "torch")
LEVELS = (0.5, 0.8, 0.9, 0.95)  # of central intervals, for calibration
LOWEST = -2.0  # score that figures show
REFERENCE_STYLES = (":", "--")  # of the lines of those whose scores are 0 and 1
METRIC_UNITS = {
    "steps_per_second": "environment steps/s",
    "updates_per_second": "gradient steps/s",
    "predict_ms_1": "predict, 1 env (ms)",
    "predict_ms_64": "predict, 64 envs (ms)",
}

INTRODUCTION = f"""# Benchmarks

This page is written by `python -m benchmarks report` from the raw results in `benchmarks/results/`; how they are made and how to
add to them is on [another page](benchmarks_howto.md).

- **Scores** are greedy returns after training, unless an experiment says otherwise, normalised: 0 is the agent that always
  listens, never opens a door or pulls arms at random, 1 the oracle (exact where it can be computed, otherwise the best known
  agent in the same worlds); on cart poles returns of 0 and 500 are scored 0 and 1. Where the optimum is exact, the optimal
  agent's returns in the same worlds are a control variate, which takes off most of the luck of these worlds. (Curves have fewer
  episodes and none of this: their ends need not meet the tables.)
- **IQM** is the interquartile mean over seeds, in brackets its 95 % interval (stratified bootstrap, rliable), from
  {statistics.FEWEST} seeds on; with fewer, no claim is decided. The mean return and the mean of the worst 5 % of all episodes
  are in the units of rewards: a robust average hides disasters.
- **Claims** that one agent is better than another hold if the probability that a run scores higher is above
  {claims.PROBABILITY} (or another value that is named) and its interval above one half. They do not hold if the interval is
  below that value; else nothing is decided. Claims on means, shares and ratios hold if all of the interval is where it is
  claimed to be, and do not if none of it is.
- **Seeds** are paired: every agent with the same number of environments learns in the same worlds, and all are evaluated in the
  same new ones. Seeds start at {FIRST_TEST_SEED} (at 110 in experiment 15: runs with earlier ones have had a part in the choice
  of its settings), and seed s is seed {SEED_STRIDE} s of the zoo, so that no two runs share a world; the worlds for evaluation
  have the seeds from {EVALUATION_SEED} on.
- **Tuning** trained with seeds of the harness below {FIRST_TEST_SEED}. Its trials (`benchmarks/trials.csv`) were scored in the
  worlds that are used for evaluation here; new ones have worlds of their own, from {TUNING_EVALUATION_SEED} on. The exploration
  of the agent "BEN" in experiment 2 and settings of experiment 16 were chosen after a look at runs with some of the test seeds,
  and seed {FIRST_TEST_SEED} of search and rescue was watched while its agents were developed: see
  [the other page](benchmarks_howto.md).
- **CPU s** are means over runs that were made at different times, on a shared machine whose speed changes by a factor of two to
  three: they tell what an experiment costs, and only experiment 13 compares agents in one run.
- **Commits** with a plus had changes in the working folder.
- **Hyperparameters** are those in `hyperparams/`, read by rl-zoo3, with the changes that an agent's row names.
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---------------------------------------------------------------------- tables


def scores_table(results: Results) -> str:
    """All agents, and the references beside them."""
    counts, kind = _counts(results), results.experiment.score
    learning = [statistics.scores(results, name) for name in ("tail", "cumulative")]
    iqm, mean = statistics.iqm(results, kind), statistics.mean(results, kind)
    header = [
        "agent",
        "seeds",
        f"{SCORE_TITLES[kind]}, IQM",
        "mean" if kind != "greedy" else "mean return",
        "worst 5 %",
        *counts,
        "return in the last fifth of training",
        "sum of returns in training",
        "CPU s",
    ]
    rows = []
    for agent, runs in results.agents.items():
        found = list(runs.values())
        cpu = float(np.mean([record.meta["times"]["cpu"] for record in found]))
        values = [str(len(found)), str(iqm[agent]), str(mean[agent]), number(statistics.worst(found))]
        values += [number(statistics.statistic(found, name)) for name in counts]
        rows.append([agent, *values, *(number(float(scores[agent].mean())) for scores in learning), number(cpu)])
    return table(header, [*rows, *(_reference_row(results, name, counts) for name in results.references)])


def _counts(results: Results) -> list[str]:
    """What the environment counts."""
    records = [*results.references.values(), *(record for runs in results.agents.values() for record in runs.values())]
    return records[0].statistics()


def _reference_row(results: Results, name: str, counts: Sequence[str]) -> list[str]:
    record = results.references[name]
    known = results.world
    is_exact = name == known.one and known.exact is not None
    value = results.greedy(record)
    if results.experiment.score == "greedy":
        score = number(float(results.normalised(value)))
    else:  # of single episodes, as those of learners
        score = number(float(metrics.aggregate_iqm(results.normalised(record.arrays["eval_return"]))))
    mean = f"{number(value)} (exact)" if is_exact else number(value)
    values = [
        score,
        mean,
        number(statistics.worst([record])),
        *(number(statistics.statistic([record], count)) for count in counts),
    ]
    return [f"*{name}*", "", *values, "", "", ""]


def improvement_table(results: Results) -> str:
    """The probability that the first agent is better than each other one."""
    agent, *others = results.agents
    rows = []
    for other in others:
        found = [statistics.improvement(results, agent, other, kind) for kind in (results.experiment.score, "tail")]
        rows.append([f"{agent} > {other}", *map(str, found)])
    title = SCORE_TITLES[results.experiment.score].replace("score", "greedy return")
    return table(["probability of improvement", title, "return in the last fifth of training"], rows)


def score_tables(results: Results) -> list[str]:
    """What agents achieve, and whether the first one achieves more."""
    return [scores_table(results), *([improvement_table(results)] if len(results.agents) > 1 else [])]


def metrics_tables(results: Results) -> list[str]:
    """What was measured beside returns."""
    tables = []
    if any("metric_steps_per_second" in record.arrays for runs in results.agents.values() for record in runs.values()):
        tables.append(speed_table(results))
    if any("metric_pit" in record.arrays for runs in results.agents.values() for record in runs.values()):
        tables.append(calibration_table(results))
    if any("metric_updating_return" in record.arrays for runs in results.agents.values() for record in runs.values()):
        tables.append(updating_table(results))
    return tables


def updating_table(results: Results) -> str:
    """First episodes in new worlds of agents that go on learning in them."""
    counts = _counts(results)
    rows = []
    for agent, runs in results.agents.items():
        found = [record for record in runs.values() if "metric_updating_return" in record.arrays]
        if found:
            mean = statistics.statistic_interval(found, "return", "metric_updating")
            others = (number(statistics.statistic(found, name, "metric_updating")) for name in counts)
            rows.append([agent, str(len(found)), str(mean), *others])
    return table(["learning on in the new worlds", "seeds", "return", *counts], rows)


def speed_table(results: Results) -> str:
    """Medians over runs; where RecurrentPPO is among the agents, the ratio to it follows with its interval."""
    columns = {**{f"metric_{name}": title for name, title in METRIC_UNITS.items()}, "memory_mb": "memory of training (MB)"}
    base = results.agents.get("RecurrentPPO")
    rows = []
    for agent, runs in results.agents.items():
        cells = []
        for key in columns:
            values = _measured(runs.values(), key)
            cell = number(float(np.median(values)))
            if base is not None and base is not runs:
                cell += f" ({statistics.ratio(values, _measured(base.values(), key), metrics.aggregate_median)} x)"
            cells.append(cell)
        rows.append([agent, *cells])
    return table(["agent", *columns.values()], rows)


def _measured(runs: Iterable[Record], key: str) -> np.ndarray:
    return np.array([record.meta[key] if key == "memory_mb" else float(record.arrays[key]) for record in runs])


def calibration_table(results: Results) -> str:
    """Coverage of predicted central intervals, and the distance of beliefs from the exact posterior."""
    rows = []
    for agent, runs in results.agents.items():
        found = [record.arrays for record in runs.values() if "metric_pit" in record.arrays]
        if not found:
            continue
        pit = np.concatenate([arrays["metric_pit"] for arrays in found])
        coverage = [f"{100 * (np.abs(pit - 0.5) <= level / 2).mean():.1f} %" for level in LEVELS]
        errors = [arrays["metric_belief"] - arrays["metric_exact"] for arrays in found if "metric_belief" in arrays]
        rows.append([agent, *coverage, number(float(np.sqrt(np.mean(np.concatenate(errors) ** 2)))) if errors else "-"])
    return table(["agent", *(f"in the central {100 * level:.0f} %" for level in LEVELS), "belief, RMS error"], rows)


# ---------------------------------------------------------------------- figures


def scores_figure(results: Results, path: Path) -> str:
    """The scores of all agents with their intervals; returns what is to be said of it."""
    found = statistics.iqm(results, results.experiment.score)
    figure, ax = plt.subplots(figsize=(5.5, 0.5 + 0.4 * len(found)))
    for row, (interval, color) in enumerate(zip(found.values(), COLORS, strict=False)):
        ax.plot([interval.low, interval.high], [row, row], color=color, linewidth=5, alpha=0.4, solid_capstyle="butt")
        ax.plot(interval.value, row, "o", color=color)
    ax.set_yticks(range(len(found)), list(found))
    ax.invert_yaxis()
    _draw_references(ax.axvline, results.world)
    ax.set_xlim(left=max(ax.get_xlim()[0], LOWEST))
    ax.set_xlabel(f"{SCORE_TITLES[results.experiment.score]}, IQM")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
    _save(figure, path)
    return "Points are interquartile means, bars their 95 % intervals."


def curves_figure(results: Results, path: Path) -> str:
    """Sample efficiency: greedy returns and returns while learning, normalised, and the sum of the latter; returns what is to be
    said of it."""
    drawn = {
        "greedy, new worlds": statistics.greedy_curve(results),
        "while learning": statistics.learning_curve(results),
    }
    curves = [(curve, title) for title, curve in drawn.items() if curve is not None and _is_in_sight(curve)]
    hidden = [title for title, curve in drawn.items() if curve is not None and not _is_in_sight(curve)]
    remarks = [f"Not drawn ({title}): all scores are below {LOWEST:.0f}." for title in hidden]
    if any((values < LOWEST).any() for curve, _ in curves for values in curve.values.values()):
        remarks.append(f"Scores are cut off at {LOWEST:.0f}: an agent that is not to be seen is below.")
    total = statistics.cumulative_curve(results)
    n_panels = len(curves) + (total is not None)
    if n_panels == 0:
        return " ".join(remarks)
    figure, axes = plt.subplots(1, n_panels, figsize=(4.6 * n_panels, 3.6), squeeze=False, gridspec_kw={"wspace": 0.3})
    for ax, (curve, title) in zip(axes[0], curves, strict=False):
        _draw(ax, curve, list(results.agents), title, "score, IQM")
        ax.set_ylim(max(float(np.nanmin(np.concatenate(list(curve.values.values())))), LOWEST) - 0.1, 1.1)
        _draw_references(ax.axhline, results.world)
    if total is not None:
        _draw(axes[0][-1], total, list(results.agents), "while learning, added up", "sum of returns in thousands, IQM")
        _draw_sum_of_references(axes[0][-1], results)
    _legend_below(figure, axes[0][0])
    _save(figure, path)
    return " ".join(remarks)


def _is_in_sight(curve: Curve) -> bool:
    """Whether anything of a curve is not far below all scores that matter."""
    return bool((np.concatenate(list(curve.values.values())) > LOWEST).any())


def _draw(ax: Any, curve: Curve, agents: list[str], title: str, ylabel: str) -> None:
    plot_utils.plot_sample_efficiency_curve(
        curve.steps / 1000,
        curve.values,
        curve.intervals,
        algorithms=agents,
        colors=dict(zip(agents, (COLORS[i % len(COLORS)] for i in range(len(agents))), strict=True)),
        xlabel="thousand environment steps",
        ylabel=ylabel,
        ax=ax,
        labelsize="medium",
        ticklabelsize="small",
        marker="",
        linewidth=1.2,
    )
    ax.set_title(title, fontsize="medium")


def _draw_references(line: Callable[..., Any], world: World) -> None:
    """The scores of 0 and 1, with the names of those who have them."""
    names = (world.zero, world.one) if world.bounds is None else (f"return {bound:g}" for bound in world.bounds)
    for score, (name, style) in enumerate(zip(names, REFERENCE_STYLES, strict=True)):
        line(score, color="black", linewidth=0.8, linestyle=style, label=name)


def _draw_sum_of_references(ax: Any, results: Results) -> None:
    """What those whose scores are 0 and 1 would have earned in as many episodes."""
    runs = [record for agents in results.agents.values() for record in agents.values()]
    n_episodes = np.mean([len(record.arrays.get("train_return", ())) for record in runs])
    names = (results.world.zero, results.world.one)
    for mean, name, style in zip(results.zero_and_one(), names, REFERENCE_STYLES, strict=True):
        end = results.experiment.steps / 1000
        ax.plot([0, end], [0, mean * n_episodes / 1000], color="black", linewidth=0.8, linestyle=style, label=name)


def _legend_below(figure: Any, ax: Any) -> None:
    """One legend for all panels, where it hides nothing."""
    position = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.02)}
    figure.legend(*ax.get_legend_handles_labels(), **position, ncols=4, frameon=False, fontsize="small")


def _save(figure: Any, path: Path) -> None:
    """Write a figure that is the same, byte for byte, whenever it shows the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "path"}):
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


# ---------------------------------------------------------------------- the page


def claims_table(experiment: Experiment, decided: Sequence[Verdict]) -> str:
    """What the numbers say of each claim."""
    rows = [
        [claim.text, SOURCES[claim.source], str(verdict), verdict.evidence, "" if verdict.holds else claim.why]
        for claim, verdict in zip(experiment.claims, decided, strict=True)
    ]
    return table(["claim", "of", "verdict", "numbers", "why"], rows)


def what_was_run(experiment: Experiment, found: list[Results]) -> str:
    """Budget, seeds, versions."""
    runs = [record for results in found for agents in results.agents.values() for record in agents.values()]
    seeds = _range(len(agents) for results in found for agents in results.agents.values())
    cpu = sum(record.meta["times"]["cpu"] for record in runs) / 60
    commits = ", ".join(sorted({record.meta["commit"] for record in runs}))
    dates = _range(record.meta["finished"][:10] for record in runs)
    versions = ", ".join(f"{name} {release}" for name, release in runs[-1].meta["versions"].items() if name in SHOWN_VERSIONS)
    planned = len(experiment.agents) * len(experiment.environments) * experiment.seeds
    note = "" if len(runs) == planned else f" **Not complete:** {planned} runs are planned."
    return (
        f"{experiment.steps:,} environment steps, {seeds} seeds, {experiment.evaluation.episodes:,} episodes in new worlds after "
        f"training; {len(runs)} runs, {cpu:.0f} CPU minutes of training; commit {commits}, {dates}; {versions}.{note}"
    )


def _range(values: Iterable[Any]) -> str:
    """The smallest and the largest value."""
    ordered = sorted(values)
    return " to ".join(map(str, dict.fromkeys((ordered[0], ordered[-1]))))


def drawn(results: Results, page: Path) -> list[str]:
    """The figure of an environment, and what is to be said of it."""
    experiment = results.experiment
    figure = page.parent / IMAGES / f"{experiment.name}-{list(experiment.environments).index(results.environment)}.svg"
    figure.unlink(missing_ok=True)
    remark = {"curves": curves_figure, "scores": scores_figure}[experiment.figure](results, figure)
    link = f"![{experiment.title}: {experiment.figure}]({figure.relative_to(page.parent).as_posix()})"
    return list(filter(None, [link if figure.exists() else "", remark]))


def section(experiment: Experiment, found: list[Results], decided: list[Verdict], page: Path) -> str:
    """The part of the page that is about one experiment."""
    parts = [f"## {experiment.number}. {experiment.title}", *filter(None, (experiment.question, experiment.note))]
    if not found:
        cost = sum(job.cpu_seconds for job in experiment.jobs()) / 60
        parts.append(f"*Not run yet* (`python -m benchmarks run {experiment.name}`, about {cost:.0f} CPU minutes).")
        return "\n\n".join(parts)
    parts.append(what_was_run(experiment, found))
    if experiment.claims:
        parts.append(claims_table(experiment, decided))
    for results in found:
        if len(experiment.environments) > 1:
            parts.append(f"### {results.environment}")
        tables, pictures = ([], []) if experiment.figure == "none" else (score_tables(results), drawn(results, page))
        parts += [*tables, *metrics_tables(results), *pictures]
    return "\n\n".join(parts)


def verdicts(experiments: Sequence[Experiment], decided: dict[str, list[Verdict]]) -> str:
    """All claims at a glance."""
    rows = [
        [str(experiment.number), claim.text, SOURCES[claim.source], str(verdict)]
        for experiment in experiments
        for claim, verdict in zip(experiment.claims, decided[experiment.name], strict=True)
    ]
    return "\n\n".join(["## Verdicts", table(["experiment", "claim", "of", "verdict"], rows)])


def write_report(experiments: Sequence[Experiment], results: Path, page: Path) -> Path:
    """Write the page and its figures.

    :param experiments: all experiments
    :param results: folder of the records
    :param page: where to write the page; figures go into :data:`IMAGES` beside it
    """
    found = {experiment.name: statistics.collect(experiment, results) for experiment in experiments}
    decided = {
        experiment.name: [claims.decide(claim, experiment, found[experiment.name]) for claim in experiment.claims]
        for experiment in experiments
    }
    sections = [section(experiment, found[experiment.name], decided[experiment.name], page) for experiment in experiments]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join([INTRODUCTION, verdicts(experiments, decided), *sections]) + "\n", encoding="utf-8")
    return page
