"""RecGuide: one language model drafts and checks its own text, several times faster with not a letter changed."""

from __future__ import annotations

from pathlib import Path

from .config import RecGuideConfig
from .engine import Engine, EngineConfig, RequestHandle, RequestResult
from .errors import (
    CalibrationError,
    CheckpointError,
    ConfigError,
    InputError,
    LosslessError,
    MissingDependencyError,
    RankError,
    RecGuideError,
    UnsupportedError,
)
from .hf_outputs import RecGuideOutput
from .hf_strategy import RecGuideGenerationMixin, attach, detach
from .hooks import Hook
from .models.nemotron_labs_diffusion import NemotronLabsDiffusionConfig, NemotronLabsDiffusionModel
from .streaming import TextStream, stream
from .structs import FinishRecord, ForwardRecord, RoundRecord

__version__ = "0.1.0"

attach(NemotronLabsDiffusionModel)


def tiny_path() -> str:
    """Directory of `recguide-tiny`, the model embedded in the package; load it with the Auto classes."""
    return str(Path(__file__).parent / "tiny" / "weights")


__all__ = [
    "CalibrationError",
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "FinishRecord",
    "ForwardRecord",
    "Hook",
    "InputError",
    "LosslessError",
    "MissingDependencyError",
    "NemotronLabsDiffusionConfig",
    "NemotronLabsDiffusionModel",
    "RankError",
    "RecGuideConfig",
    "RecGuideError",
    "RecGuideGenerationMixin",
    "RecGuideOutput",
    "RequestHandle",
    "RequestResult",
    "RoundRecord",
    "TextStream",
    "UnsupportedError",
    "attach",
    "detach",
    "stream",
    "tiny_path",
]
