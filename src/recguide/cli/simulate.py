"""`recguide simulate`: policies and schedulers under loads that this machine cannot serve."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .. import simulator
from ..calibration import BLOCK_SIZES
from ..engine.scheduler import SCHEDULERS
from ..errors import ConfigError
from ..files import whole
from ..pictures import check_installed, frontier, panel_grid
from ..simulated_model import CONTINUED, PREDICTION
from ..simulator import MODELS, PASSING, POLICIES, Recording
from .mistakes import readable_errors
from .options import names, whole_numbers

out = Console()

OURS, RECIPE, BOUND, AUTO = "verification_guided", "concurrency_table", "oracle", "auto"


def simulate(
    model: Annotated[str, typer.Option("--model", help=f"With commas: {', '.join(MODELS)}.")] = ",".join(MODELS),
    concurrency: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "2,4,8,16,32,64,128",
    policies: Annotated[str, typer.Option(help=f"With commas: {', '.join(POLICIES)}.")] = ",".join(POLICIES),
    schedulers: Annotated[str, typer.Option(help=f"With commas: {', '.join(SCHEDULERS)}.")] = "packed,bucketed",
    requests: Annotated[
        int,
        typer.Option(
            min=2,
            help="Served in each run; more than the largest concurrency. auto takes most of the time, 30 to 45 s a thousand.",
        ),
    ] = 400,
    trace: Annotated[
        Path | None,
        typer.Option(help="JSONL of rounds with blocks of 32. By default the paper's Table 1 says what is accepted."),
    ] = None,
    prediction: Annotated[
        float | None,
        typer.Option(
            help=f"How well entropies and drafts foretell acceptance, 0 … 1; by default {PREDICTION}. Not with --trace."
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Also what auto gains where prediction is perfect, half as good and absent, at the middle and the largest load. "
            "Not with --trace.",
        ),
    ] = False,
    passing: Annotated[
        float, typer.Option(help="Share of rounds whose end a block that begins inside of them gets past.")
    ] = PASSING,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw all requests' tokens a second over one's to this PNG file; needs matplotlib."),
    ] = None,
) -> None:
    """Serve in simulated time, at published costs of a B200: what each policy would bring at each load."""
    with readable_errors():
        if plot:
            check_installed()
        for name, given in (("--prediction", prediction is not None), ("--sensitivity", sensitivity)):
            if trace and given:
                raise ConfigError(f"{name} is about random requests; a trace has its own entropies. Leave one out.")
        prediction = PREDICTION if prediction is None else prediction
        loads = whole_numbers(concurrency, "--concurrency")
        if max(loads) >= requests:
            raise ConfigError(f"--requests must be more than the largest concurrency, {max(loads)}; got {requests}.")
        models = names(model, MODELS, "--model")
        grid = (loads, names(policies, POLICIES, "--policies"), names(schedulers, tuple(SCHEDULERS), "--schedulers"))
        served, fitted = _recordings(trace, requests, prediction, passing, seed)
        runs = [run for name in models for run in _runs(name, served, fitted, *grid)]
        by_model = {name: [run for run in runs if run["model"] == name] for name in models}
        summaries = {name: summary(of_model) for name, of_model in by_model.items()}
        if sensitivity:
            some = sorted({sorted(loads)[len(loads) // 2], max(loads)})
            for name in models:
                summaries[name]["prediction"] = {
                    str(level): _gains_at(name, some, grid[2][0], requests, level, passing, seed)
                    for level in sorted({0.0, prediction / 2, prediction, 1.0})
                }
        assumptions = _assumptions(trace, prediction, passing, requests, seed, len(fitted))
        if json_file:
            record = {"assumptions": assumptions, "runs": runs, "summary": summaries}
            with whole(json_file) as file:
                file.write_text(json.dumps(record, indent=1) + "\n")
        for name in models:
            for shown in _tables(by_model[name], summaries[name]):
                out.print(shown, highlight=False)
        out.print()
        for about, assumed in assumptions.items():
            out.print(f"[bold]{about}[/bold]: {assumed}", highlight=False)
        if plot:
            with whole(plot) as file:
                draw(runs, file)


def _recordings(
    trace: Path | None, requests: int, prediction: float, passing: float, seed: int
) -> tuple[list[Recording], list[Recording]]:
    """The requests that are served, and those that tables are fitted to."""
    if trace:
        recorded = simulator.read_recordings(trace, seed, passing)
        return simulator.resampled(recorded[::2], requests, seed), recorded[1::2]
    return (
        simulator.random_recordings(requests, seed, prediction, passing),
        simulator.random_recordings(simulator.FIT_REQUESTS, seed + simulator.FIT_SEED, prediction, passing),
    )


def _runs(
    model: str,
    served: Sequence[Recording],
    fitted: Sequence[Recording],
    loads: Sequence[int],
    policies: Sequence[str],
    schedulers: Sequence[str],
) -> Iterator[dict[str, Any]]:
    watched = partial(track, description=model, console=Console(stderr=True))
    return simulator.sweep(model, served, fitted, loads, policies, schedulers, watched)


def _gains_at(
    model: str, loads: Sequence[int], scheduler: str, requests: int, prediction: float, passing: float, seed: int
) -> dict[str, dict[str, float]]:
    """What `auto` gains over others, by load, where entropies and drafts foretell so much."""
    served, fitted = _recordings(None, requests, prediction, passing, seed)
    found = {}
    runs = list(_runs(model, served, fitted, loads, ("fixed", OURS, AUTO), [scheduler]))
    for load in loads:
        speeds = {run["policy"]: run["tokens_per_s"] for run in runs if run["concurrency"] == load}
        fixed = max(speed for policy, speed in speeds.items() if policy not in (OURS, AUTO))
        found[str(load)] = {
            "tokens_per_s": speeds[AUTO],
            f"over_{OURS}": speeds[AUTO] / speeds[OURS],
            "over_best_fixed": speeds[AUTO] / fixed,
        }
    return found


# --- figures ---


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """
    What the runs of one model say: by scheduler, means over the loads of quotients of tokens a second, and the paper's tables beside.

    Of each policy: `over_concurrency_table` and `over_best_fixed`, the best fixed block of each load; `least_over_best_fixed`, at the load
    that is worst for it; `oracle_gain_closed`, its part of `oracle_gap`, what the oracle gains over the best fixed blocks.
    `auto_over_verification_guided` is by load, with the mean. What was not run is left out.
    """
    printed = simulator.paper_tables()
    model = runs[0]["model"]
    found: dict[str, Any] = {}
    means: dict[tuple[str, str], float] = {}
    for scheduler in dict.fromkeys(run["scheduler"] for run in runs):
        speeds: dict[str, dict[int, float]] = {}
        shares: dict[int, list[float]] = {}
        for run in runs:
            if run["scheduler"] != scheduler:
                continue
            speeds.setdefault(run["policy"], {})[run["concurrency"]] = run["tokens_per_s"]
            if run["policy"] == OURS:
                shares[run["concurrency"]] = [100 * run["block_share"].get(str(size), 0.0) for size in BLOCK_SIZES]
        means |= {(scheduler, policy): fmean(by_load.values()) for policy, by_load in speeds.items()}
        found[scheduler] = _gains(speeds) | {
            "table_4": {
                load: {"printed": share, "simulated": shares[int(load)]}
                for load, share in printed["table_4"][model].items()
                if int(load) in shares
            }
        }
    same = {
        "fixed block": (next(iter(found)), RECIPE),
        # As the paper has it, bucketing is what ends the padding.
        "+z": ("padded", OURS),
        "+bucketing": ("bucketed", OURS),
    }
    table_6 = {
        row: {"printed": speed, "simulated": means.get(same[row]) if row in same else None}
        for row, speed in printed["table_6"][model].items()
    }
    return {"schedulers": found, "table_6": table_6}


def _gains(speeds: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    fixed = {policy: by_load for policy, by_load in speeds.items() if policy == "ar" or policy.startswith("fixed-")}
    loads = next(iter(speeds.values()))
    best = {load: max(fixed, key=lambda policy: fixed[policy][load]) for load in loads} if fixed else {}
    policies: dict[str, dict[str, float]] = {}
    for policy, by_load in speeds.items():
        gains = policies[policy] = {}
        if RECIPE in speeds:
            gains["over_concurrency_table"] = fmean(by_load[load] / speeds[RECIPE][load] for load in loads)
        if fixed:
            quotients = [by_load[load] / fixed[best[load]][load] for load in loads]
            gains["over_best_fixed"], gains["least_over_best_fixed"] = fmean(quotients), min(quotients)
    found: dict[str, Any] = {
        "best_fixed": {str(load): policy for load, policy in best.items()},
        "policies": policies,
    }
    gap = policies.get(BOUND, {}).get("over_best_fixed", 1.0) - 1
    if gap > 0:
        found["oracle_gap"] = gap
        for gains in policies.values():
            gains["oracle_gain_closed"] = (gains["over_best_fixed"] - 1) / gap
    if AUTO in speeds and OURS in speeds:
        quotients_by_load = {str(load): speeds[AUTO][load] / speeds[OURS][load] for load in loads}
        found[f"{AUTO}_over_{OURS}"] = quotients_by_load | {"mean": fmean(quotients_by_load.values())}
    return found


def _assumptions(
    trace: Path | None, prediction: float, passing: float, requests: int, seed: int, fitted: int
) -> dict[str, Any]:
    costs = simulator.b200_costs(MODELS[0]).environment
    drafts = json.loads((simulator.DATA / "drafts.json").read_text())["source"]
    if trace:
        acceptance = f"every other request of {trace}, drawn anew; for both models"
        entropies = "as recorded"
    else:
        acceptance = (
            "random: Table 1 of arXiv 2609.34388 for both models, a step a round of blocks of 32; uniform within an interval, but "
            f"{simulator.FULL_SHARE:.0%} of the longest are 32; outputs exponential, {simulator.MEAN_TOKENS} tokens in the mean"
        )
        entropies = (
            f"lognormal, with means of {simulator.ACCEPTED_NATS} nats where accepted and {simulator.REJECTED_NATS} where rejected, and a "
            f"spread of the logarithm of {simulator.LOG_SPREAD}; its correlation with what comes behind the token is {prediction}"
        )
    return {
        "acceptance": acceptance,
        "blocks that begin inside of a recorded round": (
            f"commit what is left of it, and in {passing:.0%} of the rounds the next one's tokens too; their own size at the most"
        ),
        "entropies": entropies,
        "costs": f"{costs['source']}; {costs['warning']}",
        "a round's time": (
            "packed: by query tokens, on straight lines between the measured blocks for so many requests; bucketed and padded: those "
            "that take part, each with the largest block; no prefill, no host work"
        ),
        "load": (
            f"{requests} requests, so many at once, one coming when one ends; figures are of the time until the last has come; ends are "
            "not foreseen"
        ),
        "drafts of auto": (
            "right as far as a block that begins with them would be accepted, beside a verification too; behind a whole block of 32 a "
            f"continuation is right in {CONTINUED:.0%} of the cases where a new block would not be; second and third choices as published "
            f"for NLD-8B; probabilities, and what is right behind a rejected token, as recorded: {drafts}; with a prediction below "
            f"{PREDICTION} the share of probabilities that say anything falls in proportion"
        ),
        "a forward's time under auto": (
            "half of a round's of so many requests with so many query tokens, branches among them; on straight lines also below blocks of "
            "8, which were not measured, and above those of 32; the policy knows these costs"
        ),
        "the oracle": "knows what blocks commit, but drafts each in a forward of its own, which auto does not: it is no bound for auto",
        "tables of verification_guided and auto": f"fitted to {fitted} other requests with blocks of 32",
        "seed": seed,
    }


# --- for readers ---


def _tables(runs: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> Iterator[str | Table]:
    """Of one model: speeds and gains by scheduler, then the paper's tables beside what was simulated."""
    model, loads = runs[0]["model"], list(dict.fromkeys(run["concurrency"] for run in runs))
    speeds = {(run["scheduler"], run["policy"], run["concurrency"]): run["tokens_per_s"] for run in runs}
    gains = ("over_concurrency_table", "over_best_fixed", "least_over_best_fixed", "oracle_gain_closed")
    for scheduler, figures in found["schedulers"].items():
        yield f"\n[bold]{model}, {scheduler}: tokens a second, by requests at once; quotients are means over the loads"
        table = _table()
        for name in (*map(str, loads), "/ table", "/ best fixed", "least", "of the oracle's gain"):
            table.add_column(name, justify="right")
        for policy, means in figures["policies"].items():
            quotients = [means.get(name) for name in gains]
            shown = [
                "" if q is None else f"{q:.0%}" if name == gains[-1] else f"{q:.3f}"
                for q, name in zip(quotients, gains, strict=True)
            ]
            table.add_row(policy, *(f"{speeds[scheduler, policy, load]:.0f}" for load in loads), *shown)
        yield table
        yield from _of_auto(figures)
        if figures["table_4"]:
            yield f"\n[bold]{model}, {scheduler}: percent of blocks of 8 / 16 / 32, by requests at once (the paper's Table 4)"
            yield _beside(
                {load: {who: _shares(share) for who, share in row.items()} for load, row in figures["table_4"].items()}
            )
    if "prediction" in found:
        first = next(iter(found["schedulers"]))
        yield f"\n[bold]{model}, {first}: auto by how much is foretold, / {OURS} and / best fixed, by requests at once"
        table = _table()
        by_level: Mapping[str, Mapping[str, Mapping[str, float]]] = found["prediction"]
        for load in next(iter(by_level.values())):
            table.add_column(load, justify="right")
        for level, by_load in by_level.items():
            shown = [f"{gains[f'over_{OURS}']:.3f}, {gains['over_best_fixed']:.3f}" for gains in by_load.values()]
            table.add_row(f"prediction {float(level):g}", *shown)
        yield table
    yield f"\n[bold]{model}: tokens a second, mean over the loads (the paper's Table 6, over 2 to 128)"
    yield _beside(
        {
            row: {who: "" if speed is None else f"{speed:.0f}" for who, speed in both.items()}
            for row, both in found["table_6"].items()
        }
    )


