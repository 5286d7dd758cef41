"""Tiny models of transformers' own classes, with shapes that leave no coincidence to hide behind.

Sizes differ from each other (6 query and 2 key heads, a head width that is not hidden / heads where the family allows
it, 3 layers, windows shorter than the text), eps is large enough to be seen, and theta is not the default.
"""

from typing import Any

import torch
from torch import nn

# Largest deviation allowed, as a fraction of the logits' spread, and why it is not zero.
TOLERANCES = {
    "fp32": 1e-5,  # sums in another order: fused projections, sdpa against eager
}

VOCABULARY = 97
TEXT_LENGTH = 23

Config = dict[str, Any]


def tiny(base: Config, **changes: Any) -> Config:
    return {**base, **changes}


TOKENS: Config = {"vocab_size": VOCABULARY, "pad_token_id": 3, "bos_token_id": 4, "eos_token_id": 5}
MHA = tiny(
    TOKENS,
    initializer_range=0.03,
    hidden_size=60,
    num_hidden_layers=3,
    intermediate_size=44,
    num_attention_heads=6,
    max_position_embeddings=64,
)
LLAMA = tiny(MHA, num_key_value_heads=2, head_dim=8, rms_norm_eps=0.1)
LAYER_NORM = tiny(MHA, num_key_value_heads=2, layer_norm_eps=0.1)
GPT = tiny(TOKENS, initializer_range=0.03, n_embd=60, n_layer=3, n_head=6, n_positions=64, layer_norm_epsilon=0.1)
OPT = tiny(
    TOKENS,
    init_std=0.03,
    hidden_size=60,
    num_hidden_layers=3,
    ffn_dim=44,
    num_attention_heads=6,
    max_position_embeddings=64,
)
BLOOM = tiny(TOKENS, initializer_range=0.03, layer_norm_epsilon=0.1)
MPT = tiny(TOKENS, initializer_range=0.03, d_model=60, n_layers=3, n_heads=6, max_seq_len=64, layer_norm_epsilon=0.1)
FALCON = tiny(
    TOKENS,
    initializer_range=0.03,
    hidden_size=60,
    num_hidden_layers=3,
    num_attention_heads=6,
    max_position_embeddings=64,
    layer_norm_epsilon=0.1,
)

# Odd numbers of experts (5, 7), an expert's width that is neither the model's nor a dense layer's.
MIXTRAL = tiny(LLAMA, intermediate_size=28, num_local_experts=5, num_experts_per_tok=2)
QWEN_MOE = tiny(LLAMA, moe_intermediate_size=28, num_experts=7, num_experts_per_tok=3)
DEEPSEEK = tiny(
    MHA,
    num_key_value_heads=6,
    rms_norm_eps=0.1,
    q_lora_rank=22,
    kv_lora_rank=20,
    qk_nope_head_dim=14,
    qk_rope_head_dim=8,
    v_head_dim=12,
    moe_intermediate_size=28,
    n_routed_experts=9,
    n_shared_experts=2,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    rope_theta=777.0,
)
DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 4,
    "original_max_position_embeddings": 16,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 0.6,
    "mscale_all_dim": 0.9,
}

