"""Text as it comes: whole characters only, for threads and for asyncio, and an end that frees everything."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AsyncTextIteratorStreamer, AutoTokenizer, PreTrainedTokenizerBase, TextIteratorStreamer

import recguide
from recguide import InputError, NemotronLabsDiffusionModel, UnsupportedError
from recguide.streaming import TextDecoder, TextStream, stream
from recguide.testing import toy_model

PROMPT = torch.tensor([[300, 301, 302, 303]])
STRATEGIES = ("ar", "linear", "quadratic", "recguide", "auto")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level, so that a character of several bytes is several tokens."""
    return AutoTokenizer.from_pretrained(recguide.tiny_path())


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase) -> NemotronLabsDiffusionModel:
    return toy_model(vocab_size=len(tokenizer), num_hidden_layers=1, mask_token_id=tokenizer.mask_token_id)


def arguments(strategy: str, **more: Any) -> dict[str, Any]:
    return {"inputs": PROMPT, "max_new_tokens": 40, "generation_strategy": strategy, "pad_token_id": 0, **more}


@given(text=st.text(max_size=40), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=30))
def test_pieces_join_to_the_text_and_split_no_character(
    tokenizer: PreTrainedTokenizerBase, text: str, sizes: list[int]
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    decoder = TextDecoder(tokenizer)
    pieces, at = [], 0
    for i in range(len(ids)):
        size = sizes[i % len(sizes)]
        pieces.append(decoder.push(ids[at : at + size]))
        at += size
    assert "".join(pieces) + decoder.finish() == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


def test_what_is_broken_at_the_end_still_comes(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.encode("ok 猫", add_special_tokens=False)[:-1]
    decoder = TextDecoder(tokenizer)
    given_out = decoder.push(ids)
    assert given_out + decoder.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stream_gives_the_text_of_generate(
    model: NemotronLabsDiffusionModel, tokenizer: PreTrainedTokenizerBase, strategy: str
) -> None:
    expected = model.generate(**arguments(strategy))
    with stream(model, tokenizer, **arguments(strategy)) as pieces:
        got = list(pieces)
        assert len(got) > 5
        assert list(pieces) == [], "a second look finds the end, and does not wait"
    assert "".join(got) == tokenizer.decode(expected[0, 4:], skip_special_tokens=True)
    assert torch.equal(pieces.output, expected)


def test_two_streams_at_once_for_asyncio(model: NemotronLabsDiffusionModel, tokenizer: PreTrainedTokenizerBase) -> None:
    async def read(seed: int) -> str:
        pieces = stream(model, tokenizer, **arguments("recguide", do_sample=True, seed=seed))
        return "".join([piece async for piece in pieces])

    async def both() -> list[str]:
        return list(await asyncio.gather(read(1), read(2)))

    for seed, text in zip((1, 2), asyncio.run(both()), strict=True):
        expected = model.generate(**arguments("ar", do_sample=True, seed=seed))
        assert text == tokenizer.decode(expected[0, 4:], skip_special_tokens=True)


def test_an_error_comes_out_of_the_stream(
    model: NemotronLabsDiffusionModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(UnsupportedError, match="paged"):
        list(stream(model, tokenizer, **arguments("recguide", cache_implementation="paged")))

    async def read() -> list[str]:
        return [
            piece async for piece in stream(model, tokenizer, **arguments("recguide", cache_implementation="paged"))
        ]

    with pytest.raises(UnsupportedError, match="paged"):
        asyncio.run(read())


def test_leaving_early_ends_the_generation(
    model: NemotronLabsDiffusionModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    with stream(model, tokenizer, **arguments("recguide", max_new_tokens=400)) as pieces:
        first = next(iter(pieces))
    assert first
    assert pieces.output is None, "it did not run to its end"
    assert not any(t.name == "recguide-stream" for t in threading.enumerate())
    assert torch.equal(model.generate(**arguments("recguide")), model.generate(**arguments("ar"))), (
        "the model is as it was"
    )


def test_an_asyncio_consumer_that_leaves_does_no_harm(
    model: NemotronLabsDiffusionModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    async def read_one() -> TextStream:
        pieces = stream(model, tokenizer, **arguments("recguide", max_new_tokens=200))
        async for _ in pieces:
            break
        return pieces

    pieces = asyncio.run(read_one())
    pieces.close()


def test_bad_input(model: NemotronLabsDiffusionModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(InputError, match="streamer"):
        stream(model, tokenizer, streamer=None, **arguments("recguide"))
    with pytest.raises(UnsupportedError, match="one row"):
        list(stream(model, tokenizer, **arguments("recguide", inputs=PROMPT.repeat(2, 1))))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_streamers_of_transformers(
    model: NemotronLabsDiffusionModel, tokenizer: PreTrainedTokenizerBase, strategy: str
) -> None:
    expected = tokenizer.decode(model.generate(**arguments(strategy))[0, 4:], skip_special_tokens=True)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(streamer=streamer, **arguments(strategy))
    assert "".join(streamer) == expected

    async def read() -> str:
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        thread = threading.Thread(target=lambda: model.generate(streamer=streamer, **arguments(strategy)))
        thread.start()
        text = "".join([piece async for piece in streamer])
        thread.join()
        return text

    assert asyncio.run(read()) == expected
