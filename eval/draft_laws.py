"""What drafts look like: probabilities and later tokens of blocks of 32, beside what the verifier puts there.

    python eval/draft_laws.py --prompts 40 --json src/recguide/data/drafts.json

Of it the simulator makes drafts of requests of which only the acceptance is known (`recguide.simulated_model`). The embedded model writes
texts with the strategy linear; a round tells which drafted tokens were accepted and which one was rejected, the finished
text which later ones are right.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Annotated, Any

import numpy as np
import torch
import typer

from recguide import Engine, EngineConfig
from recguide.calibration import LARGEST_BLOCK
from recguide.files import whole
from recguide.hooks import Hook
from recguide.loading import TINY, chat_ids, load
from recguide.simulated_model import LEFT
from recguide.structs import Guess, Outcome, RoundRecord
from recguide.tiny.tasks import FAMILIES, make_task

COMMAND = "python eval/draft_laws.py --prompts {prompts} --json src/recguide/data/drafts.json"
FIRST = 10**9
"""Number of the first prompt of each family; far from those that the embedded model was trained on."""
NEW_TOKENS = 192
LARGEST = 1 - 1e-6
"""Probability; a larger one has a logit that says more of rounding than of the draft."""
STEPS = np.linspace(0, 1, 21)
STRETCHES = (0.5, 0.97)
"""
Set by hand, not fitted: which part of a normal score is shared with the tokens around it, and how much of that is kept from one to the
next. So tokens `apart` from each other correlate by `shared * memory**apart`; the file says what was measured.
"""
NEAR, FAR = 1, 8
"""Tokens apart, where the correlation is measured."""

WHAT = (
    "drafted tokens beside what the verifier puts there. logit: 21 quantiles (0, 5, … 100 %) of the logit of the best token's probability, "
    "of accepted tokens by how many tokens it is to the first rejected one (16 or more, 8 to 15, 4 to 7, 2 or 3, 1), of first rejected "
    "ones, of later ones that are right and wrong, of all; wrong: share of wrong ones; share: 21 quantiles of the second token's share of "
    "the remaining probability, of accepted tokens, of first rejected ones whose second choice is the verifier's, of the other rejected "
    "ones, of all; correlation: of accepted tokens' probabilities, as a part that is shared and how much of it is kept from token to "
    "token; set by hand: {set} between neighbours and {set_far} eight tokens apart, where normal scores of the logits have {near} and "
    "{far}, and {own_near} and {own_far} each in the law of its own kind; later: how often a token after the first rejected one is right, "
    "after a right one (or the first rejected) and after a wrong one, where a draft begun anew behind the rejected token is right, is "
    "first rejected, and beyond that"
)
SOURCE = (
    "recguide-tiny, float32, greedy: {prompts} prompts of the train split (numbers 10**9 to 10**9 + {last}) of each family of "
    "recguide.tiny.tasks, up to {new_tokens} new tokens, strategy linear with blocks of {block}; the records of on_commit compared with "
    "the finished texts; {command}"
)


@dataclass(frozen=True)
class Request:
    rounds: list[RoundRecord]
    tokens: list[int]
    """Of prompt and output."""


@dataclass(frozen=True)
class Drafted:
    """A drafted token: what is known of it, and what became of it."""

    kind: str
    """`accepted N` (see [`~simulated_model.LEFT`]), `rejected`, `later_right` or `later_wrong`."""
    logit: float
    share: float
    second: bool = False
    """Whether the verifier put the second choice there; of rejected ones."""
    setting: tuple[str, int] | None = None
    """Of a later one: what is before it (`after_right`, `after_wrong`), and whether a draft begun anew is right, first rejected (1) or
    beyond that (2) there; none where no such draft was begun."""


class Rounds(Hook):
    def __init__(self) -> None:
        self.of: dict[int, list[RoundRecord]] = defaultdict(list)

    def on_commit(self, record: RoundRecord) -> None:
        self.of[record.request].append(record)


def record(model: Any, prompts: Sequence[list[int]], new_tokens: int) -> list[Request]:
    rounds = Rounds()
    options = {"generation_strategy": "linear", "recguide_config": {"block_size": LARGEST_BLOCK}}
    with Engine(model, EngineConfig(max_requests=8), [rounds]) as engine:
        results = engine.generate_batch(prompts, max_new_tokens=new_tokens, do_sample=False, **options)
    return [
        Request(rounds.of[result.request_id], [*prompt, *result.tokens])
        for prompt, result in zip(prompts, results, strict=True)
    ]


def blocks(request: Request) -> Iterator[list[Drafted]]:
    """The drafted tokens of each whole block, up to the text's end."""
    for this, following in zip(request.rounds, [*request.rounds[1:], None], strict=True):
        if this.outcome is not Outcome.STOPPED and this.block_size == LARGEST_BLOCK:
            yield [*_up_to_rejected(this), *_later(this, following, request.tokens)]


def _up_to_rejected(this: RoundRecord) -> Iterator[Drafted]:
    guesses, error = this.draft.guesses, this.accepted
    for i, guess in enumerate(guesses[:error]):
        left = LEFT[0] if error == len(guesses) else next(number for number in LEFT if number <= error - i)
        yield _drafted(f"accepted {left}", guess)
    if error < len(guesses):
        yield _drafted("rejected", guesses[error], second=this.committed[-1] == guesses[error].alternatives[0])