# A case is named by its family, a dash, and what is special about it.
EXPERTS: dict[str, Config] = {
    "mixtral": tiny(MIXTRAL, rope_theta=1234.5, sliding_window=5),
    "mixtral-tied": tiny(
        MIXTRAL, head_dim=None, num_local_experts=4, num_experts_per_tok=1, hidden_act="gelu", tie_word_embeddings=True
    ),
    "qwen2_moe": tiny(
        QWEN_MOE,
        shared_expert_intermediate_size=36,
        rope_theta=321.0,
        mlp_only_layers=[1],
        use_sliding_window=False,
        max_window_layers=3,
    ),
    "qwen2_moe-windows": tiny(
        QWEN_MOE,
        head_dim=10,
        shared_expert_intermediate_size=20,
        norm_topk_prob=True,
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        tie_word_embeddings=True,
    ),
    "qwen3_moe": tiny(QWEN_MOE, norm_topk_prob=True, rope_theta=321.0, mlp_only_layers=[0]),
    "qwen3_moe-biases": tiny(QWEN_MOE, attention_bias=True, use_sliding_window=True, sliding_window=5),
    "deepseek_v2": tiny(
        DEEPSEEK,
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        routed_scaling_factor=3.0,
        attention_bias=True,
        rope_scaling=DEEPSEEK_YARN,
    ),
    "deepseek_v2-lite": tiny(DEEPSEEK, q_lora_rank=None, topk_method="greedy", hidden_act="gelu"),
    "deepseek_v3": tiny(
        DEEPSEEK,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=2.5,
        rope_scaling=DEEPSEEK_YARN,
        num_nextn_predict_layers=0,
    ),
    "deepseek_v3-halves": tiny(
        DEEPSEEK,
        q_lora_rank=None,
        n_shared_experts=1,
        first_k_dense_replace=2,
        rope_interleave=False,
        norm_topk_prob=False,
        attention_bias=True,
        num_nextn_predict_layers=0,
    ),
    "olmoe": tiny(
        MHA,
        num_key_value_heads=2,
        rms_norm_eps=0.1,
        rope_theta=321.0,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        attention_bias=True,
    ),
    "olmoe-mha": tiny(MHA, rms_norm_eps=0.1, num_experts=5, num_experts_per_tok=2, tie_word_embeddings=True),
    "phimoe": tiny(
        MIXTRAL,
        head_dim=10,
        # Wide enough that it decides which experts are weighed against each other.
        router_jitter_noise=0.2,
        attention_bias=True,
        lm_head_bias=True,
        sliding_window=5,
        rope_theta=321.0,
        hidden_dropout=0.0,
        original_max_position_embeddings=40,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.5, 2.0, 2.5, 2.75, 3.0],
            "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0],
            "short_mscale": 1.3,
            "long_mscale": 1.3,
            "original_max_position_embeddings": 40,
        },
    ),
    "phimoe-plain": tiny(MIXTRAL, tie_word_embeddings=True),
    "gpt_oss": tiny(
        MIXTRAL,
        sliding_window=5,
        swiglu_limit=0.7,
        swiglu_alpha=1.3,
        rope_theta=321.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    ),
    "gpt_oss-full": tiny(
        MIXTRAL,
        num_local_experts=4,
        num_experts_per_tok=3,
        attention_bias=False,
        layer_types=["full_attention"] * 3,
        rope_parameters={"rope_type": "default", "rope_theta": 321.0},
        tie_word_embeddings=True,
    ),
    "granitemoe": tiny(
        MIXTRAL,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        logits_scaling=7.0,
        rope_theta=321.0,
        tie_word_embeddings=True,
    ),
    "granitemoe-biases": tiny(MIXTRAL, attention_multiplier=0.3, attention_bias=True, num_experts_per_tok=1),
}

