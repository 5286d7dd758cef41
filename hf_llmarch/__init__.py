"""hf_llmarch: one Hugging Face model family whose config exposes every architecture switch of the Transformer line.

Importing the package registers its classes with transformers' Auto classes and with PEFT. What needs torch or
transformers is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .model.host import __version__, check, installed
from .registration import register as _register

if TYPE_CHECKING:
    from .model.configuration_llmarch import LlmArchConfig
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
    from .study import analysis, presets

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
    "analysis",
    "presets",
]


def __getattr__(name: str) -> Any:
    if name in ("analysis", "presets"):
        return import_module(f".study.{name}", __name__)
    if name == "LlmArchConfig":
        return import_module(".model.configuration_llmarch", __name__).LlmArchConfig
    if name.startswith("LlmArch") and name in __all__:
        return getattr(import_module(".model.modeling_llmarch", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Not in host.py: a pushed model does without PEFT.
if (_peft := installed("peft")) is not None:
    check("peft", _peft)
_register()
