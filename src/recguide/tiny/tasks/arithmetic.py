"""Word problems with worked solutions: templates of GSM-Symbolic, and composed stories of chained events."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any

from ...errors import MissingDependencyError
from .task import Task, Template

# Generators of reasoning_gym's `gsm_symbolic` whose worked solutions are sound and need integers only.
_GSM = {"wide": (10, 31, 39, 72), "train": (10, 72), "unseen": (12, 30, 54, 95)}
_LARGEST = {"wide": 60, "train": 24, "unseen": 60}

_NAMES = ("Maya", "Liam", "Nora", "Omar", "Ella", "Hugo", "Iris", "Jonas", "Lena", "Felix", "Ruth", "Tom", "Ada", "Ben")
_ANSWER = re.compile(r"####\s*(-?\d+)")


def score(task: Task, output: str) -> bool:
    """Whether the number after the last ``####`` is the final answer."""
    found = _ANSWER.findall(output)
    return bool(found) and int(found[-1]) == int(task.checks[0])


@cache
def templates() -> tuple[Template, ...]:
    """All templates of the family; needs reasoning_gym."""
    seen = [world for world in _WORLDS if not world.held_out]
    stories = {"wide": (_WIDE, seen), "train": (_NARROW, seen), "unseen": (_NARROW, [w for w in _WORLDS if w.held_out])}
    return tuple(
        template
        for split, (numbers, worlds) in stories.items()
        for template in (
            *(Template(f"gsm-{n}", partial(_draw_gsm, n, _LARGEST[split]), split) for n in _GSM[split]),
            *(Template(f"story-{w.name}", partial(_draw_story, w, numbers), split) for w in worlds),
        )
    )


# --- GSM-Symbolic ---


@cache
def _gsm_generators() -> dict[int, Callable[[Random, float], dict[str, Any]]]:
    try:
        from reasoning_gym.arithmetic.gsm_symbolic import gsm_symbolic  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise MissingDependencyError('The math tasks need reasoning-gym: pip install "recguide[train]".') from error
    generators: dict[int, Callable[[Random, float], dict[str, Any]]] = gsm_symbolic.GSMSymbolicDataset(
        gsm_symbolic.GSMSymbolicDatasetConfig(seed=0, size=1)
    ).generators
    return generators


def _draw_gsm(number: int, largest: int, rng: Random) -> Task:
    generate = _gsm_generators()[number]
    while True:
        example = generate(rng, 1.0)
        question, solution, answer = example["question"], example["metadata"]["answer_cot"], example["answer"]
        if _is_plain(f"{question}\n{solution}", largest):
            break
    givens, wanted = _split_question(question)
    steps = _normalise(solution).split("\n")[:-1]
    lines = [f"We know: {givens}", f"We want: {wanted}", *(f"{i}. {step}" for i, step in enumerate(steps, 1))]
    lines += [f"So the answer is {answer}.", f"#### {answer}"]
    return Task("math", f"gsm-{number}", question, "\n".join(lines), (answer,))


def _is_plain(text: str, largest: int) -> bool:
    """Only ASCII, and only integers from 0 to `largest`."""
    return (
        text.isascii()
        and not re.search(r"\d[.,]\d|%|= ?\$?-", text)
        and all(int(n) <= largest for n in re.findall(r"\d+", text))
    )


def _split_question(question: str) -> tuple[str, str]:
    """The sentences before the last one, and the last one."""
    givens, _, wanted = question.strip().rpartition(". ")
    return f"{givens}.", wanted


def _normalise(solution: str) -> str:
    """One spelling of operators, full stops at line ends, and one addition at a time in sums of plain numbers."""
    text = re.sub(r"(?<=\d)\s*([*x/+=-])\s*(?=\$?\d)", lambda m: f" {m[1].replace('x', '*')} ", solution.strip())
    text = re.sub(r"(\$?\d+(?: \+ \$?\d+){2,}) =", _chain_sum, text)
    return "\n".join(line.strip().rstrip(".") + "." for line in text.split("\n"))


