"""Configuration of the Nemotron-Labs-Diffusion (NLD) family: a Ministral-3 network that can also draft."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import Ministral3Config


@strict
class NemotronLabsDiffusionConfig(Ministral3Config):
    r"""
    Configuration of [`NemotronLabsDiffusionModel`]; the defaults are those of the 8B release.

    Args:
        mask_token_id (`int`, defaults to -1):
            Id of the MASK token that fills the undrafted places of a block. The released configs say 100; the default
            of -1 stands for "not given" and is refused when the model drafts.
        block_size (`int`, defaults to 32):
            Block length, in tokens, that the model was trained to draft.
        dlm_paradigm (`str`, defaults to `"bidirectional"`):
            How the checkpoint was trained: `"bidirectional"` (the released ones), `"autoregressive"` or `"block_diff"`.
        **kwargs:
            Everything [`~transformers.Ministral3Config`] takes.
    """

    model_type = "nemotron_labs_diffusion"

    pad_token_id: int | None = 11
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 11
    mask_token_id: int = -1
    block_size: int = 32
    dlm_paradigm: str = "bidirectional"

    def __post_init__(self, **kwargs: Any) -> None:
        paradigms = ("bidirectional", "autoregressive", "block_diff")
        if self.dlm_paradigm not in paradigms:
            raise ValueError(f"dlm_paradigm must be one of {', '.join(paradigms)}; got {self.dlm_paradigm!r}.")
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]


__all__ = ["NemotronLabsDiffusionConfig"]
