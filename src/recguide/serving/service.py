"""The way of a request through the server: from its body to requests in tokens, past the bounded queue, and back to text."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateError

from ..config import RecGuideConfig
from ..errors import InputError
from ..hf_outputs import TokenLogprobs
from ..hf_strategy import resolve_config
from ..loading import conversation_ids
from ..sampling import row_seed
from .observer import Figures
from .protocol import ChatRequest, CompletionRequest, Speculation
from .texts import VisibleText
from .tokens import Round, TokenRequest, TokenSource

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
"""Why an answer ended, in the engine's words and in OpenAI's."""


class ContextExceeded(InputError):
    """Prompt and answer do not fit into the model's context together; `field` is the one to shorten."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class Overloaded(Exception):
    """The queue is full."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ShuttingDown(Overloaded):
    """The server takes no more."""


@dataclass(frozen=True)
class Limits:
    """
    What a server takes on.

    Args:
        running (`int`): answers written at once.
        waiting (`int`): further answers that may wait; whoever comes then is sent away.
        seconds (`float`): that a request may take from its arrival to its end.
        context (`int`): tokens that prompt and answer may have together.
    """

    running: int
    waiting: int
    seconds: float
    context: int


@dataclass(frozen=True)
class Piece:
    """
    What an answer has grown by.

    Args:
        index (`int`): which of the request's answers.
        text (`str`): may be empty.
        tokens (`list[int]`), logprobs (`list[TokenLogprobs]`, *optional*): of a round; the text may lag behind them.
        finish_reason (`str`, *optional*): `stop` or `length`, with the answer's last piece.
    """

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None


@dataclass
class Exchange:
    """
    A request being answered.

    Args:
        requests (`list[TokenRequest]`): one for each answer.
        strategy (`str`): that it is decoded with.
        prompt_tokens (`int`): of its prompts, each counted once.
        seed (`int`, *optional*): that the answers' seeds come from.
        figures (`dict[int, Figures]`): of the answers that have ended.
        finish_reasons (`list[str]`): of the answers that have ended, in the order of their ends.
        completion_tokens (`int`): written so far.
    """

    requests: list[TokenRequest]
    strategy: str
    prompt_tokens: int
    seed: int | None
    figures: dict[int, Figures] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)
    completion_tokens: int = 0

    def total(self, name: str) -> int:
        """A count of all answers together."""
        return sum(getattr(figures, name) for figures in self.figures.values())

    def longest(self, name: str) -> float:
        """A time of the answer for which it is longest."""
        return max((getattr(figures, name) for figures in self.figures.values()), default=0.0)


class Service:
    """
    Answers requests with one model.

    Args:
        name (`str`): the model's, as requests call it.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): the model's.
        source (`TokenSource`): decodes.
        limits (`Limits`): what is taken on.
        sampling (`dict`): temperature, top_p, top_k and min_p of requests that name none.
        speculation (`RecGuideConfig`): of requests that name none; see [`set_speculation`].
        check (callable, *optional*): raises where the model cannot be decoded by a config, or its tables are missing.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        source: TokenSource,
        limits: Limits,
        sampling: dict[str, Any],
        speculation: RecGuideConfig,
        check: Callable[[RecGuideConfig], None] = lambda config: None,
    ) -> None:
        self.name, self.tokenizer, self.limits = name, tokenizer, limits
        self.speculation = speculation
        self.under_way = 0
        """Answers taken on and not yet ended."""
        self.is_draining = False
        self.created = int(time.time())
        self._source, self._sampling, self._check = source, sampling, check
        self._usual_seconds = 1.0

    # --- from bodies to tokens ---

    def exchange(self, body: ChatRequest | CompletionRequest) -> Exchange:
        """
        What is to be decoded for a request. Tokenizes, so it takes its time: not for the event loop.

        Raises:
            RecGuideError: it cannot be answered.
        """
        prompts = self._prompts(body)
        config = self.config_of(body.recguide)
        seed = None
        options = self._options(body, config)
        if options["do_sample"]:
            seed = secrets.randbits(63) if body.seed is None else body.seed
        elif (body.n or 1) > 1:
            raise InputError(f"n={body.n} with temperature=0: greedy decoding has one answer. Raise the temperature.")
        requests = []
        for row in range(len(prompts) * (body.n or 1)):
            ids = prompts[row // (body.n or 1)]
            own = {"max_new_tokens": self._most_tokens(body, len(ids))}
            if seed is not None:
                own["seed"] = row_seed(seed, row)
            requests.append(TokenRequest(ids, options | own, body.stops, body.wanted_schema))
        return Exchange(requests, config.strategy, sum(map(len, prompts)), seed)

    def config_of(self, asked: Speculation | None) -> RecGuideConfig:
        """The server's speculation with a request's changes; another strategy starts from its own defaults."""
        changes, usual = {} if asked is None else asked.options(), self.speculation
        strategy = changes.get("strategy", usual.strategy)
        kept = dict(vars(usual)) if strategy == usual.strategy else {"tables": usual.tables}
        return resolve_config(strategy, kept | changes)

    def set_speculation(self, wanted: Speculation) -> None:
        """
        Change the speculation of requests that name none, from now on.

        Raises:
            RecGuideError: it is no such speculation, or not one for this model.
        """
        config = self.config_of(wanted)
        self._check(config)
        self.speculation = config

    def _prompts(self, body: ChatRequest | CompletionRequest) -> list[list[int]]:
        if isinstance(body, ChatRequest):
            return [self._chat_ids(body)]
        return [self._prompt_ids(prompt) for prompt in body.prompts]

    def _chat_ids(self, body: ChatRequest) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise InputError(f"{self.name} has no chat template. Use /v1/completions.")
        messages = [message.plain for message in body.messages]
        variables = body.chat_template_kwargs or {}
        # Arguments of the method are not the template's: they would replace it, or cut everybody's prompts.
        if reserved := sorted(
            variables.keys() & inspect.signature(self.tokenizer.apply_chat_template).parameters.keys()
        ):
            raise InputError(
                f"chat_template_kwargs cannot set {', '.join(reserved)}; it is for the template's own variables."
            )
        try:
            ids: list[int] = conversation_ids(self.tokenizer, messages, **variables)[0].tolist()
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(f"The model's chat template does not take these messages: {error}") from error
        return ids

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        ids: list[int] = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        if not ids:
            raise InputError("The prompt is empty; expected at least one token.")
        return ids

    def _most_tokens(self, body: ChatRequest | CompletionRequest, prompt_tokens: int) -> int:
        left = self.limits.context - prompt_tokens
        wanted = body.most_tokens
        if left < 1:
            raise ContextExceeded(
                f"The model's context is {self.limits.context} tokens and the prompt has {prompt_tokens}. Shorten it.",
                "messages" if isinstance(body, ChatRequest) else "prompt",
            )
        if wanted is not None and wanted > left:
            raise ContextExceeded(
                f"The model's context is {self.limits.context} tokens; the prompt has {prompt_tokens}, which leaves {left} for the answer, "
                f"and {wanted} are asked for. Ask for fewer.",
                "max_tokens",
            )
        most = left if wanted is None else wanted
        if (body.min_tokens or 0) > most:
            raise InputError(f"min_tokens={body.min_tokens}, but the answer may have {most} at the most.")
        return most

    def _options(self, body: ChatRequest | CompletionRequest, config: RecGuideConfig) -> dict[str, Any]:
        options: dict[str, Any] = {
            "generation_strategy": config.strategy,
            "recguide_config": {name: value for name, value in vars(config).items() if name not in config.changed},
            "do_sample": False,
        }
        sampling = self._sampling | {
            name: value for name in self._sampling if (value := getattr(body, name)) is not None
        }
        if sampling["temperature"] > 0:
            options |= sampling | {"do_sample": True, "top_k": max(sampling["top_k"], 0)}
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            if (value := getattr(body, name)) is not None:
                options[name] = value
        if body.min_tokens:
            options["min_new_tokens"] = body.min_tokens
        if body.ignore_eos:
            options["eos_token_id"] = None
        if body.logit_bias:
            options["sequence_bias"] = [[[int(token)], float(bias)] for token, bias in body.logit_bias.items()]
        if body.token_logprobs is not None:
            options |= {"output_logprobs": True, "top_logprobs": body.token_logprobs}
        return options

    # --- the queue ---

    @contextlib.contextmanager
    def place(self, answers: int) -> Iterator[None]:
        """
        Room for so many answers, given back on leaving.

        Raises:
            Overloaded, ShuttingDown: there is none.
            InputError: there never is.
        """
        room = self.limits.running + self.limits.waiting
        if answers > room:
            raise InputError(f"The request asks for {answers} answers at once; the server takes {room}. Send several.")
        if self.is_draining:
            raise ShuttingDown("The server is shutting down.", retry_after=math.ceil(self._usual_seconds))
        if self.under_way + answers > room:
            rounds = (self.under_way - self.limits.running) / self.limits.running
            raise Overloaded(
                f"{self.under_way} answers are being written or waiting, and the server takes {room}. Try again later.",
                retry_after=max(1, math.ceil(rounds * self._usual_seconds)),
            )
        self.under_way += answers
        began = time.perf_counter()
        try:
            yield
            self._usual_seconds += 0.1 * (time.perf_counter() - began - self._usual_seconds)
        finally:
            self.under_way -= answers

    # --- from tokens to text ---

    async def answers(self, exchange: Exchange, deadline: float) -> AsyncGenerator[Piece]:
        """
        The pieces of all answers as they come. Leaving the iteration ends them.

        Args:
            exchange (`Exchange`): the request.
            deadline (`float`): by the event loop's clock.

        Raises:
            RecGuideError: it cannot be decoded so.
            TimeoutError: it took too long.
        """
        pieces: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._answer(index, request, exchange, pieces))
            for index, request in enumerate(exchange.requests)
        ]
        open_answers = len(tasks)
        try:
            while open_answers:
                async with asyncio.timeout_at(deadline):
                    item = await pieces.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    open_answers -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, index: int, request: TokenRequest, exchange: Exchange, pieces: asyncio.Queue[Any]) -> None:
        text = VisibleText(self.tokenizer, request.stop)
        try:
            async with contextlib.aclosing(self._source.decode(request)) as rounds:
                async for item in rounds:
                    if isinstance(item, Round):
                        exchange.completion_tokens += len(item.tokens)
                        piece = Piece(index, text.push(item.tokens), item.tokens, item.logprobs)
                    elif item.reason in FINISH_REASONS:
                        exchange.figures[index] = item.figures
                        piece = Piece(index, text.finish(), [], None, FINISH_REASONS[item.reason])
                    else:
                        raise ShuttingDown("The server has ended the request: it is shutting down.", retry_after=1)
                    pieces.put_nowait(piece)
            pieces.put_nowait(None)
        except Exception as error:
            pieces.put_nowait(error)
