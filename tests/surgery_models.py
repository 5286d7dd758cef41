"""Tiny models of the styles that surgery is tested on, and how a changed model is compared with what it was made of."""

from typing import Any

import torch
from transformers import DynamicCache

from tiny import MIXED, MLA, TOLERANCES, text, tiny_stack

STYLES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {
        **{"norm_placement": "sandwich", "norm_offset": 1.0, "attn_logit_softcapping": 0.5, **MIXED},
        **{"final_logit_softcapping": 1.5, "embedding_scale": 6.9, "tie_word_embeddings": True},
        **{"hidden_act": "gelu_pytorch_tanh", "attention_scale": 0.3},
    },
    "bert": {
        **{"topology": "encoder", "norm_type": "layernorm", "norm_placement": "post", "position_encoding": "learned"},
        **{"embedding_norm": True, "final_norm": False, "type_vocab_size": 2, "ffn_type": "mlp", "hidden_act": "gelu"},
        **{"ffn_bias": True, "attention_bias": True, "attention_output_bias": True, "lm_head_transform": True},
        **{"lm_head_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 6},
    },
    "deepseek": {
        **{**MLA, "num_experts": 9, "moe_intermediate_size": 14, "num_experts_per_tok": 3, "num_shared_experts": 2},
        **{"router_score": "sigmoid", "router_selection_bias": True, "routed_scaling_factor": 2.5, "n_group": 3},
        **{"topk_group": 2, "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_interleaved": True},
    },
    "qwen3": {"qk_norm": "head", "attention_bias": True},
    "olmo2": {"qk_norm": "projection", "norm_placement": "branch"},
    "gpt2": {
        **{"norm_type": "layernorm", "ffn_type": "mlp", "ffn_bias": True, "attention_bias": True},
        **{"attention_output_bias": True, "position_encoding": "learned", "tie_word_embeddings": True},
        **{"num_key_value_heads": 6},
    },
    "neox": {
        **{"norm_type": "layernorm", "ffn_type": "mlp", "ffn_bias": True, "attention_bias": True},
        **{"attention_output_bias": True, "parallel_block": True, "parallel_norms": 2},
        **{"rope_parameters": {"rope_theta": 777.0, "partial_rotary_factor": 0.4}},
    },
    "granite": {"residual_scale": 0.22, "embedding_scale": 6.9, "logit_scale": 0.3, "tie_word_embeddings": True},
}


def styled(style: str, **switches: Any) -> Any:
    return tiny_stack(**{**STYLES[style], **switches})


@torch.no_grad()
def pieces(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits of a text that is read with a cache: a beginning, two tokens at once, then one by one."""
    cache = DynamicCache(config=model.config)
    parts, start = [], 0
    for end in (9, 11, *range(12, ids.shape[1] + 1)):
        parts.append(model(ids[:, start:end], past_key_values=cache, use_cache=True).logits)
        start = end
    return torch.cat(parts, 1)


def assert_same_function(changed: Any, original: Any, tolerance: str = "native") -> None:
    """Logits within 1e-5 of their spread, read whole, and with a cache where there is one."""
    ids = text()
    with torch.no_grad():
        expected, actual = original(ids).logits, changed(ids).logits
    bound = TOLERANCES[tolerance] * (expected.max() - expected.min()).item()
    assert bound > 0
    assert (actual - expected).abs().max().item() <= bound
    if original.config.topology == "decoder":
        assert (pieces(changed, ids) - expected).abs().max().item() <= bound
        made = changed.generate(ids[:, :9], max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert torch.equal(made, original.generate(ids[:, :9], max_new_tokens=6, do_sample=False, pad_token_id=0))
