"""Short texts written under rules that a program can check.

A template is a kind of text (story, letter, ...) with a set of rules. Which sentence a text uses follows mostly
from the words of the prompt (each animal, thing and place has phrases of its own), so that it can be learned.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from .task import Task, Template

# --- Rules ---


def _sentences(text: str) -> int:
    """Sentences outside titles, postscripts and separators."""
    body = [line for line in text.split("\n") if not re.match(r"<<|p\.s\.|\*\*\*", line, re.IGNORECASE)]
    return len(re.findall(r"[.!?](?=\s|$)", "\n".join(body)))


def _bullets(text: str) -> list[str]:
    return [line[2:] for line in text.split("\n") if line.startswith("- ")]


def _is_sorted(text: str) -> bool:
    heads = [item.lower() for item in _bullets(text)]
    return len(heads) > 1 and heads == sorted(heads)


def _paragraphs(text: str) -> int:
    parts = [part.strip() for part in text.split("***")]
    return len(parts) if all(parts) else 0


def _includes(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


_RULES: dict[str, Callable[[str, str], bool]] = {
    "sentences": lambda text, n: _sentences(text) == int(n),
    "bullets": lambda text, n: len(_bullets(text)) == int(n),
    "paragraphs": lambda text, n: _paragraphs(text) == int(n),
    "include": _includes,
    "starts": lambda text, phrase: text.startswith(phrase),
    "ends": lambda text, phrase: text.endswith(phrase),
    "sorted": lambda text, _: _is_sorted(text),
    "lowercase": lambda text, _: text == text.lower() and text != "",
    "no-commas": lambda text, _: "," not in text and text != "",
    "title": lambda text, _: re.match(r"<<[^<>\n]+>>\n", text) is not None,
    "postscript": lambda text, _: re.search(r"^P\.S\. \S", text, re.IGNORECASE | re.MULTILINE) is not None,
}


def score(task: Task, output: str) -> bool:
    """Whether ``output`` keeps every rule."""
    text = output.strip()
    return all(_RULES[rule](text, value) for rule, _, value in (check.partition(":") for check in task.checks))


# --- Vocabulary ---

_NAMES = ("Mila", "Otto", "Pia", "Rosa", "Finn", "Greta", "Karl", "Luna", "Max", "Nell", "Sam", "Vera", "Zoe", "Paul")

# animal: (trait, way of moving, favourite saying)
_ANIMALS = {
    "fox": ("clever", "slipped quietly through the grass", "a good plan is half the work"),
    "bear": ("strong", "stomped slowly along the road", "a full belly makes a warm heart"),
    "owl": ("wise", "flew silently over the trees", "the night has many answers"),
    "mouse": ("tiny", "ran quickly under the leaves", "small paws reach far places"),
    "otter": ("playful", "swam merrily down the stream", "every day needs a little splash"),
    "rabbit": ("nervous", "hopped in circles around the hill", "it is better to look twice"),
    "badger": ("grumpy", "dug a long tunnel to the north", "nobody should hurry before noon"),
    "crow": ("curious", "hopped from roof to roof", "shiny things tell the best tales"),
    "frog": ("cheerful", "jumped from stone to stone", "rain is only a song"),
    "wolf": ("lonely", "wandered far across the snow", "friends are found on long roads"),
}
# Outside the `wide` split every animal has a name of its own.
_OWN_NAMES = dict(zip(_ANIMALS, _NAMES, strict=False))
# thing: (adjective, what it did, what it is good for)
_THINGS = {
    "lantern": ("bright", "glowed in the dark", "finding the way at night"),
    "compass": ("brass", "pointed to the old tower", "keeping a straight course"),
    "kettle": ("copper", "whistled like a bird", "making tea for many guests"),
    "blanket": ("woolen", "smelled of summer hay", "keeping warm in winter"),
    "drum": ("wooden", "boomed across the valley", "calling everyone together"),
    "key": ("rusty", "opened a hidden door", "locking up small secrets"),
    "map": ("faded", "showed a secret path", "planning a long journey"),
    "mirror": ("silver", "showed the morning sky", "seeing around dark corners"),
    "rope": ("sturdy", "held tight in the storm", "climbing down steep rocks"),
    "basket": ("woven", "was full of red berries", "carrying fruit back home"),
    "bell": ("golden", "rang three times at dawn", "waking up late sleepers"),
    "umbrella": ("striped", "danced away in the wind", "staying dry in heavy rain"),
    "violin": ("old", "sang a gentle tune", "playing songs by the fire"),
    "bottle": ("green", "held a letter from the sea", "sending a message far away"),
    "hammer": ("heavy", "broke the ice on the pond", "building a solid roof"),
    "candle": ("white", "burned until the morning", "reading stories in bed"),
    "feather": ("blue", "floated softly to the ground", "writing letters to a friend"),
    "ladder": ("tall", "reached up to the moon", "picking the highest apples"),
}
# place: (what it is like, what happens there)
_PLACES = {
    "harbor": ("the ships sleep at noon", "the gulls cried loudly"),
    "forest": ("the pines are older than the town", "the branches whispered"),
    "village": ("everyone knows everyone", "the windows lit up one by one"),
    "mountain": ("the snow never melts", "an echo answered from the peak"),
    "market": ("it smells of fresh bread", "the traders waved and laughed"),
    "island": ("the wind sings all day", "the waves rolled gently in"),
    "meadow": ("the bees hum in the clover", "the flowers opened their petals"),
    "castle": ("the halls are cold and wide", "the flags rose on the towers"),
    "mill": ("the wheel turns day and night", "the water sparkled in the sun"),
    "library": ("the books reach the ceiling", "the pages rustled softly"),
}
_ENDINGS = (
    "And that is how it ended.", "Nobody ever forgot that day.", "It was a good day after all.",
    "The rest is another tale.", "So everyone was happy again.", "Then the stars came out.",
)  # fmt: skip


@dataclass(frozen=True)
class _Draft:
    """A text in the making: what it was asked for in words, its paragraphs of sentences, and its rules."""

    request: str
    topic: str
    parts: tuple[tuple[str, ...], ...]
    checks: tuple[str, ...]
    wishes: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    separator: str = "\n"
    case: Callable[[str], str] = str

    def text(self) -> str:
        body = self.separator.join(" ".join(part) for part in self.parts)
        return self.case("\n".join(filter(None, (self.before, body, self.after))))


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _a(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _people(rng: Random, count: int, own: bool) -> list[tuple[str, str]]:
    """Names, and what a request calls them: each other name, or an animal with its own name."""
    if own:
        return [(_OWN_NAMES[a], f"{_OWN_NAMES[a]} the {a}") for a in rng.sample(tuple(_ANIMALS), count)]
    return [(name, name) for name in rng.sample(_NAMES, count)]


# --- Kinds of text; none of their sentences has a comma, so that "no commas" may be added to any ---


def _story(rng: Random, own: bool) -> _Draft:
    name, animal, place = rng.choice(_NAMES), rng.choice(tuple(_ANIMALS)), rng.choice(tuple(_PLACES))
    name = _OWN_NAMES[animal] if own else name
    things = rng.sample(tuple(_THINGS), rng.choice((2, 2, 3)))
    trait, moved, saying = _ANIMALS[animal]
    like, happened = _PLACES[place]
    opening = (f"{name} was {_a(trait)} {animal} who lived near the {place}.", f"In the {place} {like}.")
    middle = []
    for i, thing in enumerate(things):
        adjective, did, _ = _THINGS[thing]
        found = rng.choice(("found", "noticed")) if i == 0 else "also discovered"
        middle.append(f"One day {name} {found} {_a(adjective)} {thing} that {did}." if i == 0 else
                      f"The {animal} {found} {_a(adjective)} {thing} that {did}.")  # fmt: skip
    closing = (f"{name} {moved} while {happened}.", f"The {animal} said that {saying}.")[: rng.choice((1, 2, 2))]
    parts = (opening, tuple(middle), closing)
    count = sum(map(len, parts))
    request = rng.choice(
        (
            f"Write a story about {name} the {animal} in the {place} with {count} sentences.",
            f"Tell me a tale of exactly {count} sentences. It is about the {animal} {name} and the {place}.",
        )
    )
    wish = rng.choice(("Use the words {}.", "It must mention {}.")).format(_listed(things))
    checks = (f"sentences:{count}", *(f"include:{word}" for word in (name, animal, place, *things)))
    return _Draft(request, f"{name} and the {things[0]}", parts, checks, (wish,))


def _letter(rng: Random, own: bool) -> _Draft:
    (name, called), (friend, friend_called) = _people(rng, 2, own)
    place = rng.choice(tuple(_PLACES))
    things = rng.sample(tuple(_THINGS), 2)
    like, happened = _PLACES[place]
    (first, first_did, _), (second, _, second_use) = (_THINGS[thing] for thing in things)
    parts = (
        (f"Dear {friend}!",),
        (f"I am writing to you from the {place} where {like}.", f"When I arrived {happened}."),
        (
            f"Yesterday I {rng.choice(('saw', 'bought'))} {_a(first)} {things[0]} that {first_did}.",
            f"Please bring me your {second} {things[1]} because it is good for {second_use}.",
        ),
        (f"Your friend {name}.",),
    )
    request = rng.choice(
        (
            f"Write a letter from {called} to {friend_called}. {name} is at the {place}.",
            f"{called} is visiting the {place}. Write the letter that {name} sends to {friend_called}.",
        )
    )
    wish = rng.choice(("It talks about {}.", "Mention {}.")).format(f"the {things[0]} and then the {things[1]}")
    checks = tuple(f"include:{word}" for word in (name, friend, place, *things))
    return _Draft(request, f"News from the {place}", parts, checks, (wish,))


def _advert(rng: Random, own: bool) -> _Draft:
    thing, other = rng.sample(tuple(_THINGS), 2)
    animal, place = rng.choice(tuple(_ANIMALS)), rng.choice(tuple(_PLACES))
    (adjective, did, use), (_, _, other_use) = _THINGS[thing], _THINGS[other]
    parts: tuple[tuple[str, ...], ...] = (
        (f"Do you need a good {thing}?", f"Our {adjective} {thing} is perfect for {use}."),
        (f"Even {_a(_ANIMALS[animal][0])} {animal} would love it.", f"The last one we sold {did}."),
        (f"You get it at the {place} where {_PLACES[place][0]}.", f"We add {_a(other)} for {other_use}."),
    )
    parts = (parts[0], parts[1][: rng.choice((1, 2))], parts[2])
    count = sum(map(len, parts))
    request = rng.choice(
        (
            f"Describe {_a(thing)} for sale at the {place} in {count} sentences.",
            f"Write an advert of exactly {count} sentences for {_a(thing)} sold at the {place}.",
        )
    )
    wish = rng.choice(("Mention {}.", "The text must include {}.")).format(f"{_a(animal)} and {_a(other)}")
    checks = (f"sentences:{count}", *(f"include:{word}" for word in (thing, place, animal, other)))
    return _Draft(request, f"The {adjective} {thing}", parts, checks, (wish,))


def _packing(rng: Random, own: bool) -> _Draft:
    [(name, called)] = _people(rng, 1, own)
    place = rng.choice(tuple(_PLACES))
    things = rng.sample(tuple(_THINGS), rng.randint(4, 6))
    items = [
        f"- {thing}: {_a(_THINGS[thing][0])} one with {len(thing)} letters for {_THINGS[thing][2]}."
        for thing in sorted(things)
    ]
    parts = ((f"Here is what {name} takes to the {place}:",), *((item,) for item in items))
    request = rng.choice(
        (
            f"{called} travels to the {place} and packs {_listed(things)}.",
            f"Make a packing list for {called} at the {place} with {_listed(things)}.",
        )
    )
    wish = rng.choice(("Give one bullet point per thing in alphabetical order.", "Use a sorted list of bullet points."))
    checks = (f"bullets:{len(things)}", "sorted", *(f"include:{word}" for word in (name, place, *things)))
    return _Draft(request, f"Bags for the {place}", parts, checks, (wish,))


def _visitors(rng: Random, own: bool) -> _Draft:
    place = rng.choice(tuple(_PLACES))
    animals = rng.sample(tuple(_ANIMALS), rng.randint(3, 5))
    names = _OWN_NAMES if own else dict(zip(animals, rng.sample(_NAMES, len(animals)), strict=True))
    order = sorted(animals)
    items = [f"- {a}: {names[a]} is {_ANIMALS[a][0]} and says that {_ANIMALS[a][2]}." for a in order]
    parts = ((f"These guests came to the {place} where {_PLACES[place][0]}:",), *((item,) for item in items))
    guests = _listed([f"{names[a]} the {a}" for a in animals])
    request = rng.choice(
        (f"List the guests at the {place}: {guests}.", f"Guests at the {place} are {guests}. Introduce them in a list.")
    )
    wish = rng.choice(
        ("Sort the bullet points by animal.", "Use bullet points with the animals in alphabetical order.")
    )
    called = (names[animal] for animal in animals)
    checks = (f"bullets:{len(animals)}", "sorted", *(f"include:{word}" for word in (place, *animals, *called)))
    return _Draft(request, f"Guests of the {place}", parts, checks, (wish,))


# --- Rules that can be added to any kind ---


def _with(draft: _Draft, wish: str, check: str) -> _Draft:
    return replace(draft, wishes=(*draft.wishes, wish), checks=(*draft.checks, check))


def _add_title(draft: _Draft, rng: Random) -> _Draft:
    wish = rng.choice(("Put a title in <<double angle brackets>> on top.", "Begin with a title like <<title>>."))
    return replace(_with(draft, wish, "title:"), before=f"<<{draft.topic}>>")


def _add_ending(draft: _Draft, rng: Random) -> _Draft:
    ending = rng.choice(_ENDINGS)
    wish = rng.choice(('End with "{}"', 'The last words must be "{}"')).format(ending)
    grown = [c if not c.startswith("sentences:") else f"sentences:{int(c[10:]) + 1}" for c in draft.checks]
    # The sentence that ends the text is one of those the request counts.
    request = re.sub(r"\d+(?= sentences)", lambda m: str(int(m[0]) + 1), draft.request)
    return replace(_with(replace(draft, request=request, checks=tuple(grown)), wish, f"ends:{ending}"), after=ending)


def _add_postscript(draft: _Draft, rng: Random) -> _Draft:
    thing = rng.choice(tuple(_THINGS))
    wish = rng.choice((f'Add a "P.S." about {_a(thing)}.', f'Close with a "P.S." on {_a(thing)}.'))
    after = f"P.S. Do not forget the {_THINGS[thing][0]} {thing} for {_THINGS[thing][2]}."
    return replace(_with(_with(draft, wish, "postscript:"), "", f"include:{thing}"), after=after)


def _add_paragraphs(draft: _Draft, rng: Random) -> _Draft:
    n = len(draft.parts)
    wish = rng.choice((f"Write {n} paragraphs separated by ***.", f"Separate the {n} paragraphs with ***."))
    return replace(_with(draft, wish, f"paragraphs:{n}"), separator="\n***\n")


def _add_lowercase(draft: _Draft, rng: Random) -> _Draft:
    wish = rng.choice(("Use only lowercase letters.", "Write everything in lowercase."))
    return replace(_with(draft, wish, "lowercase:"), case=str.lower)


def _add_no_commas(draft: _Draft, rng: Random) -> _Draft:
    return _with(draft, rng.choice(("Do not use commas.", "Avoid all commas.")), "no-commas:")


def _add_repeat(draft: _Draft, rng: Random) -> _Draft:
    """Repeat the request before the text; for kinds whose sentences are not counted."""
    wish = rng.choice(("First repeat this request up to here.", "Begin by repeating the request up to here."))
    return replace(_with(draft, wish, f"starts:{draft.request}"), before=draft.request)


# --- Templates ---

_Kind = Callable[[Random, bool], _Draft]
_Extra = Callable[[_Draft, Random], _Draft]

_TRAIN: tuple[tuple[_Kind, tuple[_Extra, ...]], ...] = (
    (_story, (_add_title,)),
    (_story, (_add_ending, _add_no_commas)),
    (_story, (_add_paragraphs, _add_no_commas)),
    (_letter, (_add_postscript,)),
    (_letter, (_add_title, _add_no_commas)),
    (_letter, (_add_repeat,)),
    (_advert, (_add_title, _add_postscript)),
    (_advert, (_add_paragraphs,)),
    (_advert, (_add_lowercase, _add_no_commas)),
    (_packing, (_add_title,)),
    (_packing, (_add_repeat,)),
    (_packing, (_add_lowercase,)),
    (_visitors, (_add_ending,)),
    (_visitors, (_add_postscript,)),
)
_UNSEEN: tuple[tuple[_Kind, tuple[_Extra, ...]], ...] = (
    (_story, (_add_postscript,)),
    (_letter, (_add_lowercase,)),
    (_advert, (_add_ending,)),
    (_visitors, (_add_title,)),
)


def templates() -> tuple[Template, ...]:
    """All templates of the family."""
    return tuple(
        Template(name, partial(_draw, name, kind, extras, split != "wide"), split)
        for split, recipes in (("wide", _TRAIN), ("train", _TRAIN), ("unseen", _UNSEEN))
        for kind, extras in recipes
        for name in ["+".join((kind.__name__[1:], *(e.__name__[5:].replace("_", "-") for e in extras)))]
    )


def _draw(name: str, kind: _Kind, extras: tuple[_Extra, ...], own: bool, rng: Random) -> Task:
    draft = kind(rng, own)
    for add in extras:
        draft = add(draft, rng)
    prompt = " ".join(filter(None, (draft.request, *draft.wishes)))
    return Task("text", name, prompt, draft.text(), draft.checks)
