"""hf_llmarch: one Hugging Face model family whose config exposes every architecture switch of the Transformer line.

Importing the package registers its classes with transformers' Auto classes.
"""

# First, before any name that another release of the host may lack.
from .model.host import __version__, check  # isort: skip

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import transformers
from transformers.models.auto import modeling_auto

from .integrations.peft import register as register_with_peft
from .model.configuration_llmarch import AUTO_MAP, LlmArchConfig
from .model.modeling_llmarch import (
    LlmArchForCausalLM,
    LlmArchForConditionalGeneration,
    LlmArchForMaskedLM,
    LlmArchForQuestionAnswering,
    LlmArchForSequenceClassification,
    LlmArchForTokenClassification,
    LlmArchModel,
    LlmArchPreTrainedModel,
)

# Not in host.py: a pushed model does without it.
with suppress(PackageNotFoundError):
    check("peft", version("peft"))


def _register() -> None:
    """Make the Auto classes know ours, `save_pretrained` copy our code beside the weights, and PEFT adapt our modules.

    What is registered is what `auto_map` promises to people who load without this package; twice does no harm.
    """
    for auto_name, reference in AUTO_MAP.items():
        ours = globals()[reference.split(".")[1]]
        ours.register_for_auto_class(auto_name)
        auto_class = getattr(transformers, auto_name)
        auto_class.register(*((ours.model_type,) if ours is LlmArchConfig else (LlmArchConfig,)), ours, exist_ok=True)
    # By this table Trainer knows for which heads label smoothing has to shift the labels.
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LlmArchConfig.model_type] = LlmArchForCausalLM.__name__
    register_with_peft(LlmArchConfig.model_type)


_register()

__all__ = [
    "LlmArchConfig",
    "LlmArchForCausalLM",
    "LlmArchForConditionalGeneration",
    "LlmArchForMaskedLM",
    "LlmArchForQuestionAnswering",
    "LlmArchForSequenceClassification",
    "LlmArchForTokenClassification",
    "LlmArchModel",
    "LlmArchPreTrainedModel",
    "__version__",
]
