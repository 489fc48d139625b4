"""Nemotron-Labs-Diffusion (NLD) on top of transformers' `ministral3`, with no remote code.

The network is Ministral-3's; what is added here is the released key names, in and out, and the draft adapter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Ministral3ForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.utils import cached_file, logging

from ...errors import CheckpointError
from ..draft_adapter import SUBMODULE, draft_adapter_of, load_draft_adapter, save_draft_adapter
from .configuration_nemotron_labs_diffusion import NemotronLabsDiffusionConfig

logger = logging.get_logger(__name__)
ADAPTER_DIRECTORY = "linear_spec_lora"
ADAPTER_RENAMES = {"encoder.": "model."}

register_checkpoint_conversion_mapping(
    NemotronLabsDiffusionConfig.model_type,
    [
        WeightRenaming(r"^encoder\.", "model."),
        WeightRenaming(r"^diffusion_head\.", "lm_head."),
    ],
    overwrite=True,
)


class NemotronLabsDiffusionModel(Ministral3ForCausalLM):
    """
    The NLD language model with its head. Plain calls and plain `generate()` are the autoregressive model.

    The class bears the release's name, not `...ForCausalLM`, so that a saved config is one that the release reads too.
    It is registered with both `AutoModel` (the release's way in) and `AutoModelForCausalLM`.
    """

    config_class = NemotronLabsDiffusionConfig
    config: NemotronLabsDiffusionConfig
    _tied_weights_keys: dict[str, str] = {}
    _keys_to_ignore_on_load_unexpected = [r"rotary_emb\.inv_freq"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """
        Load a released checkpoint and, where it has one, its draft adapter (`linear_spec_lora/`).

        Takes what [`~transformers.PreTrainedModel.from_pretrained`] takes. Raises [`CheckpointError`] naming the keys
        that are missing, left over or misshapen: a network with some random layers would decode, only wrongly.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        # Reported below with the other problems; transformers would raise with the key in its log only.
        kwargs["ignore_mismatched_sizes"] = True
        key_mapping = {r"^language_model\.": "", **(kwargs.pop("key_mapping", None) or {})}
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, key_mapping=key_mapping, **kwargs
        )
        model, info = loaded
        problems = [
            f"{kind.removesuffix('_keys')} {key}"
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
            for key in sorted(map(str, info[kind]))
        ]
        if problems:
            raise CheckpointError(
                f"{pretrained_model_name_or_path} is not a complete NLD checkpoint: {'; '.join(problems)}."
            )
        if directory := _adapter_directory(pretrained_model_name_or_path, kwargs):
            load_draft_adapter(model, directory, ADAPTER_RENAMES)
        else:
            logger.warning(
                f"{pretrained_model_name_or_path} has no {ADAPTER_DIRECTORY}/: the model drafts without its adapter."
            )
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:  # type: ignore[override]
        """Save in the release's layout: released key names, the draft adapter in `linear_spec_lora/`."""
        if is_main_process and draft_adapter_of(self):
            # First, so that an upload by `push_to_hub=True` takes it along.
            save_draft_adapter(self, Path(save_directory) / ADAPTER_DIRECTORY, ADAPTER_RENAMES)
        state: dict[str, Tensor] = kwargs.pop("state_dict", None) or self.state_dict()
        base = {key: value for key, value in state.items() if f".{SUBMODULE}." not in key}
        super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=base, **kwargs)


def _adapter_directory(name_or_path: Any, kwargs: dict[str, Any]) -> Path | None:
    """Where the checkpoint's draft adapter lies on this machine, fetched from the hub if need be; None if it has none."""
    subfolder = Path(kwargs.get("subfolder") or "") / ADAPTER_DIRECTORY
    if Path(name_or_path).is_dir():
        local = Path(name_or_path) / subfolder
        return local if local.is_dir() else None
    names = ("cache_dir", "revision", "token", "local_files_only", "force_download")
    hub = {key: kwargs[key] for key in names if key in kwargs}
    found = [
        cached_file(name_or_path, name, subfolder=str(subfolder), _raise_exceptions_for_missing_entries=False, **hub)
        for name in ("adapter_config.json", "adapter_model.safetensors")
    ]
    return Path(found[0]).parent if found[0] else None


__all__ = ["NemotronLabsDiffusionModel"]
