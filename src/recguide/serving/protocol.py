"""The bodies of requests: OpenAI's, vLLM's sampling parameters beyond them, and `recguide` for speculation.

Nothing is ignored: an unknown field is refused, and one that is known but cannot be honoured passes only with a value that asks for
nothing (`_NEUTRAL`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from ..hf_call import MOST_TOP_LOGPROBS

MOST_CHOICES = 128
"""`n`, as of OpenAI."""
MOST_PROMPTS = 1024
MOST_STOPS = 16
MOST_SCHEMA = 65536
"""Characters of a JSON schema; to compile one takes its time."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
"""Fields of OpenAI's that are not honoured, each with the values that ask for nothing."""


class NotHonoured(ValueError):
    """A known field asks for something that is not offered."""

    def __init__(self, field: str, value: Any) -> None:
        super().__init__(f"{field}={value!r} cannot be honoured here. Leave it out.")
        self.field = field


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Speculation(_Body):
    """Options of [`RecGuideConfig`], but for those that belong to the server: how forwards are run, and where tables lie."""

    strategy: str | None = None
    block_size: int | None = None
    policy: str | None = None
    delta: float | None = None
    max_corrections: int | None = None
    continuation: bool | None = None
    reuse: bool | None = None
    exclude_eos_replacement: bool | None = None
    draft_threshold: float | None = None

    def options(self) -> dict[str, Any]:
        """Those that are set."""
        return self.model_dump(exclude_none=True)


class JsonSchema(_Body):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, JsonValue], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and that with it.")
        if self.json_schema is not None and (size := len(json.dumps(self.json_schema.schema_))) > MOST_SCHEMA:
            raise ValueError(f"The schema has {size} characters; up to {MOST_SCHEMA} are compiled.")
        return self

    @property
    def wanted(self) -> dict[str, Any] | None:
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else dict(self.json_schema.schema_)


class _Common(_Body):
    """What both kinds of request have."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: (
        dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    user: Annotated[str, Field(max_length=128)] | None = None
    recguide: Speculation | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_honoured(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = dict(given)
        for field in _NEUTRAL.keys() & given.keys() - cls.model_fields.keys():
            if not any(given[field] == value and type(given[field]) is type(value) for value in _NEUTRAL[field]):
                raise NotHonoured(field, given[field])
            del kept[field]
        return kept

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream=true only.")
        if "" in self.stops:
            raise ValueError("stop has an empty sequence, which would end every text before it begins.")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def token_logprobs(self) -> int | None:
        """Likeliest tokens whose log-probabilities are wanted beside each token's own; None: not even those."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """Tokens that an answer may have; None: as many as the model's context leaves."""
        raise NotImplementedError

    @property
    def wanted_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must satisfy."""
        return None if self.response_format is None else self.response_format.wanted


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None

    @property
    def plain(self) -> dict[str, str]:
        """As chat templates want it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text} | (
            {"name": self.name} if self.name is not None else {}
        )


class ChatRequest(_Common):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs=true only.")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are the same; they differ here. Give one.")
        return self

    @property
    def token_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every refusal."""

    error: ErrorDetail


TokenIds = Annotated[list[int], Field(fail_fast=True, min_length=1)]
"""A prompt in tokens."""


class CompletionRequest(_Common):
    """Body of `/v1/completions`."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def token_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        # OpenAI's default for this endpoint.
        return 16 if self.max_tokens is None else self.max_tokens
