"""The families, one data file each, keyed by the `model_type` of their checkpoints."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from ..errors import UnknownFamily
from ..rules import Family

# In the order in which they are listed. The module of a family is named like it, with underscores for
# hyphens, if `HOSTS` has no other.
NAMES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "granite", "smollm3", "helium"),
    *("phi3", "phi", "stablelm", "starcoder2", "cohere", "cohere2"),
    *("glm", "glm4", "olmo3", "ernie4_5", "exaone4", "exaone", "seed_oss", "ministral", "cwm", "nemotron", "arcee"),
    *("jais2", "internlm3", "iquestcoder", "vaultgemma", "hyperclovax", "granite_swa", "minicpm3", "youtu"),
    *("persimmon", "gpt_bigcode", "biogpt", "xglm"),
    *("openai-gpt", "gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "bloom", "mpt", "falcon", "nanogpt"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe", "phimoe", "gpt_oss", "granitemoe"),
    *("glm4_moe", "glm4_moe_lite", "sarvam_moe", "sarvam_mla", "solar_open", "dots1", "exaone_moe", "hy_v3"),
    *("flex_olmo", "minimax_m2", "mellum", "ernie4_5_moe", "granitemoeshared", "granitemoe_swa", "flint", "aria_text"),
    "cohere2_moe",
    *("t5", "mt5", "umt5", "switch_transformers", "bart", "mbart", "pegasus", "marian", "m2m_100"),
    *("bert", "roberta", "xlm-roberta", "distilbert", "electra", "roformer", "modernbert", "albert"),
    *("ernie", "megatron-bert", "camembert", "data2vec-text", "xlm-roberta-xl", "roberta-prelayernorm"),
    *("jina_embeddings_v3", "nomic_bert", "eurobert"),
)
# Those that are in another one's file, of the same architecture.
HOSTS = {
    **dict.fromkeys(("internlm3", "iquestcoder"), "llama"),
    "cwm": "ministral",
    **dict.fromkeys(("sarvam_moe", "solar_open"), "glm4_moe"),
    "sarvam_mla": "deepseek_v3",
    "granitemoe_swa": "granitemoeshared",
    **dict.fromkeys(("ernie", "megatron-bert"), "bert"),
    **dict.fromkeys(("xlm-roberta", "camembert", "data2vec-text", "xlm-roberta-xl", "roberta-prelayernorm"), "roberta"),
}


class Families(Mapping[str, Family]):
    """Every family by `model_type`; a family's file is imported when it is asked for."""

    def module(self, name: str) -> ModuleType:
        """The data file of a family.

        Raises:
            KeyError: there is no family of that name.
        """
        if name not in NAMES:
            raise KeyError(name)
        return import_module(f".{HOSTS.get(name, name).replace('-', '_')}", __name__)

    def __getitem__(self, name: str) -> Family:
        module = self.module(name)
        # A file has one, or several of one architecture.
        found: Sequence[Family] = getattr(module, "FAMILIES", None) or (module.FAMILY,)
        return next(family for family in found if family.name == name)

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


@cache
def families() -> Families:
    """Every family by `model_type`."""
    return Families()


def family_of(config: Mapping[str, Any], family: Family | str | None = None) -> Family:
    """The family itself, the one of that name, or the one of the config's `model_type`.

    Raises:
        UnknownFamily: there is none of that name; the message has the closest name and all names.
    """
    if family is not None and not isinstance(family, str):
        return family
    known, name = families(), family or config.get("model_type")
    if name in known:
        return known[str(name)]
    close = difflib.get_close_matches(str(name), known, n=1)
    raise UnknownFamily(
        f"No family for model_type {name!r}."
        + (f" Did you mean {close[0]!r}?" if close else "")
        + f" There are: {', '.join(known)}. Choose one with family=… if the architecture is the same."
    )
