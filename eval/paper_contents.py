"""The rows and pictures of `paper_tables.py`: what was measured and simulated, beside what is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from paper_measuring import ABLATION, CONTEXT, DFLASH, FIXED, OURS, SIMULATED_LOADS
from paper_rows import MEASURED, NOT_MEASURED, PRINTED, Row, spread

from recguide import simulator
from recguide.calibration import BLOCK_SIZES, RoundCost
from recguide.pictures import COLOURS, INTERVALS, MARKERS, frontier, panel_grid, transitions
from recguide.structs import Outcome, RoundRecord

Timed = dict[str, dict[str, list[dict[str, Any]]]]
"""By way and suite, for each repetition the sums over the prompts."""
TABLE_2 = ("AR", "LinearSS, B = 16", "LinearSS, B = 32", DFLASH, "TiDAR (quadratic layout)", OURS, "auto")
TABLE_5 = {
    "LinearSS": "LinearSS, B = 16", "+ 1st correction": "+ 1st correction", "+ 2nd correction": "+ 2nd correction",
    "+ continuation": OURS,
}  # fmt: skip
PRINTED_NAMES = {
    "LinearSS, B = 16": "LinearSS", "TiDAR (quadratic layout)": "TiDAR", OURS: OURS, DFLASH: DFLASH,
    "Fixed Block": "fixed block", "+ s": "+s", "+ z": "+z", "+ bucketing": "+bucketing",
    "LinearSS": "LinearSS", "+ 1st correction": "+1st correction", "+ 2nd correction": "+2nd correction",
    "+ continuation": "+continuation",
}  # fmt: skip
"""What the printed tables call them."""
PRINTED_GROUPS = {"math": slice(0, 3), "code": slice(3, 6), "text": slice(6, 8)}
"""Columns of the printed Table 2; `text` stands beside its QA and instructions."""


# --- tables ---


def table_1(recorded: Sequence[Sequence[RoundRecord]], model: str) -> list[Row]:
    """How often a round that commits so much is followed by one that commits so much."""
    (axes,) = transitions(recorded).axes
    shares, counts = axes.images[0].get_array(), [label.get_text() for label in axes.get_yticklabels()]
    printed = simulator.paper_tables()["table_1"]["transitions"]
    found = []
    for i, name in enumerate(INTERVALS):
        count = counts[i].partition("\n")[2]
        percent = {to: 100 * float(shares[i, j]) for j, to in enumerate(INTERVALS)} if count != "n = 0" else {}
        found.append(Row("table 1", MEASURED, model, f"from {name}", percent, count))
        percent = {to: 100 * printed[i][j] for j, to in enumerate(INTERVALS)}
        found.append(Row("table 1", PRINTED, "nld-8b", f"from {name}", percent))
    return found


def table_2(timed: Timed, model: str) -> list[Row]:
    found = []
    for way in TABLE_2:
        if way not in timed:
            note = "it needs a drafter trained for the model (--drafter)"
            found.append(Row("table 2", NOT_MEASURED, model, way, {}, note))
            continue
        values: dict[str, Any] = {}
        for suite, runs in timed[way].items():
            committed, forwards = (sum(run[key] for run in runs) for key in ("committed", "forwards"))
            values[f"tau, {suite}"] = 2 * committed / forwards
        values["tau, mean"] = fmean(values.values())
        quotients = {
            suite: [_speed(run) / _speed(plain) for run, plain in zip(runs, timed["AR"][suite], strict=True)]
            for suite, runs in timed[way].items()
        }
        for suite, by_repetition in quotients.items():
            values[f"speed-up, {suite}"] = spread(by_repetition)
        values["speed-up, mean"] = spread([fmean(one) for one in zip(*quotients.values(), strict=True)])
        different = sum(run["different"] for runs in timed[way].values() for run in runs)
        found.append(Row("table 2", MEASURED, model, way, values, f"{different} outputs differ" if different else ""))
    printed = simulator.paper_tables()["table_2"]
    for name in simulator.MODELS:
        for way in TABLE_2:
            if row := printed[name].get(PRINTED_NAMES.get(way, "")):
                values = {}
                for key, column in (("tau", "tau"), ("speedup", "speed-up")):
                    groups = {suite: fmean(row[key][part]) for suite, part in PRINTED_GROUPS.items()}
                    values |= {f"{column}, {suite}": value for suite, value in groups.items()}
                    values[f"{column}, mean"] = row[key][-1]
                found.append(Row("table 2", PRINTED, name, way, values))
    return found


def _speed(run: dict[str, Any]) -> float:
    return float(run["new_tokens"] / run["seconds"])


def table_3(timed: Timed, model: str) -> list[Row]:
    """
    Percent of the rounds that a branch covers (it is at the place where the block ended) and of those whose draft is used.

    Rounds in which a request ends are left out: nothing comes after them.
    """
    rows: dict[str, dict[str, float]] = {"correction": {}, "continuation": {}, "no hit": {}}
    everything: Counter[str] = Counter()
    by_suite: dict[str, Counter[str]] = {}
    for suite, runs in timed[OURS].items():
        by_suite[suite] = Counter(runs[0]["outcomes"])
        everything += by_suite[suite]
    for suite, outcomes in (by_suite | {"all": everything}).items():
        rounds = outcomes.total() - outcomes[Outcome.STOPPED]
        hits = {kind: sum(outcomes[one] for one in of_hits) for kind, (of_hits, _) in BRANCH_OUTCOMES.items()}
        covered = {
            kind: hits[kind] + sum(outcomes[one] for one in of_misses)
            for kind, (_, of_misses) in BRANCH_OUTCOMES.items()
        }
        for kind in BRANCH_OUTCOMES:
            rows[kind][f"{suite}, coverage"] = 100 * covered[kind] / rounds
            rows[kind][f"{suite}, reuse"] = 100 * hits[kind] / rounds
        rows["no hit"][f"{suite}, coverage"] = 100 * (1 - sum(covered.values()) / rounds)
    found = [Row("table 3", MEASURED, model, kind, values) for kind, values in rows.items()]
    same = {"Math": "math", "Code": "code", "QA & IF": "text", "Overall": "all"}
    for name, by_kind in ((name, simulator.paper_tables()["table_3"][name]) for name in simulator.MODELS):
        for kind, by_group in by_kind.items():
            values = {}
            for group, numbers in by_group.items():
                both = numbers if isinstance(numbers, list) else [numbers]
                values |= dict(zip((f"{same[group]}, coverage", f"{same[group]}, reuse"), both, strict=False))
            found.append(Row("table 3", PRINTED, name, kind, values))
    return found


BRANCH_OUTCOMES = {
    "correction": (
        (Outcome.CORRECTION_1_HIT, Outcome.CORRECTION_2_HIT),
        (Outcome.CORRECTION_1_WRONG_TOKEN, Outcome.CORRECTION_2_WRONG_TOKEN),
    ),
    "continuation": ((Outcome.CONTINUATION_HIT,), (Outcome.CONTINUATION_WRONG_TOKEN,)),
}
"""Hits and misses of covered rounds."""


def table_4(served: Sequence[dict[str, Any]], kind: str, model: str) -> list[Row]:
    """Percent of rounds with each block size, as the paper's rule chooses them, by requests at once."""
    found = []
    for concurrency in dict.fromkeys(run["concurrency"] for run in served):
        runs = [run for run in served if run["policy"] == "+ bucketing" and run["concurrency"] == concurrency]
        values = {
            f"B = {size}": spread([100 * _share(run["block_share"], size) for run in runs]) for size in BLOCK_SIZES
        }
        found.append(Row("table 4", kind, model, f"C = {concurrency}", values))
    return found


