"""The kernels and a model of the 8B release's shape on a GPU, in at most eight minutes: see docs/kernels.md.

    python eval/gpu_check.py --out DIR [--dry-run] [--parts machine,attention]

Every part runs in a process of its own, so that one which fails, hangs or harms the device leaves the others alone, and each is stopped
when its time is over, with what it has. DIR/rows.jsonl has a line for each figure as soon as it is there, DIR/gpu_check.json all of a part
when it ends, and DIR/gpu_check.txt what is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT = 480.0
"""Seconds in all."""
DRY_LIMIT = 3600.0
"""Of a dry run, and of each of its parts: interpreted kernels take as long as a busy CPU needs."""
RESERVE = 5.0
"""Seconds kept for writing what is there."""
LACKING = 3
"""A part's exit code where something that it needs cannot be imported."""
Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """
    A part of the check.

    Args:
        name (`str`): also of the function in `module` that yields its rows.
        module (`str`): imported by the part's process alone.
        seconds (`float`): its budget, imports and compilation included.
        interpreted (`bool`): whether a dry run of it has Triton's interpreter.
    """

    name: str
    module: str
    seconds: float
    interpreted: bool = True


PARTS = (
    Part("machine", "gpu_kernels", 25),
    Part("correctness", "gpu_kernels", 120),
    Part("attention", "gpu_kernels", 90),
    Part("statistics_of_logits", "gpu_kernels", 35),
    Part("model", "gpu_model", 110),
    Part("end_to_end", "gpu_model", 95, interpreted=False),
)
"""Those most worth knowing first. Nothing of the others is started if the first fails."""


@dataclass
class Outcome:
    """What became of a part: `done`, `failed`, `skipped` (something is not installed), `out of time` or `not started`."""

    name: str
    status: str
    seconds: float = 0.0
    error: str | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Bar:
    """A figure that is to be reached, at least or at most; `figure` is None where it was not measured."""

    what: str
    limit: float
    at_least: bool
    figure: float | None

    @property
    def reached(self) -> bool | None:
        if self.figure is None:
            return None
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit


# --- the parts, one process each --------------------------------------------------------------------------------------


def run_part(part: Part, folder: Path, seconds: float, dry_run: bool) -> Outcome:
    """Run a part in a process of its own for so long at the most."""
    path = folder / "rows.jsonl"
    before = path.stat().st_size if path.exists() else 0
    interpreted = {"TRITON_INTERPRET": "1"} if dry_run and part.interpreted else {}
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = kept | interpreted | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(HERE / "gpu_check.py"), "--out", str(folder), "--part-here", part.name]
    command += ["--dry-run"] if dry_run else []
    start = time.monotonic()
    error: str | None
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=seconds)
        status = {0: "done", LACKING: "skipped"}.get(done.returncode, "failed")
        error = None if status == "done" else done.stderr.strip()[-4000:] or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        status, error = "out of time", f"stopped after {seconds:.0f} s"
    rows = read_rows(path, before)
    if status == "done" and (wrong := [row["case"] for row in rows if row.get("right") is False]):
        status, error = "failed", f"wrong results: {'; '.join(map(str, wrong))}"
    return Outcome(part.name, status, time.monotonic() - start, error, rows)


