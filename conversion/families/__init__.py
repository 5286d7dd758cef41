"""The families, one data file each, keyed by the `model_type` of their checkpoints."""

from functools import cache
from importlib import import_module

from ..rules import Family

MODULES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gpt2", "gpt_neox", "olmo2")


@cache
def families() -> dict[str, Family]:
    """Every family by `model_type`."""
    found: list[Family] = [import_module(f".{module}", __name__).FAMILY for module in MODULES]
    return {family.name: family for family in found}