def _share(shares: dict[str, float], size: int) -> float:
    """Blocks that an output's end has shortened below 8 count as 8."""
    if size == min(BLOCK_SIZES):
        return sum(share for other, share in shares.items() if int(other) <= size)
    return shares.get(str(size), 0.0)


def table_4_printed() -> list[Row]:
    return [
        Row("table 4", PRINTED, name, f"C = {load}", {f"B = {b}": x for b, x in zip(BLOCK_SIZES, shares, strict=True)})
        for name in simulator.MODELS
        for load, shares in simulator.paper_tables()["table_4"][name].items()
    ]


def table_5(timed: Timed, model: str) -> list[Row]:
    """Tokens a second of one request, mean over the suites, as branches are added."""
    speeds = {
        row: [fmean(map(_speed, one)) for one in zip(*timed[way].values(), strict=True)] for row, way in TABLE_5.items()
    }
    found = [Row("table 5", MEASURED, model, row, _gain(speeds, row, "LinearSS")) for row in speeds]
    for name in simulator.MODELS:
        printed = simulator.paper_tables()["table_5"][name]
        speeds = {row: [printed[PRINTED_NAMES[row]]] for row in TABLE_5}
        found += [Row("table 5", PRINTED, name, row, _gain(speeds, row, "LinearSS")) for row in speeds]
    return found


