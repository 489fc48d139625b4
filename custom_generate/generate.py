"""`model.generate(..., custom_generate=<this folder's repository>, trust_remote_code=True)`: decodes with recguide."""

import functools
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

from recguide.hf_strategy import STRATEGY, generate_with_strategy


def generate(
    inputs: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    model: Any,
    **kwargs: Any,
) -> Any:
    """
    As `model.generate(..., generation_strategy=...)` of a model that recguide is attached to.

    Without `generation_strategy=`, and with none on the generation configs, the strategy is `"recguide"`.
    """
    places = (generation_config, model.generation_config)
    if kwargs.get(STRATEGY) is None and all(getattr(place, STRATEGY, None) is None for place in places):
        kwargs[STRATEGY] = "recguide"
    # Not `model.generate`: where recguide is attached, that would come back to the strategy.
    plain_generate = functools.partial(GenerationMixin.generate, model)
    return generate_with_strategy(model, plain_generate, inputs, generation_config, **kwargs)
