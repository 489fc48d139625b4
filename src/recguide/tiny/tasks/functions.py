"""Small Python functions composed of a few steps, traced on one call, and checked by assertions.

Each template works out results with Python callables of its own, not by running the text of the answer:
that the two agree is what the package's tests establish through the sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from .sandbox import runs
from .task import Task, Template

_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def score(task: Task, output: str) -> bool:
    """Whether the fenced block of ``output`` satisfies the assertions, run in the sandbox."""
    block = _BLOCK.search(output)
    return block is not None and runs("\n".join([block[1], *task.checks]))


def templates() -> tuple[Template, ...]:
    """All templates of the family."""
    splits = {"wide": _DESIGNS, "train": _DESIGNS, "unseen": _HELD_OUT}
    return tuple(
        Template(d.__name__.strip("_"), partial(_draw, d), s) for s, designs in splits.items() for d in designs
    )


# --- Vocabulary ---

Steps = list[tuple[str, Any]]


@dataclass(frozen=True)
class _Function:
    """A function without its name: ``trace`` gives named intermediate values and the result for its arguments."""

    args: str
    does: str
    body: tuple[str, ...]
    trace: Callable[..., tuple[Steps, Any]]
    inputs: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class _Piece:
    """A step in words, as an expression of ``{v}``, and as a callable."""

    words: str
    code: str
    apply: Callable[[Any], Any]


_NUMBER_NOUNS = (
    ("scores", "score"), ("prices", "price"), ("ages", "age"), ("sizes", "size"), ("weights", "weight"),
    ("numbers", "number"), ("values", "value"), ("lengths", "length"), ("levels", "level"), ("steps", "step"),
)  # fmt: skip
_VERBS = ("shape", "pick", "collect", "combine", "reduce", "handle", "process", "work_out", "build", "check", "scan")
_WORDS = (
    "apple", "river", "stone", "cloud", "tiger", "lamp", "bread", "violin", "garden", "moon", "forest", "ship", "candle",
    "bird", "winter", "glass", "door", "music", "sand", "pepper", "rain", "table", "leaf", "cotton", "mirror", "salt",
)  # fmt: skip


def _condition(rng: Random) -> _Piece:
    k = rng.randint(3, 15)
    d = rng.choice((3, 4, 5))
    return rng.choice(
        (
            _Piece(f"greater than {k}", f"{{v}} > {k}", lambda v: v > k),
            _Piece(f"less than {k}", f"{{v}} < {k}", lambda v: v < k),
            _Piece(f"at least {k}", f"{{v}} >= {k}", lambda v: v >= k),
            _Piece(f"at most {k}", f"{{v}} <= {k}", lambda v: v <= k),
            _Piece("even", "{v} % 2 == 0", lambda v: v % 2 == 0),
            _Piece("odd", "{v} % 2 == 1", lambda v: v % 2 == 1),
            _Piece(f"divisible by {d}", f"{{v}} % {d} == 0", lambda v: v % d == 0),
            _Piece(f"different from {k}", f"{{v}} != {k}", lambda v: v != k),
        )
    )


def _change(rng: Random) -> _Piece:
    k = rng.randint(2, 9)
    f = rng.choice((2, 3, 4))
    return rng.choice(
        (
            _Piece(f"times {f}", f"{{v}} * {f}", lambda v: v * f),
            _Piece(f"plus {k}", f"{{v}} + {k}", lambda v: v + k),
            _Piece(f"minus {k}", f"{{v}} - {k}", lambda v: v - k),
            _Piece(f"modulo {f}", f"{{v}} % {f}", lambda v: v % f),
            _Piece(f"times {f} plus {k}", f"{{v}} * {f} + {k}", lambda v: v * f + k),
        )
    )


def _aggregate(rng: Random) -> _Piece:
    return rng.choice(
        (
            _Piece("the sum", "sum({v})", sum),
            _Piece("the largest", "max({v}, default=0)", lambda v: max(v, default=0)),
            _Piece("the smallest", "min({v}, default=0)", lambda v: min(v, default=0)),
            _Piece("how many there are", "len({v})", len),
            _Piece("the sorted list", "sorted({v})", sorted),
            _Piece("the reversed list", "{v}[::-1]", lambda v: v[::-1]),
        )
    )


def _word_condition(rng: Random) -> _Piece:
    n = rng.randint(4, 5)
    letter = rng.choice("aeiorst")
    return rng.choice(
        (
            _Piece(f"longer than {n} letters", f"len({{v}}) > {n}", lambda v: len(v) > n),
            _Piece(f"at most {n} letters long", f"len({{v}}) <= {n}", lambda v: len(v) <= n),
            _Piece(f'with the letter "{letter}"', f'"{letter}" in {{v}}', lambda v: letter in v),
            _Piece(f'without the letter "{letter}"', f'"{letter}" not in {{v}}', lambda v: letter not in v),
        )
    )


def _word_change(rng: Random) -> _Piece:
    n = rng.choice((2, 3))
    mark = rng.choice("!?*+")
    return rng.choice(
        (
            _Piece("in upper case", "{v}.upper()", str.upper),
            _Piece("with a capital letter", "{v}.title()", str.title),
            _Piece(f"cut to {n} letters", f"{{v}}[:{n}]", lambda v: v[:n]),
            _Piece(f'with "{mark}" at the end', f'{{v}} + "{mark}"', lambda v: v + mark),
        )
    )


def _lists(rng: Random) -> tuple[tuple[list[int]], ...]:
    return tuple(([rng.randint(1, 15) for _ in range(rng.randint(4, 6))],) for _ in range(3))


def _texts(rng: Random) -> tuple[tuple[str], ...]:
    return tuple((" ".join(rng.sample(_WORDS, rng.randint(4, 5))),) for _ in range(3))


# --- Designs: each draws one function ---


def _filter_map_aggregate(rng: Random) -> _Function:
    many, one = rng.choice(_NUMBER_NOUNS)
    keep, change, total = _condition(rng), _change(rng), _aggregate(rng)

    def trace(values: list[int]) -> tuple[Steps, Any]:
        kept = list(filter(keep.apply, values))
        changed = list(map(change.apply, kept))
        return [("kept", kept), ("changed", changed)], total.apply(changed)

    return _Function(
        many,
        f"keeps each {one} that is {keep.words}, takes it {change.words}, and returns {total.words}",
        (
            f"kept = [{one} for {one} in {many} if {keep.code.format(v=one)}]",
            f"changed = [{change.code.format(v=one)} for {one} in kept]",
            f"return {total.code.format(v='changed')}",
        ),
        trace,
        _lists(rng),
    )


def _map_filter_aggregate(rng: Random) -> _Function:
    many, one = rng.choice(_NUMBER_NOUNS)
    keep, change, total = _condition(rng), _change(rng), _aggregate(rng)

    def trace(values: list[int]) -> tuple[Steps, Any]:
        changed = list(map(change.apply, values))
        kept = list(filter(keep.apply, changed))
        return [("changed", changed), ("kept", kept)], total.apply(kept)

    return _Function(
        many,
        f"takes each {one} {change.words}, keeps it if it is {keep.words}, and returns {total.words}",
        (
            f"changed = [{change.code.format(v=one)} for {one} in {many}]",
            f"kept = [{one} for {one} in changed if {keep.code.format(v=one)}]",
            f"return {total.code.format(v='kept')}",
        ),
        trace,
        _lists(rng),
    )


def _loop_total(rng: Random) -> _Function:
    many, one = rng.choice(_NUMBER_NOUNS)
    keep, change, start = _condition(rng), _change(rng), rng.randint(0, 10)

    def trace(values: list[int]) -> tuple[Steps, Any]:
        total, totals = start, []
        for value in filter(keep.apply, values):
            total += change.apply(value)
            totals.append(total)
        return [("total", totals)], total

    return _Function(
        many,
        f"starts with {start}, adds each {one} {change.words} if it is {keep.words}, and returns the total",
        (
            f"total = {start}",
            f"for {one} in {many}:",
            f"    if {keep.code.format(v=one)}:",
            f"        total += {change.code.format(v=one)}",
            "return total",
        ),
        trace,
        _lists(rng),
    )


def _branch_total(rng: Random) -> _Function:
    many, one = rng.choice(_NUMBER_NOUNS)
    keep, start, k = _condition(rng), rng.randint(5, 20), rng.randint(1, 9)

    def trace(values: list[int]) -> tuple[Steps, Any]:
        total, totals = start, []
        for value in values:
            total = total + value if keep.apply(value) else total - k
            totals.append(total)
        return [("total", totals)], total

    return _Function(
        many,
        f"starts with {start}, adds each {one} that is {keep.words}, subtracts {k} for any other, and returns the total",
        (
            f"total = {start}",
            f"for {one} in {many}:",
            f"    if {keep.code.format(v=one)}:",
            f"        total += {one}",
            "    else:",
            f"        total -= {k}",
            "return total",
        ),
        trace,
        _lists(rng),
    )


def _clamp(rng: Random) -> _Function:
    many, one = rng.choice(_NUMBER_NOUNS)
    low, high = rng.randint(2, 8), rng.randint(10, 16)
    change, total = _change(rng), _aggregate(rng)

    def trace(values: list[int]) -> tuple[Steps, Any]:
        clamped = [sorted((low, value, high))[1] for value in values]
        changed = list(map(change.apply, clamped))
        return [("clamped", clamped), ("changed", changed)], total.apply(changed)

    return _Function(
        many,
        f"clamps each {one} to {low} through {high}, takes it {change.words}, and returns {total.words}",
        (
            f"clamped = [max({low}, min({high}, {one})) for {one} in {many}]",
            f"changed = [{change.code.format(v=one)} for {one} in clamped]",
            f"return {total.code.format(v='changed')}",
        ),
        trace,
        _lists(rng),
    )


def _running_total(rng: Random) -> _Function:
    many, one = rng.choice(_NUMBER_NOUNS)
    cap, reset = rng.randint(20, 40), rng.randint(0, 5)

    def trace(values: list[int]) -> tuple[Steps, Any]:
        total, totals = 0, []
        for value in values:
            total += value
            if total > cap:
                total = reset
            totals.append(total)
        return [("total", totals)], totals

    return _Function(
        many,
        f"returns the running totals of the {many}, where a total above {cap} is set back to {reset}",
        (
            "total = 0",
            "totals = []",
            f"for {one} in {many}:",
            f"    total += {one}",
            f"    if total > {cap}:",
            f"        total = {reset}",
            "    totals.append(total)",
            "return totals",
        ),
        trace,
        _lists(rng),
    )


def _grades(rng: Random) -> _Function:
    many, one = rng.choice(_NUMBER_NOUNS)
    low, high = rng.randint(4, 8), rng.randint(10, 16)
    small, middle, large = rng.choice(
        (("low", "fair", "high"), ("red", "blue", "green"), ("cold", "warm", "hot"), ("bad", "fine", "great"))
    )

    def trace(values: list[int]) -> tuple[Steps, Any]:
        grades = [(small, middle, large)[(value >= low) + (value >= high)] for value in values]
        return [(large, grades.count(large)), (small, grades.count(small))], grades

    return _Function(
        many,
        f'names each {one} "{small}" below {low}, "{middle}" below {high}, "{large}" otherwise, and returns the names',
        (
            "names = []",
            f"for {one} in {many}:",
            f"    if {one} < {low}:",
            f'        names.append("{small}")',
            f"    elif {one} < {high}:",
            f'        names.append("{middle}")',
            "    else:",
            f'        names.append("{large}")',
            "return names",
        ),
        trace,
        _lists(rng),
    )


def _positions(rng: Random) -> _Function:
    many, one = rng.choice(_NUMBER_NOUNS)
    first, change, total = rng.choice((0, 1)), _change(rng), _aggregate(rng)

    def trace(values: list[int]) -> tuple[Steps, Any]:
        chosen = [value for i, value in enumerate(values) if i >= first and (i - first) % 2 == 0]
        changed = list(map(change.apply, chosen))
        return [("chosen", chosen), ("changed", changed)], total.apply(changed)

    return _Function(
        many,
        f"chooses every second {one} from index {first} on, takes it {change.words}, and returns {total.words}",
        (
            f"chosen = {many}[{first}::2]",
            f"changed = [{change.code.format(v=one)} for {one} in chosen]",
            f"return {total.code.format(v='changed')}",
        ),
        trace,
        _lists(rng),
    )


def _join_words(rng: Random) -> _Function:
    arg = rng.choice(("text", "line", "sentence", "phrase"))
    keep, change, mark = _word_condition(rng), _word_change(rng), rng.choice(("-", "_", "/", ", "))

    def trace(text: str) -> tuple[Steps, Any]:
        kept = list(filter(keep.apply, text.split()))
        return [("kept", kept)], mark.join(map(change.apply, kept))

    return _Function(
        arg,
        f'keeps the words {keep.words}, puts each word {change.words}, and joins them with "{mark}"',
        (
            f"words = {arg}.split()",
            f"kept = [word for word in words if {keep.code.format(v='word')}]",
            f"changed = [{change.code.format(v='word')} for word in kept]",
            f'return "{mark}".join(changed)',
        ),
        trace,
        _texts(rng),
    )


def _branch_words(rng: Random) -> _Function:
    arg = rng.choice(("text", "line", "sentence", "phrase"))
    keep, change, mark = _word_condition(rng), _word_change(rng), rng.choice(("-", "_", "/", ", "))

    def trace(text: str) -> tuple[Steps, Any]:
        changed = [change.apply(word) if keep.apply(word) else word for word in text.split()]
        return [("changed", changed)], mark.join(changed)

    return _Function(
        arg,
        f'puts each word {keep.words} {change.words}, leaves any other word, and joins them with "{mark}"',
        (
            "changed = []",
            f"for word in {arg}.split():",
            f"    if {keep.code.format(v='word')}:",
            f"        changed.append({change.code.format(v='word')})",
            "    else:",
            "        changed.append(word)",
            f'return "{mark}".join(changed)',
        ),
        trace,
        _texts(rng),
    )


def _word_lengths(rng: Random) -> _Function:
    arg = rng.choice(("text", "line", "sentence", "phrase"))
    keep, change, total = _word_condition(rng), _change(rng), _aggregate(rng)

    def trace(text: str) -> tuple[Steps, Any]:
        lengths = list(map(len, filter(keep.apply, text.split())))
        changed = list(map(change.apply, lengths))
        return [("lengths", lengths), ("changed", changed)], total.apply(changed)

    return _Function(
        arg,
        f"takes the lengths of the words {keep.words}, each {change.words}, and returns {total.words}",
        (
            f"words = {arg}.split()",
            f"lengths = [len(word) for word in words if {keep.code.format(v='word')}]",
            f"changed = [{change.code.format(v='length')} for length in lengths]",
            f"return {total.code.format(v='changed')}",
        ),
        trace,
        _texts(rng),
    )


def _count_keys(rng: Random) -> _Function:
    many = rng.choice(("votes", "colors", "labels", "tags"))
    few, least = rng.sample(_WORDS, 3), rng.choice((1, 2, 3))

    def trace(votes: list[str]) -> tuple[Steps, Any]:
        counts = {vote: votes.count(vote) for vote in votes}
        return [("counts", counts)], sorted(key for key in counts if counts[key] >= least)

    return _Function(
        many,
        f"counts the {many} and returns the sorted list of those that occur at least {least} times",
        (
            "counts = {}",
            f"for {many[:-1]} in {many}:",
            f"    counts[{many[:-1]}] = counts.get({many[:-1]}, 0) + 1",
            f"return sorted(key for key in counts if counts[key] >= {least})",
        ),
        trace,
        tuple((rng.choices(few, k=6),) for _ in range(3)),
    )


def _count_letters(rng: Random) -> _Function:
    arg = rng.choice(("text", "line", "sentence", "phrase"))
    letters, weight, start = "".join(sorted(rng.sample("aeilnorst", 3))), rng.randint(2, 9), rng.randint(0, 20)

    def trace(text: str) -> tuple[Steps, Any]:
        found = [char for char in text if char in letters]
        return [("found", "".join(found)), ("count", len(found))], start + weight * len(found)

    return _Function(
        arg,
        f'counts the characters that are in "{letters}", multiplies the count by {weight}, and adds {start}',
        (
            "count = 0",
            f"for char in {arg}:",
            f'    if char in "{letters}":',
            "        count += 1",
            f"return count * {weight} + {start}",
        ),
        trace,
        tuple((text.rsplit(" ", 2)[0],) for (text,) in _texts(rng)),
    )


_DESIGNS = (
    _filter_map_aggregate, _loop_total, _branch_total, _clamp, _running_total, _grades, _join_words, _branch_words,
    _count_keys, _count_letters,
)  # fmt: skip
_HELD_OUT = (_map_filter_aggregate, _positions, _word_lengths)


# --- From a function to a task ---

_PROMPTS = (
    "Write a Python function `{head}` that {does}. Trace it for {call}.",
    "I need a Python function `{head}`. It {does}. Also show what happens for {call}.",
    "Define `{head}` in Python: it {does}. Explain the result for {call}.",
)


def _draw(design: Callable[[Random], _Function], rng: Random) -> Task:
    function = design(rng)
    name = f"{rng.choice(_VERBS)}_{function.args.split(', ')[0]}"
    head = f"{name}({function.args})"
    shown = ", ".join(map(_literal, function.inputs[0]))
    steps, result = function.trace(*function.inputs[0])
    lines = [f"def {head}:", f'    """It {function.does}."""']
    if '"' in function.does:
        lines[1] = f"    '''It {function.does}.'''"
    lines += [f"    {line}" for line in function.body]
    traced = " and ".join(f"{key} is {_literal(value)}" for key, value in steps)
    closing = f"For {shown}: {traced}.\nSo `{name}` returns {_literal(result)}."
    if len(steps) == 1 and steps[0][0] == "total":
        closing = f"For {shown}: total goes through {_literal(steps[0][1])}.\nSo `{name}` returns {_literal(result)}."
    checks = tuple(
        f"assert {name}({', '.join(map(_literal, args))}) == {_literal(function.trace(*args)[1])}"
        for args in function.inputs
    )
    prompt = rng.choice(_PROMPTS).format(head=head, does=function.does, call=shown)
    answer = "```python\n" + "\n".join(lines) + f"\n```\n{closing}"
    return Task("code", design.__name__.strip("_"), prompt, answer, checks)


def _literal(value: Any) -> str:
    """``repr`` with double quotes."""
    return repr(value).replace("'", '"')