def table_6(served: Sequence[dict[str, Any]], kind: str, model: str) -> list[Row]:
    """Tokens a second, mean over the loads, as the policy learns to see."""
    loads = dict.fromkeys(run["concurrency"] for run in served)
    speeds = {
        row: [
            fmean(one)
            for one in zip(
                *(
                    [run["tokens_per_s"] for run in served if (run["policy"], run["concurrency"]) == (row, load)]
                    for load in loads
                ),
                strict=True,
            )
        ]
        for row in (*ABLATION, "auto")
    }
    note = f"C = {', '.join(map(str, loads))}"
    return [Row("table 6", kind, model, row, _gain(speeds, row, "Fixed Block"), note) for row in speeds]


def table_6_printed() -> list[Row]:
    found = []
    for name in simulator.MODELS:
        printed = simulator.paper_tables()["table_6"][name]
        speeds = {row: [printed[PRINTED_NAMES[row]]] for row in ABLATION}
        found += [
            Row("table 6", PRINTED, name, row, _gain(speeds, row, "Fixed Block"), "C = 2 to 128") for row in speeds
        ]
    return found


def _gain(speeds: dict[str, list[float]], row: str, base: str) -> dict[str, Any]:
    quotients = [100 * (speed / first - 1) for speed, first in zip(speeds[row], speeds[base], strict=True)]
    return {"tokens / s": spread(speeds[row]), f"over {base}, %": spread(quotients)}


# --- figures ---


def figure_2a(recorded: Sequence[Sequence[RoundRecord]], model: str) -> list[Row]:
    """Shares of rounds that commit so much, blocks of 32."""
    committed = [len(record.committed) for record in _whole_rounds(recorded)]
    values = {
        name: 100 * sum(low < n <= high for n in committed) / len(committed)
        for name, low, high in zip(INTERVALS, (0, *BLOCK_SIZES), BLOCK_SIZES, strict=False)
    }
    return [Row("figure 2a", MEASURED, model, "percent of rounds", values, f"n = {len(committed)}")]


def _whole_rounds(recorded: Sequence[Sequence[RoundRecord]]) -> list[RoundRecord]:
    """Those that neither an end nor a lack of tokens to write has shortened."""
    return [
        record
        for rounds in recorded
        for record in rounds
        if record.outcome is not Outcome.STOPPED and record.block_size == max(BLOCK_SIZES)
    ]


def figure_2b(costs: Sequence[RoundCost], model: str) -> list[Row]:
    """Milliseconds of a round by requests in it."""

    def rows(kind: str, name: str, cells: Sequence[RoundCost], note: str) -> list[Row]:
        return [
            Row(
                "figure 2b",
                kind,
                name,
                f"B = {size}",
                {f"C = {cost.load}": cost.ms for cost in cells if cost.block_size == size},
                note,
            )
            for size in BLOCK_SIZES
        ]

    found = rows(MEASURED, model, costs, f"{CONTEXT} tokens cached; medians without range")
    for name in simulator.MODELS:
        wanted = [cost for cost in simulator.b200_costs(name).rounds if cost.load in SIMULATED_LOADS]
        found += rows("published, B200", name, sorted(wanted, key=lambda cost: cost.load), "draft and verify together")
    return found


