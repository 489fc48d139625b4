"""The NLD model family, registered with the Auto classes on import."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_nemotron_labs_diffusion import NemotronLabsDiffusionConfig
from .modeling_nemotron_labs_diffusion import NemotronLabsDiffusionModel

AutoConfig.register(NemotronLabsDiffusionConfig.model_type, NemotronLabsDiffusionConfig, exist_ok=True)
AutoModel.register(NemotronLabsDiffusionConfig, NemotronLabsDiffusionModel, exist_ok=True)
AutoModelForCausalLM.register(NemotronLabsDiffusionConfig, NemotronLabsDiffusionModel, exist_ok=True)

__all__ = ["NemotronLabsDiffusionConfig", "NemotronLabsDiffusionModel"]
