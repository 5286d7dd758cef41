"""Making transformers and PEFT know our classes, and these the processor, without an import before it is needed.

Each registration waits until the module with the table to be filled is imported, by the user or by another library; it
happens at once where that module is there already. The one that needs our models waits until an Auto class or its table
is taken from that module: every config class of transformers imports it, for the name of a model in its docstring.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from wrapt import when_imported

CONFIGURATION = "hf_llmarch.model.configuration_llmarch"
MODELING = "hf_llmarch.model.modeling_llmarch"
# What imports the Auto classes on its way, and is itself imported by the models.
BELOW_MODELING = tuple(f"hf_llmarch.model.{name}" for name in ("block", "backends", "parallel"))
AUTO = "transformers.models.auto"


def register() -> None:
    """Arrange for every registration. Calling it twice does no harm."""
    when_imported(CONFIGURATION)(_prepare_config)
    when_imported(MODELING)(_register_models)
    when_imported(MODELING)(_register_products)
    when_imported(f"{AUTO}.configuration_auto")(_announce_config)
    if f"{AUTO}.modeling_auto" in sys.modules:
        _announce_models(sys.modules[f"{AUTO}.modeling_auto"])
    else:
        when_imported(f"{AUTO}.modeling_auto")(_await_use)
    for name in BELOW_MODELING:
        when_imported(name)(_announce_models)
    when_imported("peft.utils.constants")(_register_with_peft)


def _is_being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _announce_config(module: ModuleType) -> None:
    # Where our module asked for the Auto classes itself, it is registered once it is complete.
    if not _is_being_imported(CONFIGURATION):
        _register_config(import_module(CONFIGURATION), module)


def _announce_models(module: ModuleType) -> None:
    # A module that is half imported cannot be read by the models; once it is complete, this is called again.
    others = {MODELING, *BELOW_MODELING} - {module.__name__}
    if not any(map(_is_being_imported, others)):
        _register_models(import_module(MODELING))


class _Unused(ModuleType):
    """A module from which nobody has taken an Auto class or a table of classes yet."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("Auto") or name.endswith("_MAPPING"):
            self.__class__ = ModuleType  # type: ignore[assignment]
            _announce_models(self)
        return ModuleType.__getattribute__(self, name)


def _await_use(module: ModuleType) -> None:
    module.__class__ = _Unused


def _prepare_config(configuration: ModuleType) -> None:
    """Let `save_pretrained` copy the code of the config, and AutoConfig know it where AutoConfig is there already."""
    configuration.LlmArchConfig.register_for_auto_class("AutoConfig")
    auto = sys.modules.get(f"{AUTO}.configuration_auto")
    if auto is not None and hasattr(auto, "AutoConfig"):
        _register_config(configuration, auto)


def _register_config(configuration: ModuleType, auto: ModuleType) -> None:
    config = configuration.LlmArchConfig
    auto.AutoConfig.register(config.model_type, config, exist_ok=True)


def _register_models(modeling: ModuleType) -> None:
    """Make the Auto classes know ours, and `save_pretrained` copy our code beside the weights.

    What is registered is what `auto_map` promises to people who load without this package.
    """
    configuration, auto = import_module(CONFIGURATION), import_module(f"{AUTO}.modeling_auto")
    config = configuration.LlmArchConfig
    for auto_name, reference in configuration.AUTO_MAP.items():
        if auto_name != "AutoConfig":
            ours = getattr(modeling, reference.split(".")[1])
            ours.register_for_auto_class(auto_name)
            getattr(auto, auto_name).register(config, ours, exist_ok=True)
    # By this table Trainer knows for which heads label smoothing has to shift the labels.
    vars(auto)["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"][config.model_type] = "LlmArchForCausalLM"


def _register_products(_: ModuleType) -> None:
    """Let our models multiply by the fastest products of this processor."""
    from .integrations import processors

    processors.register()


def _register_with_peft(_: ModuleType) -> None:
    from .integrations import peft

    peft.register("llmarch")