def read_rows(path: Path, start: int = 0) -> list[dict[str, Any]]:
    """The rows behind byte `start`; a line that was cut off in writing is left out."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        file.seek(start)
        lines = file.read().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    for row in rows:
        del row["part"]
    return rows


def part_here(name: str, folder: Path, dry_run: bool) -> int:
    """Run a part in this process."""
    part = next(part for part in PARTS if part.name == name)
    try:
        from gpu_clock import Clock

        function: Callable[[Clock], Iterator[dict[str, Any]]] = getattr(__import__(part.module), part.name)
    except ImportError:
        traceback.print_exc()
        return LACKING
    if not dry_run:
        import torch

        if not torch.cuda.is_available():
            print("torch finds no CUDA device. Without one, only --dry-run works.", file=sys.stderr)
            return 1
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
        for row in function(Clock(dry_run)):
            file.write(json.dumps({"part": name} | row) + "\n")
            file.flush()
    return 0


def run_parts(
    parts: Sequence[Part],
    run: Callable[[Part, float], Outcome],
    keep: Callable[[list[Outcome]], None],
    limit: float = LIMIT,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """
    Run parts in turn while there is time.

    Args:
        parts (`Sequence[Part]`): in order of worth.
        run (callable): `(part, seconds) -> outcome`.
        keep (callable): told of all outcomes whenever there is one more.
        limit (`float`): seconds for all.
        clock (callable): seconds.
    """
    start = clock()
    outcomes: list[Outcome] = []
    for number, part in enumerate(parts):
        left = limit - RESERVE - (clock() - start)
        seconds = min(part.seconds, left)
        if number and outcomes[0].name == PARTS[0].name and outcomes[0].status != "done":
            outcomes.append(Outcome(part.name, "not started", error=f"{PARTS[0].name} is not done"))
        elif seconds < 10:
            outcomes.append(Outcome(part.name, "not started", error=f"{max(left, 0):.0f} s are left"))
        else:
            outcomes.append(run(part, seconds))
        keep(outcomes)
    return outcomes


# --- what is made of the rows -----------------------------------------------------------------------------------------


def bars(rows: dict[str, Rows]) -> list[Bar]:
    """The figures to reach, from the rows of each part by its name."""
    copies = [row["bytes_per_ms"] for row in rows.get("machine", ()) if "bytes_per_ms" in row]
    attention = [row for row in rows.get("attention", ()) if row["way"] == "segment_attention"]
    # The way that recguide's backend takes.
    shipped = {
        (row["round"], row["requests"], row["context"]): row
        for row in attention
        if row["split"] == 2048 and row["rows"] <= 64
    }
    found = []
    for name in ("verify", "fused"):
        shares = [
            row["bytes"] / copies[0] / row["ms"]
            for (kind, requests, _), row in shipped.items()
            if copies and kind == name and requests == 64
        ]
        what = (
            f"segment attention, {name} rounds, C = 64, context 2048 to 8192: share of the copy's bandwidth, the least"
        )
        found.append(Bar(what, 0.7, True, min(shares, default=None)))
    short, long = (shipped.get((name, 1, 8192)) for name in ("verify", "fused"))
    what = "segment attention of 64 query tokens, C = 1, context 8192: times that of 16"
    found.append(Bar(what, 1.15, False, long["ms"] / short["ms"] if short and long else None))
    stats: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows.get("statistics_of_logits", ()):
        if row["vocabulary"] == 131_072:
            stats.setdefault((row["dtype"], row["rows"]), {})[row["way"]] = row["ms"]
    gains = [ms["three passes of torch"] / ms["logit_stats"] for ms in stats.values() if "three passes of torch" in ms]
    what = "logit_stats, V = 131072: speed in terms of three passes of torch, the least"
    found.append(Bar(what, 2.5, True, min(gains, default=None)))
    times = {
        (row["forward"], row["context"]): row["ms"]
        for row in rows.get("model", ())
        if row.get("forward") in ("fused", "verify")
    }
    ratios = [
        ms / times["verify", context]
        for (name, context), ms in times.items()
        if name == "fused" and ("verify", context) in times
    ]
    what = "one fused forward of 64 tokens, C = 1: times one of 16, the most"
    return [*found, Bar(what, 1.2, False, max(ratios, default=None))]


def report(outcomes: Sequence[Outcome], setting: dict[str, Any]) -> dict[str, Any]:
    """All that is known, as it goes into the JSON."""
    dry_run = setting["dry_run"]
    return setting | {
        "parts": [asdict(outcome) for outcome in outcomes],
        "skipped": sum(outcome.status == "skipped" for outcome in outcomes),
        "bars": [
            asdict(bar) | {"reached": None if dry_run else bar.reached}
            for bar in bars({outcome.name: outcome.rows for outcome in outcomes})
        ],
    }


def table(found: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{'DRY RUN on a CPU: times say nothing. ' if found['dry_run'] else ''}Commit {found['commit']}"]
    lines += [f"{name} {number}" for name, number in found["versions"].items()]
    machine = [row for part in found["parts"] if part["name"] == "machine" for row in part["rows"]]
    lines += [f"{name}: {value}" for row in machine for name, value in row.items()]
    lines += ["", "part                  status       seconds  rows"]
    for part in found["parts"]:
        lines.append(f"{part['name']:21} {part['status']:12} {part['seconds']:7.1f} {len(part['rows']):5}")
        if part["error"]:
            lines += [f"    {line}" for line in part["error"].splitlines()[-3:]]
    lines += ["", "To reach:"]
    for bar in found["bars"]:
        wanted = f"{'≥' if bar['at_least'] else '≤'} {bar['limit']}"
        figure = "not measured" if bar["figure"] is None else f"{bar['figure']:.3f}"
        verdict = {True: "reached", False: "NOT REACHED", None: "not judged"}[bar["reached"]]
        lines.append(f"  {figure:>12}  {wanted:7} {verdict:11}  {bar['what']}")
    lines.append("")
    for part in found["parts"]:
        if part["name"] in ("attention", "statistics_of_logits", "model", "end_to_end"):
            lines += [f"{part['name']}: {json.dumps(shown(row))}" for row in part["rows"]]
    return "\n".join(lines) + "\n"


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row with figures that can be read."""
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in row.items()
        if name not in ("bytes", "operations")
    }


def surroundings(dry_run: bool, commit: str | None) -> dict[str, Any]:
    """What the figures depend on; the commit is git's to say, unless it is given."""
    return {
        "dry_run": dry_run,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit or _output("git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"),
        "driver": _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "versions": {
            "python": sys.version.split()[0],
            **{name: _version(name) for name in ("torch", "triton", "transformers")},
        },
    }


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if all parts are done, else 1; whether bars are reached does not change it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder for the results; those of an earlier run are replaced"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on a CPU: runs every part, measures nothing"
    )
    parser.add_argument("--parts", help=f"with commas; all by default: {','.join(part.name for part in PARTS)}")
    parser.add_argument("--commit", help="of the sources, where they were copied without their git repository")
    parser.add_argument("--part-here", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part_here:
        return part_here(options.part_here, options.out, options.dry_run)
    names = options.parts.split(",") if options.parts else [part.name for part in PARTS]
    if unknown := set(names) - {part.name for part in PARTS}:
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in PARTS)}"
        )
    chosen = [part for part in PARTS if part.name in names]
    limit = LIMIT
    if options.dry_run:
        chosen, limit = [replace(part, seconds=DRY_LIMIT) for part in chosen], DRY_LIMIT
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rows.jsonl").unlink(missing_ok=True)
    setting = surroundings(options.dry_run, options.commit)

    def run(part: Part, seconds: float) -> Outcome:
        print(f"{part.name} ...", flush=True)
        return run_part(part, options.out, seconds, options.dry_run)

    def keep(outcomes: list[Outcome]) -> None:
        found = report(outcomes, setting)
        (options.out / "gpu_check.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (options.out / "gpu_check.txt").write_text(table(found), encoding="utf-8")

    outcomes = run_parts(chosen, run, keep, limit)
    print((options.out / "gpu_check.txt").read_text(encoding="utf-8"))
    return int(any(outcome.status != "done" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
