"""The families, one data file each, keyed by the `model_type` of their checkpoints."""

from functools import cache
from importlib import import_module

from ..rules import Family

MODULES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "granite", "smollm3", "helium"),
    *("phi3", "phi", "stablelm", "starcoder2", "cohere", "cohere2"),
    *("openai_gpt", "gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "bloom", "mpt", "falcon", "nanogpt"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe", "phimoe", "gpt_oss", "granitemoe"),
    *("t5", "mt5", "umt5", "switch_transformers", "bart", "mbart", "pegasus", "marian", "m2m_100"),
    *("bert", "roberta", "xlm_roberta", "distilbert", "electra", "roformer", "modernbert", "albert"),
)


@cache
def families() -> dict[str, Family]:
    """Every family by `model_type`."""
    found: list[Family] = [import_module(f".{module}", __name__).FAMILY for module in MODULES]
    return {family.name: family for family in found}