def figure_3(recorded: Sequence[Sequence[RoundRecord]], model: str) -> list[Row]:
    """How sure the draft was of accepted and of first rejected tokens."""
    guesses: dict[str, list[Any]] = {"accepted": [], "first rejected": []}
    for record in _whole_rounds(recorded):
        guesses["accepted"] += record.draft.guesses[: record.accepted]
        guesses["first rejected"] += record.draft.guesses[record.accepted : record.accepted + 1]
    return [
        Row(
            "figure 3",
            MEASURED,
            model,
            name,
            {
                "mean probability": fmean(guess.probability for guess in some),
                "mean margin": fmean(guess.margin for guess in some),
                "margin below 0.5, %": 100 * fmean(guess.margin < 0.5 for guess in some),
            },
            f"n = {len(some)}",
        )
        for name, some in guesses.items()
        if some
    ]


def figure_5(served: Sequence[dict[str, Any]], kind: str, model: str) -> list[Row]:
    """Tokens a second of all requests and of one, by requests at once."""
    found = []
    for label in (*FIXED, "+ bucketing", "auto"):
        values = {}
        for concurrency in dict.fromkeys(run["concurrency"] for run in served):
            runs = [run for run in served if (run["policy"], run["concurrency"]) == (label, concurrency)]
            values[f"C = {concurrency}, all"] = spread([run["tokens_per_s"] for run in runs])
            values[f"C = {concurrency}, each"] = spread([run["per_request_tokens_per_s"] for run in runs])
        found.append(Row("figure 5", kind, model, OURS if label == "+ bucketing" else label, values))
    return found


def draw_2b(rows: Sequence[Row]) -> Any:
    models = list(dict.fromkeys((row.kind, row.model) for row in rows))
    figure, (panels,) = panel_grid(1, len(models), 4.5 * len(models), 3.8)
    for axes, (kind, model) in zip(panels, models, strict=True):
        for number, row in enumerate(row for row in rows if (row.kind, row.model) == (kind, model)):
            loads = [int(column.removeprefix("C = ")) for column in row.values]
            axes.plot(loads, list(row.values.values()), color=COLOURS[number], marker=MARKERS[number], label=row.name)
        axes.set(xscale="log", xlabel="requests in a round", title=f"{model}, {kind}")
        axes.set_ylim(bottom=0)
        axes.set_xticks(loads, [str(load) for load in loads])
        axes.set_xticks([], minor=True)
    panels[0].set_ylabel("milliseconds of a round")
    panels[0].legend(frameon=False)
    return figure


def draw_5(served: Sequence[tuple[str, str, Sequence[dict[str, Any]]]]) -> Any:
    figure, (panels,) = panel_grid(1, len(served), 5 * len(served), 4)
    for axes, (kind, model, runs) in zip(panels, served, strict=True):
        points = []
        for label in (*FIXED, "+ bucketing", "auto"):
            for concurrency in dict.fromkeys(run["concurrency"] for run in runs):
                some = [run for run in runs if (run["policy"], run["concurrency"]) == (label, concurrency)]
                points.append(
                    {
                        "policy": OURS if label == "+ bucketing" else label,
                        "concurrency": concurrency,
                        **{key: _median(spread([run[key] for run in some])) for key in SPEEDS},
                    }
                )
        frontier(axes, points, "policy")
        axes.set_title(f"{model}, {kind}")
    panels[0].legend(frameon=False, fontsize=8)
    return figure


SPEEDS = ("tokens_per_s", "per_request_tokens_per_s")


def _median(value: Any) -> float:
    return float(value[0] if isinstance(value, list) else value)