def _chain_sum(match: re.Match[str]) -> str:
    unit = "$" if match[1].startswith("$") else ""
    terms = [int(n) for n in re.findall(r"\d+", match[1])]
    chain = [match[1]]
    while len(terms) > 2:
        terms[:2] = [terms[0] + terms[1]]
        chain.append(" + ".join(f"{unit}{term}" for term in terms))
    return " = ".join(chain) + " ="


# --- Composed stories ---


@dataclass(frozen=True)
class _World:
    """Words of a story; ``{who}``, ``{n}``, ``{thing}`` and ``{friend}`` are filled in."""

    name: str
    things: tuple[str, ...]
    start: str
    gains: tuple[str, ...]
    losses: tuple[str, ...]
    grows: tuple[str, ...]
    shares: tuple[str, ...]
    question: str
    held_out: bool = False


_WORLDS = (
    _World(
        "market", ("apples", "pears", "plums", "lemons", "melons"),
        "{who} brings {n} {thing} to the market",
        ("{who} picks {n} more {thing}", "{who} buys {n} {thing} from {friend}"),
        ("{who} sells {n} of the {thing}", "{who} throws away {n} bad {thing}"),
        ("a delivery makes it {n} times as many {thing}",),
        ("{who} packs the {thing} into {n} equal crates and keeps one crate",),
        "How many {thing} does {who} have at the end?",
    ),
    _World(
        "library", ("books", "maps", "comics", "records"),
        "A library has {n} {thing} on a shelf",
        ("{who} returns {n} {thing}", "{who} donates {n} new {thing}"),
        ("{friend} borrows {n} {thing}", "{who} moves {n} {thing} to the cellar"),
        ("the library grows to {n} times as many {thing}",),
        ("the {thing} are split over {n} equal shelves and only one shelf stays",),
        "How many {thing} are on the shelf now?",
    ),
    _World(
        "bakery", ("rolls", "cakes", "buns", "tarts", "pies"),
        "{who} bakes {n} {thing} in the morning",
        ("{who} bakes {n} more {thing}", "{friend} brings {n} {thing}"),
        ("{who} sells {n} {thing}", "{friend} eats {n} of the {thing}"),
        ("{who} bakes until there are {n} times as many {thing}",),
        ("{who} puts the {thing} on {n} equal trays and sells all trays but one",),
        "How many {thing} are left in the bakery?",
    ),
    _World(
        "bus", ("people", "children", "tourists", "players"),
        "A bus leaves the station with {n} {thing}",
        ("{n} {thing} get on at the bridge", "{n} {thing} get on at the school"),
        ("{n} {thing} get off at the park", "{n} {thing} get off at the lake"),
        ("at the harbour it fills up to {n} times as many {thing}",),
        ("the {thing} form {n} equal groups and only one group stays on the bus",),
        "How many {thing} are on the bus at the end?",
    ),
    _World(
        "beach", ("shells", "stones", "feathers", "corks"),
        "{who} walks to the beach with {n} {thing} in a bag",
        ("{who} finds {n} more {thing}", "{who} gets {n} {thing} from {friend}"),
        ("{who} drops {n} of the {thing}", "{who} gives {n} {thing} to {friend}"),
        ("the next wave brings enough for {n} times as many {thing}",),
        ("{who} makes {n} equal piles of {thing} and takes only one pile",),
        "How many {thing} are in the bag of {who} now?",
    ),
    _World(
        "game", ("points", "coins", "stars", "gems"),
        "{who} starts a game with {n} {thing}",
        ("{who} wins {n} {thing}", "{who} earns {n} {thing} for a puzzle"),
        ("{who} loses {n} {thing} to {friend}", "{who} pays {n} {thing} for a hint"),
        ("a lucky card gives {who} {n} times as many {thing}",),
        ("{who} divides the {thing} among {n} players and keeps one share",),
        "How many {thing} does {who} end the game with?",
    ),
    _World(
        "workshop", ("nails", "screws", "boards", "bolts"),
        "There are {n} {thing} in the workshop of {who}",
        ("{who} orders {n} more {thing}", "{friend} leaves {n} {thing} on the bench"),
        ("{who} uses {n} {thing} for a chair", "{friend} takes {n} {thing} away"),
        ("a new box makes it {n} times as many {thing}",),
        ("{who} sorts the {thing} into {n} equal boxes and keeps one box",),
        "How many {thing} are in the workshop in the evening?",
    ),
    _World(
        "farm", ("hens", "sheep", "goats", "ducks", "geese"),
        "{who} has {n} {thing} on the farm",
        ("{who} buys {n} {thing}", "{n} young {thing} are born"),
        ("{who} sells {n} {thing} to {friend}", "{n} {thing} run away"),
        ("after a good year there are {n} times as many {thing}",),
        ("{who} splits the {thing} into {n} equal herds and keeps one herd",),
        "How many {thing} live on the farm now?",
    ),
    _World(
        "garden", ("roses", "tulips", "beans", "ferns"),
        "{who} has {n} {thing} in the garden",
        ("{who} plants {n} more {thing}", "{who} gets {n} {thing} from {friend}"),
        ("{who} cuts {n} of the {thing}", "the snails eat {n} {thing}"),
        ("in spring there are {n} times as many {thing}",),
        ("{who} puts the {thing} into {n} equal beds and keeps one bed",),
        "How many {thing} are in the garden at the end?",
        held_out=True,
    ),
    _World(
        "office", ("letters", "boxes", "files", "cards"),
        "{who} starts the day at the office with {n} {thing}",
        ("{friend} brings {n} {thing}", "{who} finds {n} more {thing}"),
        ("{who} sends {n} {thing} to {friend}", "{who} throws away {n} {thing}"),
        ("a delivery makes it {n} times as many {thing}",),
        ("{who} sorts the {thing} into {n} equal piles and keeps one pile",),
        "How many {thing} does {who} have now?",
        held_out=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class _Scope:
    """The numbers of a story, and who may take part beside its hero."""

    start: tuple[int, int]
    largest: int
    friends: tuple[str, ...]


_WIDE = _Scope(start=(8, 45), largest=60, friends=_NAMES)
_NARROW = _Scope(start=(6, 18), largest=20, friends=("a friend",))

_OPENERS = ("Then", "Next,", "After that,", "Later,")
_RESULTS = {"+": "so now there are {m} {thing}", "-": "so {m} {thing} are left", "*": "which makes {m} {thing}"}


def _draw_story(world: _World, scope: _Scope, rng: Random) -> Task:
    who, other = rng.sample(_NAMES, 2)
    friend = other if other in scope.friends else scope.friends[0]
    thing = rng.choice(world.things)
    value = rng.randint(*scope.start)
    fill = partial(str.format, who=who, friend=friend, thing=thing)
    story = [f"{fill(world.start, n=value)}."]
    lines = [f"At the start there are {value} {thing}."]
    for i in range(rng.randint(3, 6)):
        sign, n = _draw_step(value, scope.largest, rng)
        words = fill(rng.choice({"+": world.gains, "-": world.losses, "*": world.grows, "/": world.shares}[sign]), n=n)
        opener = "First," if i == 0 else rng.choice(_OPENERS)
        result = {"+": value + n, "-": value - n, "*": value * n, "/": value // n}[sign]
        story.append(f"{opener} {words}.")
        so = fill(_RESULTS.get(sign, _RESULTS["-"]), m=result)
        lines.append(f"{opener} {words}: {value} {sign} {n} = {result}, {so}.")
        value = result
    question = fill(world.question)
    lines += [f"That was the last change, and the question was: {question}", f"The answer is {value} {thing}."]
    lines.append(f"#### {value}")
    return Task("math", f"story-{world.name}", " ".join([*story, question]), "\n".join(lines), (str(value),))


def _draw_step(value: int, largest: int, rng: Random) -> tuple[str, int]:
    """An operation with a one-digit number that keeps the running value a whole number from 2 to `largest`."""
    factors = [n for n in (2, 3) if value * n <= largest]
    divisors = [n for n in (2, 3) if value % n == 0 and value // n >= 4]
    signs = (
        ["+"] * (3 * (value <= largest - 9))
        + ["-"] * (3 * (value >= 11))
        + ["*"] * bool(factors)
        + ["/"] * bool(divisors)
    )
    sign = rng.choice(signs)
    if sign in "+-":
        return sign, rng.randint(2, 9)
    return sign, rng.choice(factors if sign == "*" else divisors)