def _of_auto(figures: Mapping[str, Any]) -> Iterator[str]:
    against = figures.get(f"{AUTO}_over_{OURS}")
    if against:
        yield f"auto / {OURS}: " + ", ".join(f"{quotient:.3f} ({load})" for load, quotient in against.items())
    if AUTO in figures["policies"] and "oracle_gap" in figures:
        closed = figures["policies"][AUTO]["oracle_gain_closed"]
        yield (
            f"The oracle gains {figures['oracle_gap']:.1%} over the best fixed blocks; auto {closed:.0%} of that. (The oracle drafts each "
            "block in a forward of its own, auto beside verifications; its drafts are synthetic: see below.)"
        )


def _shares(shares: Sequence[float]) -> str:
    return " / ".join(f"{share:.0f}" for share in shares)


def _beside(rows: Mapping[str, Mapping[str, str]]) -> Table:
    table = _table()
    for who in ("printed", "simulated"):
        table.add_column(who, justify="right")
    for name, both in rows.items():
        table.add_row(name, both["printed"], both["simulated"])
    return table


def _table() -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("")
    return table


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The frontiers as PNG, a panel a model and scheduler."""
    models = list(dict.fromkeys(run["model"] for run in runs))
    schedulers = list(dict.fromkeys(run["scheduler"] for run in runs))
    figure, panels = panel_grid(len(models), len(schedulers), 5 * len(schedulers), 4 * len(models))
    for row, model in zip(panels, models, strict=True):
        for axes, scheduler in zip(row, schedulers, strict=True):
            frontier(axes, [run for run in runs if (run["model"], run["scheduler"]) == (model, scheduler)], "policy")
            axes.set_title(f"{model}, {scheduler}")
    panels[0][-1].legend(frameon=False, fontsize=7)
    figure.savefig(path, format="png", dpi=130)
