"""The knobs, each declared and validated here once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigError

STRATEGIES = ("ar", "linear", "quadratic", "recguide", "auto")
POLICIES = ("fixed", "concurrency_table", "aimd", "verification_guided")
_POLICY_METHODS = ("max_block", "block_size", "observe", "observe_forward", "forget")
ATTENTION_BACKENDS = ("auto", "torch_sdpa", "triton", "flashinfer")
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """
    How forwards are run. None of this changes the output.

    Args:
        attention_backend (`str`, defaults to `"auto"`):
            `"torch_sdpa"`, `"triton"`, `"flashinfer"`, or `"auto"`: by the model's device and dtype; the log says why. One that
            cannot run there is an error, never replaced by another.
        compile (`bool`, defaults to `False`):
            Run the model's forward through `torch.compile`. Its first forwards take a minute or so, also those of a new process. On a
            CPU it needs a C++ compiler.
        cuda_graphs (`bool`, defaults to `False`):
            Replay forwards of up to 512 tokens as CUDA graphs once their shape has come up three times. Needs a CUDA device and the
            backend `"triton"`.
    """

    attention_backend: str = "auto"
    compile: bool = False
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        _choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _choice("compile", self.compile, (True, False))
        _choice("cuda_graphs", self.cuda_graphs, (True, False))

    @property
    def changed(self) -> dict[str, Any]:
        """The options of [`ForwardConfig`] that are not as by default."""
        own = fields(ForwardConfig)
        return {f.name: value for f in own if (value := getattr(self, f.name)) != f.default}


@dataclass(frozen=True)
class RecGuideConfig(ForwardConfig):
    """
    How a block is drafted and which branches ride along with its verification; and the options of [`ForwardConfig`], by keyword.

    Args:
        strategy (`str`, defaults to `"recguide"`):
            `"ar"` (plain decoding: blocks of 1), `"linear"` (LinearSS: draft, then verify), `"quadratic"` (TiDAR's layout:
            a next draft for every place where acceptance may stop), `"recguide"` (the paper's overlap) or `"auto"` (block, verified
            part and branches by one price, from the load, the drafts and measured costs; takes no other option of these but `tables`).
        block_size (`int`, defaults to 16):
            Tokens verified a round, the seed included, under the policy `"fixed"`. One of 1, 2, 4, 8, 16, 32, 64.
        policy (`str` or `BlockPolicy`, defaults to `"fixed"`):
            `"fixed"` (always `block_size`), `"concurrency_table"` (32, 16 or 8 by the number of requests under way), `"aimd"` (8 … 32,
            doubled and halved by what each request's last round committed), `"verification_guided"` (8, 16 or 32 by the paper's
            rule; needs tables) or an object with the methods of [`~policy.BlockPolicy`].
        tables (`str`, *optional*):
            Directory of the tables that `recguide profile` and `recguide calibrate` have written; by default `recguide_tables` in the
            model's directory, or in the current one for a model from the hub.
        delta (`float`, defaults to 0.5): a drafted position is risky if its margin `p1 - p2` is below it (strictly). 0 … 1.
        max_corrections (`int`, defaults to 2): correction branches at the earliest risky positions. 0 … 2.
        continuation (`bool`, defaults to `True`): build the branch for full acceptance where at most two positions are risky.
        reuse (`bool`, defaults to `True`):
            A hit branch's draft is verified with branches again (recursive overlap). `False`: the round after a hit
            carries none, as a measure of what the recursion is worth.
        exclude_eos_replacement (`bool`, defaults to `True`): never correct to an end-of-sequence token.
        draft_threshold (`float`, defaults to 0.0):
            Above 0, `linear` drafts in several forwards: each keeps the guesses at least this probable, and the earliest open
            one in any case, so that every forward settles a position. 0 … 1.
    """

    strategy: str = "recguide"
    block_size: int = 16
    delta: float = 0.5
    max_corrections: int = 2
    continuation: bool = True
    reuse: bool = True
    exclude_eos_replacement: bool = True
    draft_threshold: float = 0.0
    policy: Any = "fixed"
    tables: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _choice("strategy", self.strategy, STRATEGIES)
        _choice("block_size", self.block_size, BLOCK_SIZES)
        if isinstance(self.policy, str) or not all(hasattr(self.policy, name) for name in _POLICY_METHODS):
            _choice("policy", self.policy, POLICIES)
        if not (self.tables is None or isinstance(self.tables, str)):
            raise ConfigError(f"tables must be the name of a directory; got {self.tables!r}.")
        _choice("max_corrections", self.max_corrections, (0, 1, 2))
        for name in ("delta", "draft_threshold"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise ConfigError(f"{name} must be a number from 0 to 1; got {value!r}.")
        for name in ("continuation", "reuse", "exclude_eos_replacement"):
            _choice(name, getattr(self, name), (True, False))
        if self.strategy == "auto":
            free = ("strategy", "tables", *(f.name for f in fields(ForwardConfig)))
            if fixed := [f.name for f in fields(self) if f.name not in free and getattr(self, f.name) != f.default]:
                raise ConfigError(f"strategy='auto' decides by itself; it takes no {', '.join(fixed)}, only tables.")
        if self.draft_threshold > 0 and self.strategy != "linear":
            raise ConfigError(
                f"draft_threshold={self.draft_threshold} goes with strategy='linear' only; got strategy={self.strategy!r}. "
                "Branches draft in one forward."
            )

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> RecGuideConfig:
        """A config from keyword options; an unknown one raises [`ConfigError`] with the list of those known."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(options) - set(known)):
            raise ConfigError(f"Unknown recguide option(s): {', '.join(unknown)}. Known: {', '.join(known)}.")
        return cls(**options)


def _choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}.")