def _later(this: RoundRecord, following: RoundRecord | None, tokens: Sequence[int]) -> Iterator[Drafted]:
    error, before = this.accepted, "after_right"
    known = tokens[this.position + 2 + error :]
    for i, (guess, token) in enumerate(zip(this.draft.guesses[error + 1 :], known, strict=False)):
        setting = None
        if following is not None and following.block_size > 1:
            setting = before, 0 if i < following.accepted else 1 if i == following.accepted else 2
        right = guess.token == token
        yield _drafted("later_right" if right else "later_wrong", guess, setting=setting)
        before = "after_right" if right else "after_wrong"


def _drafted(kind: str, guess: Guess, **more: Any) -> Drafted:
    probability = min(guess.probability, LARGEST)
    rest = 1 - probability
    return Drafted(kind, log(probability / rest), min(guess.second_probability / rest, 1), **more)


def laws(drafts: Sequence[Sequence[Drafted]]) -> dict[str, Any]:
    """Of what is drawn for single tokens."""
    logits, shares, later = defaultdict(list), defaultdict(list), defaultdict(list)
    everything = [token for draft in drafts for token in draft]
    for token in everything:
        for kind in (token.kind, "all"):
            logits[kind].append(token.logit)
        if not token.kind.startswith("later"):
            chosen = "second" if token.second else "other"
            for kind in (chosen if token.kind == "rejected" else "right", "all"):
                shares[kind].append(token.share)
        elif token.setting:
            later[token.setting].append(token.kind == "later_right")
    wrong = fmean(token.kind in ("rejected", "later_wrong") for token in everything)
    return {
        "tokens": {kind: len(values) for kind, values in logits.items()},
        "logit": {kind: _quantiles(values, 2) for kind, values in logits.items()},
        "wrong": round(wrong, 4),
        "share": {kind: _quantiles(values, 3) for kind, values in shares.items()},
        "later": {
            before: [round(fmean(later[before, anew]), 3) for anew in range(3)]
            for before in ("after_right", "after_wrong")
        },
    }


def _quantiles(values: Sequence[float], digits: int) -> list[float]:
    found: list[float] = np.round(np.quantile(values, STEPS), digits).tolist()
    return found


def correlation(drafts: Sequence[Sequence[Drafted]], apart: int, own_laws: bool) -> float:
    """Of normal scores of accepted tokens so far apart in one draft: of ranks in the law of their own kind, or of all kinds together."""
    pairs = [pair for scores in _scores(drafts, own_laws) for pair in zip(scores, scores[apart:], strict=False)]
    return float(np.corrcoef(np.array(pairs).T)[0, 1])


def _scores(drafts: Sequence[Sequence[Drafted]], own_laws: bool) -> list[list[float]]:
    """Normal scores of the accepted tokens of each draft."""
    accepted = [
        [(token.kind if own_laws else "", token.logit) for token in draft if token.kind.startswith("accepted")]
        for draft in drafts
    ]
    values = defaultdict(list)
    for kind, logit in (token for draft in accepted for token in draft):
        values[kind].append(logit)
    law = {kind: np.sort(logits) for kind, logits in values.items()}

    def score(kind: str, logit: float) -> float:
        below, up_to = (int(np.searchsorted(law[kind], logit, side)) for side in ("left", "right"))
        return NormalDist().inv_cdf((below + up_to) / 2 / len(law[kind]))

    return [[score(*token) for token in draft] for draft in accepted]


def report(requests: Sequence[Request], prompts: int) -> dict[str, Any]:
    """What the file says; `prompts` of each family."""
    drafts = [draft for request in requests for draft in blocks(request)]
    shared, memory = STRETCHES
    correlations = {
        "set": shared * memory**NEAR,
        "set_far": shared * memory**FAR,
        "near": correlation(drafts, NEAR, own_laws=False),
        "far": correlation(drafts, FAR, own_laws=False),
        "own_near": correlation(drafts, NEAR, own_laws=True),
        "own_far": correlation(drafts, FAR, own_laws=True),
    }
    found = laws(drafts)
    return {
        "what": WHAT.format(**{name: f"{value:.2f}" for name, value in correlations.items()}),
        "source": SOURCE.format(
            prompts=prompts,
            last=prompts - 1,
            new_tokens=NEW_TOKENS,
            block=LARGEST_BLOCK,
            command=COMMAND.format(prompts=prompts),
        ),
        **{name: found[name] for name in ("tokens", "logit", "wrong", "share")},
        "correlation": list(STRETCHES),
        "later": found["later"],
    }


def written(figures: dict[str, Any]) -> str:
    """JSON with a line for each list."""
    parts = []
    for name, value in figures.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict) and isinstance(next(iter(value.values())), list):
            inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
            text = f"{{\n{inner}\n }}"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(
    prompts: Annotated[int, typer.Option(min=1, help="Of each family.")] = 40,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Print the laws of drafts."""
    torch.set_num_threads(1)
    model, tokenizer = load(TINY, "float32", "cpu")
    texts = [
        chat_ids(tokenizer, make_task(family, "train", FIRST + i).prompt)[0].tolist()
        for i in range(prompts)
        for family in FAMILIES
    ]
    text = written(report(record(model, texts, NEW_TOKENS), prompts))
    print(text, end="")
    if json_file:
        with whole(json_file) as file:
            file.write_text(text)


if __name__ == "__main__":
    typer.run(main)
