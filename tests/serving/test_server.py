"""A server and the clients that people have: openai's, curl, and HTTP that is not as it should be."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from recguide import CalibrationError, RecGuideConfig
from recguide.loading import chat_ids
from recguide.tiny.examples import EXAMPLES

Running = Any  # conftest's, which no test can import
KEY = "a-key-that-nobody-guesses"
PROMPT = EXAMPLES["math"]
MESSAGES = [{"role": "user", "content": PROMPT}]
ALL = ["ar", "linear", "quadratic", "recguide", "auto"]


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "recguide-tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0} | changes


def completion(**changes: Any) -> dict[str, Any]:
    return {"model": "recguide-tiny", "prompt": "def f(", "max_tokens": 8, "temperature": 0} | changes


# --- what comes back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ALL)
def test_a_chat_is_what_generate_writes(server: Running, strategy: str) -> None:
    ids = chat_ids(server.tokenizer, PROMPT)[0].tolist()
    answer = server.client().chat.completions.create(**chat(), extra_body={"recguide": {"strategy": strategy}})
    assert answer.choices[0].message.content == server.text(ids, max_new_tokens=24)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 24)
    about = answer.model_extra["recguide"]  # type: ignore[index]
    assert about["strategy"] == strategy
    details = answer.usage.completion_tokens_details
    assert details is not None
    if strategy == "ar":
        assert (about["rounds"], details.accepted_prediction_tokens) == (23, 0)
    else:
        assert about["rounds"] < 23
        # A token a round is the verifier's own, and the first one the prefill's.
        assert details.accepted_prediction_tokens == 23 - about["rounds"]


def test_a_stream_is_a_round_an_event_and_joins_to_the_answer(server: Running) -> None:
    whole = server.client().chat.completions.create(**chat())
    chunks = list(
        server.client().chat.completions.create(**chat(), stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(piece or "" for piece in pieces) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    # The role, then the prefill's token, the rounds, the end, and the usage; a round without new text has no event.
    assert len(chunks) <= chunks[-1].model_extra["recguide"]["rounds"] + 4  # type: ignore[index]
    assert len({chunk.id for chunk in chunks}) == 1


def test_n_answers_are_those_of_generate_with_the_seed(server: Running) -> None:
    answer = server.client().completions.create(
        **completion(temperature=0.8, max_tokens=12), n=3, seed=7, extra_body={"top_k": 20}
    )
    ids = server.tokenizer("def f(", return_tensors="pt")["input_ids"]
    wanted = server.model.generate(
        ids, attention_mask=ids.new_ones(ids.shape), generation_strategy="recguide", do_sample=True, temperature=0.8,
        top_k=20, seed=7, num_return_sequences=3, max_new_tokens=12,
    )  # fmt: skip
    assert [choice.text for choice in answer.choices] == server.tokenizer.batch_decode(
        wanted[:, ids.shape[1] :], skip_special_tokens=True
    )
    assert len({choice.text for choice in answer.choices}) > 1
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_the_seed_that_was_drawn_gives_the_same_text_again(server: Running) -> None:
    first = server.client().completions.create(**completion(temperature=1.0))
    seed = first.model_extra["recguide"]["seed"]  # type: ignore[index]
    for strategy in ("ar", "recguide"):
        again = server.client().completions.create(
            **completion(temperature=1.0), seed=seed, extra_body={"recguide": {"strategy": strategy}}
        )
        assert again.choices[0].text == first.choices[0].text


def test_prompts_come_as_texts_and_as_tokens(server: Running) -> None:
    texts = ["def f(", "Tom has"]
    ids = [server.tokenizer(text)["input_ids"] for text in texts]
    together = server.client().completions.create(**completion(prompt=texts))
    as_tokens = server.client().completions.create(**completion(prompt=ids))
    one = server.client().completions.create(**completion(prompt=ids[1]))
    wanted = [server.text(prompt, max_new_tokens=8) for prompt in ids]
    assert [choice.text for choice in together.choices] == wanted
    assert [choice.text for choice in as_tokens.choices] == wanted
    assert [choice.text for choice in one.choices] == wanted[1:]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(map(len, ids))


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_ends_the_text_and_is_not_in_it(server: Running, stream: bool) -> None:
    whole = server.client().chat.completions.create(**chat(max_tokens=60)).choices[0].message.content or ""
    stop = whole[17:20]
    body = chat(max_tokens=60, stop=[stop, "never in it"], stream=stream)
    if stream:
        events = list(server.client().chat.completions.create(**body))
        text = "".join(event.choices[0].delta.content or "" for event in events)
        reason = events[-1].choices[0].finish_reason
    else:
        choice = server.client().chat.completions.create(**body).choices[0]
        text, reason = choice.message.content or "", choice.finish_reason
    assert (text, reason) == (whole[: whole.index(stop)], "stop")


def test_logprobs_are_the_models_own(server: Running) -> None:
    answer = server.client().chat.completions.create(**chat(max_tokens=6), logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    for token in content:
        # Greedy: the likeliest one was taken.
        assert (token.token, token.logprob) == (token.top_logprobs[0].token, token.top_logprobs[0].logprob)
        assert [other.logprob for other in token.top_logprobs] == sorted(
            (other.logprob for other in token.top_logprobs), reverse=True
        )
        assert bytes(token.bytes or []).decode() == token.token
    plain = server.client().completions.create(**completion(logprobs=2)).choices[0]
    assert plain.logprobs is not None
    assert "".join(plain.logprobs.tokens or []) == plain.text
    assert plain.logprobs.text_offset == [
        len("".join((plain.logprobs.tokens or [])[:i])) for i in range(len(plain.logprobs.tokens or []))
    ]
    assert all(len(top) == 2 for top in plain.logprobs.top_logprobs or [])
    streamed = [
        token
        for event in server.client().chat.completions.create(**chat(max_tokens=6), logprobs=True, stream=True)
        for token in (event.choices[0].logprobs.content or [] if event.choices[0].logprobs else [])
    ]
    assert [token.token for token in streamed] == [token.token for token in content]


def test_penalties_bias_and_length_are_generates(server: Running) -> None:
    ids = server.tokenizer("def f(")["input_ids"]
    strategy = {"generation_strategy": "ar"}
    first = server.client().completions.create(**completion(max_tokens=1), logprobs=0).choices[0]
    banned = ids_of(server, first.text)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5, **strategy}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5, **strategy}),
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"logit_bias": {str(banned): -100}}, {"sequence_bias": [[[banned], -100.0]]}),
        ({"min_tokens": 20}, {"min_new_tokens": 20}),
    ]
    for wire, options in cases:
        answer = server.post("/v1/completions", completion(max_tokens=24, **wire)).json()
        assert answer["choices"][0]["text"] == server.text(ids, max_new_tokens=24, **options), wire


def ids_of(server: Running, text: str) -> int:
    (token,) = server.tokenizer(text, add_special_tokens=False)["input_ids"]
    return int(token)


def test_ignore_eos_writes_to_the_limit(server: Running) -> None:
    ended = server.post("/v1/chat/completions", chat(max_tokens=400)).json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    tokens = ended["usage"]["completion_tokens"]
    on = server.post("/v1/chat/completions", chat(max_tokens=tokens + 5, ignore_eos=True)).json()
    assert on["usage"]["completion_tokens"] == tokens + 5
    assert on["choices"][0]["finish_reason"] == "length"


def test_a_schema_is_kept_to(server: Running) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"]}
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema | {"additionalProperties": False}},
    }
    answer = server.client().chat.completions.create(**chat(max_tokens=40), response_format=wanted)
    assert json.loads(answer.choices[0].message.content or "")["answer"] in ("yes", "no")
    assert answer.choices[0].finish_reason == "stop"


def test_the_model_is_listed(server: Running) -> None:
    (model,) = server.client().models.list().data
    assert model.id == "recguide-tiny"
    assert server.client().models.retrieve("recguide-tiny") == model
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        server.client().models.retrieve("other")


def test_speculation_changes_at_run_time(start: Callable[..., Running]) -> None:
    server = start()
    shown = httpx.get(server.url + "/recguide/speculation").json()
    assert (shown["strategy"], shown["block_size"]) == ("auto", 16)
    changed = httpx.put(server.url + "/recguide/speculation", json={"strategy": "linear", "block_size": 8})
    assert (changed.status_code, changed.json()["block_size"]) == (200, 8)
    assert server.post("/v1/completions", completion()).json()["recguide"]["strategy"] == "linear"
    own = server.post("/v1/completions", completion(recguide={"strategy": "ar"})).json()
    assert own["recguide"]["strategy"] == "ar"
    wrong = httpx.put(server.url + "/recguide/speculation", json={"block_size": 7})
    assert wrong.status_code == 400
    assert "block_size must be one of" in wrong.json()["error"]["message"]
    assert httpx.get(server.url + "/recguide/speculation").json() == changed.json()


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "status", "field", "words"),
    [
        ({"model": "gpt"}, 404, "model", "'gpt' is not served here"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "cannot be honoured"),
        ({"reasoning_effort": "high"}, 400, "reasoning_effort", "cannot be honoured"),
        ({"modalities": ["audio"]}, 400, "modalities", "cannot be honoured"),
        ({"store": 0}, 400, "store", "cannot be honoured"),
        ({"surprise": 1}, 400, "surprise", "not permitted"),
        ({"temperature": "1"}, 400, "temperature", "number"),
        ({"temperature": 2.5}, 400, "temperature", "less than or equal to 2"),
        ({"top_p": 0}, 400, "top_p", "greater than 0"),
        ({"n": 0}, 400, "n", "greater than or equal to 1"),
        ({"n": True}, 400, "n", "integer"),
        ({"n": 2}, 400, None, "greedy decoding has one answer"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 100000}, 400, "max_tokens", "context is 2048 tokens"),
        ({"max_completion_tokens": 5}, 400, None, "Give one"),
        ({"seed": -1}, 400, "seed", "greater than or equal to 0"),
        ({"stop": ["x", ""]}, 400, None, "empty sequence"),
        ({"stop": [1]}, 400, "stop.0", "string"),
        ({"stream_options": {"include_usage": True}}, 400, None, "stream=true"),
        ({"top_logprobs": 2}, 400, None, "logprobs=true"),
        ({"logit_bias": {"a": 1}}, 400, None, "pattern"),
        ({"logit_bias": {"5": 101}}, 400, None, "less than or equal to 100"),
        ({"messages": []}, 400, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": ""}]}, 400, "messages.0.role", "'system'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            400,
            "messages.0.content.0.type",
            "'text'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages.0.content.0.text", "required"),
        ({"messages": [{"role": "user", "content": "x" * 30000}]}, 400, "messages", "context is 2048 tokens"),
        ({"chat_template_kwargs": {"chat_template": "{{ 'x' * 9 }}"}}, 400, None, "cannot set chat_template"),
        ({"chat_template_kwargs": {"truncation": True, "max_length": 2}}, 400, None, "max_length, truncation"),
        ({"chat_template_kwargs": {"tools": []}}, 400, None, "cannot set tools"),
        ({"logit_bias": {"1000000": 1}}, 400, None, "vocabulary"),
        ({"logit_bias": {"9" * 5000: 1}}, 400, None, "pattern"),
        ({"logit_bias": {"05": 1}}, 400, None, "pattern"),
        ({"min_tokens": 50}, 400, None, "may have 24 at the most"),
        ({"user": "u" * 129}, 400, "user", "128"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": "x" * 70000}}}},
            400,
            None,
            "up to 65536",
        ),
        ({"recguide": {"strategy": "fast"}}, 400, None, "Unknown generation_strategy"),
        ({"recguide": {"block_size": 7}}, 400, None, "block_size must be one of"),
        ({"recguide": {"tables": "/etc"}}, 400, "recguide.tables", "not permitted"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            400,
            None,
            "llguidance",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_name(
    server: Running, changes: dict[str, Any], status: int, field: str | None, words: str
) -> None:
    for stream in (False, True):
        answer = server.post("/v1/chat/completions", chat(**({"stream": stream} | changes)))
        if "stream_options" in changes and stream:
            assert answer.status_code == 200
            continue
        error = answer.json()["error"]
        assert answer.status_code == status, answer.text
        assert words in error["message"]
        if field is not None:
            assert error["param"] == field


def test_neutral_values_of_what_is_not_offered_pass(server: Running) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "store": False,
        "service_tier": "auto",
        "user": "u",
        "metadata": None,
    }
    assert server.post("/v1/chat/completions", chat(max_tokens=2, **neutral)).status_code == 200
    assert (
        server.post("/v1/completions", completion(max_tokens=2, echo=False, best_of=1, suffix=None)).status_code == 200
    )


@pytest.mark.parametrize(
    ("content", "headers", "status", "words"),
    [
        (b'{"model": ', {"content-type": "application/json"}, 400, "not JSON"),
        (b"\xff\xfe", {"content-type": "application/json"}, 400, "JSON"),
        (b"[]", {"content-type": "application/json"}, 400, "object"),
        (b"null", {"content-type": "application/json"}, 400, ""),
        (json.dumps(completion()).encode(), {"content-type": "text/plain"}, 400, ""),
        (b"", {"content-type": "application/json"}, 400, ""),
        (b'{"prompt": NaN}', {"content-type": "application/json"}, 400, ""),
        (
            b'{"model": "recguide-tiny", "prompt": "a", "repetition_penalty": Infinity}',
            {"content-type": "application/json"},
            400,
            "finite",
        ),
        (json.dumps({"prompt": [None] * 100000}).encode(), {"content-type": "application/json"}, 400, ""),
        (b"[" * 100000, {"content-type": "application/json"}, 400, ""),
    ],
)
def test_malformed_bodies_get_400(
    server: Running, content: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    answer = httpx.post(server.url + "/v1/completions", content=content, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]


def test_a_fault_of_ours_is_a_500_also_in_the_log(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = start()

    def fail(body: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(server.service, "exchange", fail)
    with caplog.at_level("INFO", "recguide.requests"):
        answer = server.post("/v1/completions", completion(), headers={"x-request-id": "mine"})
        server.settle()
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert "secret" not in answer.text
    (line,) = [json.loads(record.message) for record in caplog.records if record.name == "recguide.requests"]
    assert (line["status"], line["error"]) == (500, "RuntimeError")
    assert 'status="500"' in httpx.get(server.url + "/metrics").text


def test_tables_that_are_missing_are_told_at_the_start(start: Callable[..., Running], tmp_path: Any) -> None:
    config = RecGuideConfig(policy="verification_guided", tables=str(tmp_path))
    with pytest.raises(CalibrationError):
        start(speculation=config)
    server = start(speculation=RecGuideConfig(strategy="linear", tables=str(tmp_path)))
    wrong = httpx.put(server.url + "/recguide/speculation", json={"policy": "verification_guided"})
    assert wrong.status_code == 400
    assert httpx.get(server.url + "/recguide/speculation").json()["policy"] == "fixed"


def test_a_long_body_gets_413_without_being_read(server: Running) -> None:
    answer = server.post("/v1/completions", completion(prompt="x" * 1_000_000))
    assert answer.status_code == 413
    assert "longer than the 1000000 bytes" in answer.json()["error"]["message"]

    def pieces() -> Any:
        for _ in range(30):
            yield b" " * 50_000

    # Without a length beforehand.
    answer = httpx.post(server.url + "/v1/completions", content=pieces(), timeout=60)
    assert answer.status_code == 413
    assert server.post("/v1/completions", completion(max_tokens=1)).status_code == 200


def test_a_key_is_needed_where_one_is_set(start: Callable[..., Running]) -> None:
    server = start(api_key=KEY)
    for given in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": KEY},
        {"authorization": "Bearer x"},
        {"authorization": "Bearer \xe9"},
    ):
        answer = httpx.get(server.url + "/v1/models", headers={k: v.encode("latin-1") for k, v in given.items()})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.put(server.url + "/recguide/speculation", json={}).status_code == 401
    assert httpx.get(server.url + "/health").status_code == 200
    assert httpx.get(server.url + "/metrics").status_code == 200
    assert server.client(api_key=KEY).models.list().data[0].id == "recguide-tiny"
    with pytest.raises(openai.AuthenticationError):
        server.client().models.list()


def test_foreign_host_names_are_refused_where_no_key_protects(server: Running, start: Callable[..., Running]) -> None:
    foreign = {"host": "evil.example"}
    assert httpx.get(server.url + "/v1/models", headers=foreign).status_code == 400
    assert httpx.get(server.url + "/v1/models", headers={"host": "localhost:1"}).status_code == 200
    with_key = start(api_key=KEY)
    allowed = foreign | {"authorization": f"Bearer {KEY}"}
    assert httpx.get(with_key.url + "/v1/models", headers=allowed).status_code == 200


def test_curl(server: Running) -> None:
    def curl(*arguments: str) -> str:
        done = subprocess.run(
            ["curl", "-sSN", "--max-time", "60", *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout

    body = json.dumps(chat(stream=True))
    out = curl(server.url + "/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body)
    events = out.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    text = "".join(
        json.loads(event.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for event in events[:-1]
    )
    assert text == server.text(chat_ids(server.tokenizer, PROMPT)[0].tolist(), max_new_tokens=24)
    status = curl("-o", "/dev/null", "-w", "%{http_code}", server.url + "/v1/nothing")
    assert status == "404"