CASES: dict[str, Config] = {
    "llama": tiny(LLAMA, rope_theta=777.0),
    "llama-biases-tied": tiny(LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-llama3-scaling": tiny(
        LLAMA,
        rope_theta=500.5,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "llama-linear-scaling": tiny(LLAMA, rope_scaling={"type": "linear", "factor": 2.5}, hidden_act="gelu"),
    # The text is longer than max_position_embeddings, so the base grows.
    "llama-dynamic": tiny(LLAMA, max_position_embeddings=16, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
    "llama-yarn": tiny(
        LLAMA,
        rope_scaling={"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16, "beta_fast": 8},
    ),
    "mistral": tiny(LLAMA, rope_theta=1234.5, sliding_window=5),
    "mistral-no-window": tiny(LLAMA, sliding_window=None, hidden_act="relu", tie_word_embeddings=True),
    "qwen2": tiny(LLAMA, rope_theta=4321.0, hidden_act="gelu", use_sliding_window=False, sliding_window=5),
    "qwen2-windows-tied": tiny(
        LLAMA, head_dim=10, use_sliding_window=True, sliding_window=5, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": tiny(LLAMA, rope_theta=4321.0, attention_bias=True, hidden_act="relu", tie_word_embeddings=True),
    "qwen3-windows": tiny(LLAMA, use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "gemma": tiny(LLAMA, rope_theta=321.0),
    "gemma-legacy-gelu": tiny(LLAMA, hidden_act="gelu", attention_bias=True, num_key_value_heads=1),
    "gemma2": tiny(
        LLAMA,
        attention_bias=True,
        sliding_window=5,
        query_pre_attn_scalar=11,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=7.0,
        rope_theta=321.0,
    ),
    "gemma2-plain": tiny(
        LLAMA,
        sliding_window=5,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
    ),
    "gemma3_text": tiny(
        LLAMA,
        sliding_window=5,
        sliding_window_pattern=2,
        query_pre_attn_scalar=11,
        rope_theta=5000.0,
        rope_local_base_freq=321.0,
        final_logit_softcapping=7.0,
    ),
    "gemma3_text-scaled": tiny(
        LLAMA,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=8,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        attention_bias=True,
    ),
    "olmo2": tiny(LLAMA, rope_theta=321.0, hidden_act="relu"),
    "olmo2-biases": tiny(LLAMA, attention_bias=True, tie_word_embeddings=True),
    "granite": tiny(
        LLAMA,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        logits_scaling=7.0,
        mlp_bias=True,
    ),
    "granite-tied": tiny(LLAMA, rope_theta=321.0, attention_bias=True, hidden_act="relu", tie_word_embeddings=True),
    "smollm3": tiny(LLAMA, num_hidden_layers=5, hidden_act="relu", attention_bias=True, tie_word_embeddings=False),
    "smollm3-windows": tiny(LLAMA, no_rope_layers=[0, 1, 1], use_sliding_window=True, sliding_window=5, mlp_bias=True),
    "helium": tiny(LLAMA, head_dim=10, hidden_act="relu", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "phi3": tiny(LLAMA, head_dim=8, hidden_act="relu", tie_word_embeddings=True, sliding_window=5, rope_theta=555.0),
    "phi3-longrope": tiny(
        LLAMA,
        head_dim=10,
        partial_rotary_factor=0.6,
        original_max_position_embeddings=16,
        rope_scaling={"type": "longrope", "short_factor": [1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 5.0]},
    ),
    "phi": tiny(LAYER_NORM, head_dim=20, tie_word_embeddings=True, partial_rotary_factor=0.4),
    "phi-qk-norm": tiny(LAYER_NORM, partial_rotary_factor=0.4, qk_layernorm=True, hidden_act="relu"),
    "stablelm": tiny(LAYER_NORM, hidden_act="relu", partial_rotary_factor=0.4, use_qkv_bias=True),
    "stablelm-parallel": tiny(
        LAYER_NORM,
        partial_rotary_factor=0.4,
        num_key_value_heads=3,
        use_parallel_residual=True,
        qk_layernorm=True,
        tie_word_embeddings=True,
    ),
    "starcoder2": tiny(MHA, head_dim=8, num_key_value_heads=2, norm_epsilon=0.1, sliding_window=5, rope_theta=555.0),
    "starcoder2-no-bias": tiny(MHA, num_key_value_heads=2, use_bias=False, tie_word_embeddings=False),
    "cohere": tiny(LAYER_NORM, head_dim=8, hidden_act="relu", logit_scale=0.3, attention_bias=True),
    "cohere-qk-norm": tiny(LAYER_NORM, logit_scale=0.4, use_qk_norm=True, rope_theta=321.0),
    "cohere2": tiny(
        LAYER_NORM,
        hidden_act="relu",
        attention_bias=True,
        rope_theta=321.0,
        logit_scale=0.3,
        sliding_window=5,
        sliding_window_pattern=2,
    ),
    "openai-gpt": tiny(GPT),
    "openai-gpt-relu": tiny(GPT, afn="relu", tie_word_embeddings=False),
    "gpt2": tiny(GPT),
    "gpt2-scaled-by-layer": tiny(GPT, n_inner=44, scale_attn_by_inverse_layer_idx=True, activation_function="relu"),
    "gpt2-unscaled": tiny(GPT, scale_attn_weights=False, tie_word_embeddings=False),
    "gpt_neo-inner": tiny(
        MHA, layer_norm_epsilon=0.1, window_size=6, attention_types=[[["global"], 2], [["local"], 1]]
    ),
    "gpt_neo": tiny(
        MHA,
        intermediate_size=None,
        layer_norm_epsilon=0.1,
        window_size=5,
        attention_types=[[["local", "global"], 1], [["local"], 1]],
    ),
    "gptj": tiny(GPT, n_embd=48, rotary_dim=6),
    "gptj-tied": tiny(GPT, n_embd=48, rotary_dim=8, n_inner=44, tie_word_embeddings=True),
    "gpt_neox": tiny(MHA, hidden_size=96, layer_norm_eps=0.1, rotary_pct=0.5, rotary_emb_base=555),
    "gpt_neox-sequential": tiny(
        MHA,
        layer_norm_eps=0.1,
        rotary_pct=1.0,
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="gelu_new",
        tie_word_embeddings=True,
    ),
    "opt": tiny(OPT),
    "opt-post-norm": tiny(OPT, do_layer_norm_before=False, activation_function="gelu", enable_bias=False),
    "opt-no-final-norm": tiny(OPT, _remove_final_layer_norm=True, tie_word_embeddings=False),
    "bloom": tiny(BLOOM, hidden_size=60, n_layer=3, n_head=6),
    "bloom-legacy-names": tiny(BLOOM, n_embed=96, num_hidden_layers=2, num_attention_heads=12),
    "mpt": tiny(MPT),
    "mpt-options": tiny(
        MPT,
        n_heads=12,
        attn_config={"alibi_bias_max": 5, "softmax_scale": 0.2, "clip_qkv": 0.9},
        tie_word_embeddings=False,
    ),
    "falcon": tiny(FALCON, multi_query=True),
    "falcon-old-sequential": tiny(FALCON, multi_query=False, parallel_attn=False, bias=True),
    "falcon-new": tiny(FALCON, new_decoder_architecture=True, num_kv_heads=2, tie_word_embeddings=False),
    "falcon-new-one-norm": tiny(
        FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, ffn_hidden_size=44
    ),
    # 12 heads: a third of the slopes are no powers of two, so their rounding to bf16 shows.
    "falcon-alibi": tiny(
        FALCON,
        hidden_size=72,
        num_attention_heads=12,
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
        activation="relu",
    ),
    **EXPERTS,
}

# Fields of dropout in transformers' configs, by family.
_LLAMA_DROPOUTS = ("attention_dropout",)
_GPT_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
DROPOUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), _LLAMA_DROPOUTS),
    **dict.fromkeys(("olmo2", "granite", "smollm3", "helium", "cohere", "cohere2", "stablelm"), _LLAMA_DROPOUTS),
    **dict.fromkeys(("openai-gpt", "gpt2", "gptj"), _GPT_DROPOUTS),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"), _LLAMA_DROPOUTS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "granitemoe"), _LLAMA_DROPOUTS),
    "phi3": ("resid_pdrop", "attention_dropout"),
    "phi": ("resid_pdrop", "embd_pdrop", "attention_dropout"),
    "starcoder2": ("residual_dropout", "embedding_dropout", "attention_dropout"),
    "gpt_neo": ("resid_dropout", "embed_dropout", "attention_dropout"),
    "gpt_neox": ("hidden_dropout", "attention_dropout"),
    "opt": ("dropout", "attention_dropout"),
    "bloom": ("hidden_dropout", "attention_dropout"),
    "falcon": ("hidden_dropout",),
    "mpt": (),
    "phimoe": (),  # its router draws lots in training
}


def redraw(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every saved tensor anew from N(0, 0.2): fresh norms are 1 and biases 0, which hides a forgotten one."""
    torch.manual_seed(seed)
    saved = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    with torch.no_grad():
        for tensor in saved.values():
            tensor.normal_(std=0.2)
    return model
