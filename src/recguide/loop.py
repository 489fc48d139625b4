"""From prompts to results: prefill, then rounds until every request is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .adapter import ModelAdapter
from .attention import installed
from .branching import branching_rule
from .calibration import CostProfile, ProgressTable
from .config import RecGuideConfig
from .dense_kv import PAGE_SIZE, DenseKV
from .errors import InputError, UnsupportedError
from .hooks import Hook, Hooks
from .policy import Auto, AutoBranches, FixedBlock, Policies, Tables
from .rounds import Method, Request, plan_blocks, prefill, run_round
from .structs import FinishRecord


@dataclass(frozen=True)
class Result:
    """
    What a batch of requests came to.

    Args:
        requests (`tuple[Request]`): in the order given; `tokens` holds prompt and output, `finished` the reason.
        kv (`DenseKV`): the K/V of all committed tokens but each row's newest.
    """

    requests: tuple[Request, ...]
    kv: DenseKV = field(repr=False)


def method_of(
    config: RecGuideConfig, eos: frozenset[int], adapter: ModelAdapter, policies: Policies | None = None
) -> Method:
    """
    The config's strategy as block policy and branching rule.

    Args:
        config (`RecGuideConfig`): the strategy and its options.
        eos (`frozenset[int]`): end-of-sequence tokens, which no branch supposes; stopping is each request's own rule.
        adapter (`ModelAdapter`): that is to run it.
        policies (`Policies`, *optional*): those in use already.

    Raises:
        UnsupportedError, CheckpointError: the model cannot draft in this way.
        CalibrationError: the policy needs tables, and there are none for this setup.
    """
    if config.strategy == "ar":
        return Method(FixedBlock(1), branching_rule(config, eos), candidates=1)
    first_too = config.strategy in ("quadratic", "auto") or (config.strategy == "recguide" and config.continuation)
    if adapter.drafter.shifted and first_too:
        raise UnsupportedError(
            "This family's draft logits are shifted: it cannot predict the first token of a block, as a continuation or the "
            "quadratic layout or auto must. Use strategy='linear', or 'recguide' with continuation=False."
        )
    policy = (policies or Policies()).of(config, lambda: read_tables(adapter, config))
    if isinstance(policy, Auto):
        return auto_method(policy, eos)
    return Method(
        policy=policy,
        branching=branching_rule(config, eos),
        draft_threshold=config.draft_threshold,
        candidates=2 + (len(eos) if config.exclude_eos_replacement else 0),
    )


def auto_method(auto: Auto, eos: frozenset[int]) -> Method:
    """Rounds as `auto` decides them: it drafts beside verifications only, and looks at three choices for each place."""
    return Method(auto, AutoBranches(auto, eos), candidates=3, draft_forwards=False)


def tables_directory(adapter: ModelAdapter, chosen: str | None) -> Path:
    """Where an adapter's tables are: as chosen, or beside the model, or in the current directory for a model from the hub."""
    if chosen is not None:
        return Path(chosen)
    beside = Path(str(adapter.model.name_or_path))
    return (beside if beside.is_dir() else Path()) / "recguide_tables"


def read_tables(adapter: ModelAdapter, config: RecGuideConfig) -> Tables:
    """
    The tables for an adapter's setup.

    Raises:
        CalibrationError: one is of another setup, or missing. `auto` can do without, unless a directory was named.
    """
    directory = tables_directory(adapter, config.tables)
    may_lack = config.strategy == "auto" and config.tables is None
    progress = ProgressTable.load(directory, adapter.fingerprint, may_lack)
    return progress, CostProfile.load(directory, adapter.fingerprint, may_lack)


def generate(
    requests: Sequence[Request],
    adapter: ModelAdapter,
    hooks: Sequence[Hook] = (),
    kv: DenseKV | None = None,
    after_round: Callable[[], None] = lambda: None,
) -> Result:
    """
    Decode a batch of requests to their ends.

    Args:
        requests (`Sequence[Request]`): prompts with their rules; their tokens grow in place.
        adapter (`ModelAdapter`): the model.
        hooks (`Sequence[Hook]`): observers; see `hooks.py` for order and exceptions.
        kv (`DenseKV`, *optional*): a cache that already holds a prefix of each prompt.
        after_round (callable, *optional*): called after the prefill and after each round; may end requests.

    Raises:
        InputError: a prompt is empty, or longer than the model's context.
    """
    check_prompts(requests, adapter, kv)
    observers = Hooks(hooks)
    kv = kv or DenseKV(len(requests), _capacity(requests))
    started: list[Request] = []
    try:
        with installed(adapter.model):
            started = list(requests)
            prefill(requests, adapter, kv, observers)
            after_round()
            while any(request.finished is None for request in requests):
                plan_blocks(requests, sum(request.finished is None for request in requests))
                run_round(requests, adapter, kv, observers)
                after_round()
    except BaseException:
        for request in requests:
            request.finished = request.finished or "error"
        raise
    finally:
        _tell_ends(started, observers)
    return Result(tuple(requests), kv)


def _capacity(requests: Sequence[Request]) -> int:
    """Room for each prompt, a bounded guess of its output, and one round; the cache grows beyond it."""
    longest = max(len(r.tokens) + min(r.max_new_tokens, 1024) + r.method.most_tokens for r in requests)
    return -(-longest // PAGE_SIZE) * PAGE_SIZE


def _tell_ends(requests: Sequence[Request], hooks: Hook) -> None:
    """Every request's end is told, whatever the hooks raise; the first exception then gets out."""
    failure: BaseException | None = None
    for request in requests:
        new = len(request.tokens) - request.prompt_tokens
        request.method.policy.forget(request.id)
        try:
            reason = request.finished or "error"
            hooks.on_finish(FinishRecord(request.id, reason, request.prompt_tokens, new, request.committed - new))
        except BaseException as error:
            failure = failure or error
    if failure is not None:
        raise failure


def check_prompts(requests: Sequence[Request], adapter: ModelAdapter, kv: DenseKV | None = None) -> None:
    """Raise [`InputError`] for a prompt that is empty, longer than the model's context, or in the cache already."""
    if not requests:
        raise InputError("There is no prompt to answer; expected at least one request.")
    context = getattr(adapter.model.config.get_text_config(), "max_position_embeddings", None)
    for row, request in enumerate(requests):
        if not request.tokens:
            raise InputError(
                f"Row {row} of the batch is an empty prompt; expected at least one token. Give it a BOS token."
            )
        if kv is not None and kv.lengths[row] >= len(request.tokens):
            raise InputError(
                f"Row {row}'s cache holds {kv.lengths[row]} tokens of a prompt of {len(request.tokens)}; one at least must be new."
            )
        if context is not None and len(request.tokens) > context:
            raise InputError(
                f"Row {row}'s prompt has {len(request.tokens)} tokens; the model's context is {context}. Shorten the prompt."
            )
