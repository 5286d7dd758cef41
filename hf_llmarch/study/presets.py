"""Architectures by name: the configs of models that papers define, to start from or to ablate."""

from __future__ import annotations

import difflib
from typing import Any

from hf_llmarch.model.configuration_llmarch import LlmArchConfig

# Vaswani et al. 2017, arXiv 1706.03762: section 3, table 3 for the sizes; 37000 shared byte-pair tokens (section 5.1).
TRANSFORMER: dict[str, Any] = {
    "topology": "encoder-decoder",
    "vocab_size": 37000,
    "num_hidden_layers": 6,
    "max_position_embeddings": 512,
    "position_encoding": "sinusoidal",
    "norm_type": "layernorm",
    "norm_placement": "post",
    "norm_eps": 1e-6,
    "final_norm": False,
    "ffn_type": "mlp",
    "hidden_act": "relu",
    "ffn_bias": True,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}

PRESETS: dict[str, dict[str, Any]] = {
    "transformer-base": {
        **TRANSFORMER,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "embedding_scale": 512**0.5,
        "hidden_dropout": 0.1,
        "embedding_dropout": 0.1,
    },
    "transformer-big": {
        **TRANSFORMER,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "embedding_scale": 1024**0.5,
        "hidden_dropout": 0.3,
        "embedding_dropout": 0.3,
    },
}


def names() -> list[str]:
    """The presets there are."""
    return list(PRESETS)


def get(name: str, **switches: Any) -> LlmArchConfig:
    """A fresh config of a preset, with `switches` changed.

    Raises:
        ValueError: for a name that is not there, with the closest that is; for a combination that cannot be.
    """
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        raise ValueError(
            f"No preset {name!r}." + (f" Did you mean {close[0]!r}?" if close else f" There are: {names()}.")
        )
    return LlmArchConfig(**{**PRESETS[name], **switches})
