from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from recguide import Engine
from recguide.loading import chat_ids
from recguide.serving.texts import StopSequences, VisibleText
from recguide.tiny.examples import EXAMPLES


class Letters:
    """A tokenizer whose token i is a piece of text."""

    pieces = ("a", "b", "ab", "ba", "aab", " ", "")

    def decode(self, tokens: list[int], **options: Any) -> str:
        return "".join(self.pieces[token] for token in tokens)


@given(
    st.lists(st.lists(st.integers(0, 6), max_size=4), max_size=12),
    st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3),
)
def test_shown_is_the_text_up_to_the_first_stop_sequence(rounds: list[list[int]], stop: list[str]) -> None:
    text = VisibleText(Letters(), stop)
    shown = ""
    for tokens in rounds:
        shown += text.push(tokens)
        assert not any(sequence in shown for sequence in stop)
    shown += text.finish()
    whole = Letters().decode([token for tokens in rounds for token in tokens])
    ends = [whole.find(sequence) for sequence in stop if sequence in whole]
    # Whichever sequence is complete first ends the text; of those that end with the same token, the one that begins first.
    if not ends:
        assert (shown, text.stopped) == (whole, None)
    else:
        assert text.stopped in stop
        assert whole.startswith(shown + text.stopped)
        assert not any(sequence in shown for sequence in stop)


@given(
    st.lists(st.integers(0, 6), max_size=30), st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_nothing_is_held_back_that_no_stop_sequence_can_begin_with(tokens: list[int], stop: list[str]) -> None:
    text, shown, whole = VisibleText(Letters(), stop), "", ""
    for token in tokens:
        shown, whole = shown + text.push([token]), whole + Letters.pieces[token]
        if text.stopped is None:
            held = whole.removeprefix(shown)
            assert not held or any(sequence.startswith(held) for sequence in stop)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.text("ab ", min_size=1, max_size=4), st.integers(0, 5))
def test_the_criterion_stops_at_the_token_that_completes_a_sequence(tokens: list[int], stop: str, prompt: int) -> None:
    criterion = StopSequences(Letters(), [stop], prompt)
    for length in range(prompt + 1, len(tokens) + 1):
        answer = Letters().decode(tokens[prompt:length])
        assert criterion(torch.tensor([tokens[:length]]), None) == (stop in answer)
        if stop in answer:
            break


def test_an_engine_stops_where_the_text_does(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    ids = chat_ids(tokenizer, next(iter(EXAMPLES.values())))[0].tolist()
    with Engine(model) as engine:
        whole = tokenizer.decode(engine.add_request(ids, max_new_tokens=60).result(60).tokens)
        stop = whole[20:23]
        rule = StopSequences(tokenizer, [stop], len(ids))
        for strategy in ("ar", "linear", "recguide", "auto"):
            result = engine.add_request(
                ids, max_new_tokens=60, stopping_criteria=[rule], generation_strategy=strategy
            ).result(60)
            assert result.reason == "stop"
            text = tokenizer.decode(result.tokens)
            assert stop in text
            assert stop not in tokenizer.decode(result.tokens[:-1])
            assert whole.startswith(text)
