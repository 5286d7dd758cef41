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

GRANITE_SCALES: Config = {
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 7.0},
}
LATENT: Config = {
    **{
        "num_key_value_heads": 6,
        "q_lora_rank": 22,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 14,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
}
WINDOWS: Config = {
    **{"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
}
YARN: Config = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16, "beta_fast": 8}

CASES |= {
    "exaone": tiny(LLAMA, rope_theta=321.0, hidden_act="relu"),
    "internlm3": tiny(LLAMA, rope_theta=321.0, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "iquestcoder": tiny(LLAMA, rope_theta=321.0),
    "glm": tiny(LLAMA, rope_theta=321.0, partial_rotary_factor=0.75),
    "glm-full-tied": tiny(
        LLAMA, attention_bias=False, partial_rotary_factor=1.0, hidden_act="relu", tie_word_embeddings=True
    ),
    "glm4": tiny(LLAMA, rope_theta=321.0, attention_bias=True),
    "olmo3": tiny(LLAMA, rope_theta=500000.0, rope_scaling=YARN, **WINDOWS),
    "olmo3-two-bases": tiny(
        LLAMA,
        attention_bias=True,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 777.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 33.0},
        },
        **WINDOWS,
    ),
    "ernie4_5": tiny(LLAMA, rope_theta=321.0),
    "ernie4_5-biases": tiny(LLAMA, use_bias=True, tie_word_embeddings=False, hidden_act="relu"),
    "seed_oss": tiny(LLAMA, rope_theta=321.0, attention_dropout=0.0, residual_dropout=0.1),
    "seed_oss-biases": tiny(LLAMA, attention_bias=False, attention_out_bias=True, mlp_bias=True),
    "ministral": tiny(LLAMA, rope_theta=321.0, **WINDOWS),
    "ministral-full": tiny(LLAMA, layer_types=["full_attention"] * 3, tie_word_embeddings=True),
    "cwm": tiny(LLAMA, **WINDOWS),
    "nemotron": tiny(MHA, num_key_value_heads=2, head_dim=12, norm_eps=0.1, rope_theta=321.0, attention_bias=True),
    "nemotron-biases": tiny(
        MHA, num_key_value_heads=6, head_dim=8, partial_rotary_factor=0.75, mlp_bias=True, hidden_act="gelu"
    ),
    "arcee": tiny(LLAMA, rope_theta=321.0, attention_bias=True),
    "arcee-biases": tiny(LLAMA, mlp_bias=True, hidden_act="gelu", tie_word_embeddings=True),
    "jais2": tiny(LAYER_NORM, head_dim=8, rope_theta=321.0),
    "jais2-no-bias": tiny(LAYER_NORM, attention_bias=False, mlp_bias=False, tie_word_embeddings=True),
    "exaone4": tiny(LLAMA, rope_theta=321.0, **WINDOWS),
    "exaone4-full": tiny(LLAMA, sliding_window=None, layer_types=["full_attention"] * 3, tie_word_embeddings=True),
    "vaultgemma": tiny(LLAMA, sliding_window=5, query_pre_attn_scalar=11, attn_logit_softcapping=3.0),
    "hyperclovax": tiny(LLAMA, **GRANITE_SCALES, rope_theta=321.0, mlp_bias=True),
    "hyperclovax-pre-norm": tiny(LLAMA, head_dim=None, use_post_norm=False, attention_bias=True),
    "granite_swa": tiny(
        LLAMA, **GRANITE_SCALES, **WINDOWS, rope_theta=321.0, layer_rope_theta=[777.0, 33.0, 0], mlp_bias=True
    ),
    "granite_swa-one-base": tiny(LLAMA, **WINDOWS, rope_theta=321.0, attention_bias=True),
    "minicpm3": tiny(
        MHA,
        **LATENT,
        rms_norm_eps=0.1,
        rope_theta=321.0,
        scale_emb=3,
        scale_depth=0.7,
        dim_model_base=20,
    ),
    "minicpm3-plain": tiny(MHA, **{**LATENT, "q_lora_rank": None}, attention_bias=True, mlp_bias=True),
    "youtu": tiny(MHA, **LATENT, rms_norm_eps=0.1, rope_theta=321.0),
    "youtu-halves": tiny(MHA, **LATENT, rope_interleave=False, tie_word_embeddings=False),
    "persimmon": tiny(MHA, layer_norm_eps=0.1, rope_theta=321.0, partial_rotary_factor=0.4),
    "persimmon-plain": tiny(
        MHA, partial_rotary_factor=1.0, qk_layernorm=False, hidden_act="gelu", tie_word_embeddings=True
    ),
}

# DeepSeek's experts in another frame.
FINE: Config = {
    **{"moe_intermediate_size": 28, "n_routed_experts": 9, "n_shared_experts": 2, "num_experts_per_tok": 3},
    **{"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
}
MIXED_MLPS: Config = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
NEW_EXPERTS: dict[str, Config] = {
    "glm4_moe": tiny(
        LLAMA, **FINE, rope_theta=321.0, partial_rotary_factor=0.75, use_qk_norm=True, num_nextn_predict_layers=0
    ),
    "glm4_moe-biases": tiny(
        LLAMA, **FINE, attention_bias=True, first_k_dense_replace=2, norm_topk_prob=False, num_nextn_predict_layers=0
    ),
    "solar_open": tiny(LLAMA, **FINE, rope_theta=321.0, attention_bias=True),
    "sarvam_moe": tiny(LLAMA, **{**FINE, "n_group": 1, "topk_group": 1}, num_nextn_predict_layers=0),
    "glm4_moe_lite": tiny(MHA, **LATENT, **FINE, rms_norm_eps=0.1, rope_theta=321.0, num_nextn_predict_layers=0),
    "glm4_moe_lite-halves": tiny(
        MHA,
        **LATENT,
        **{**FINE, "n_group": 1, "topk_group": 1},
        rope_interleave=False,
        attention_bias=True,
        mlp_layer_types=["sparse", "dense", "sparse"],
        num_nextn_predict_layers=0,
    ),
    "sarvam_mla": tiny(DEEPSEEK, rope_scaling=DEEPSEEK_YARN, num_nextn_predict_layers=0),
    "dots1": tiny(LLAMA, **FINE, first_k_dense_replace=1, rope_theta=321.0, attention_bias=True, sliding_window=None),
    "dots1-windows": tiny(LLAMA, **FINE, norm_topk_prob=True, sliding_window=5, max_window_layers=1),
    "exaone_moe": tiny(
        QWEN_MOE,
        **WINDOWS,
        num_experts=9,
        num_shared_experts=2,
        n_group=3,
        topk_group=2,
        rope_theta=321.0,
    ),
    "hy_v3": tiny(QWEN_MOE, num_shared_experts=2, rope_theta=321.0, attention_bias=True),
    "hy_v3-tied": tiny(QWEN_MOE, **MIXED_MLPS, num_experts=5, router_scaling_factor=0.7, tie_word_embeddings=True),
    "flex_olmo": EXPERTS["olmoe"],
    "minimax_m2": tiny(MIXTRAL, rope_theta=321.0, rotary_dim=6),
    "minimax_m2-full": tiny(MIXTRAL, num_local_experts=7, num_experts_per_tok=1, tie_word_embeddings=True),
    "mellum": tiny(
        QWEN_MOE,
        **WINDOWS,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 33.0},
        },
        attention_bias=True,
    ),
    "mellum-mixed": tiny(QWEN_MOE, **MIXED_MLPS, num_experts=5, norm_topk_prob=False, tie_word_embeddings=True),
    "ernie4_5_moe": tiny(
        LLAMA,
        moe_intermediate_size=28,
        moe_num_experts=7,
        moe_k=3,
        moe_num_shared_experts=2,
        moe_layer_end_index=2,
        rope_theta=321.0,
    ),
    "ernie4_5_moe-none-shared": tiny(
        LLAMA,
        moe_intermediate_size=28,
        moe_num_experts=5,
        moe_k=2,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        moe_layer_end_index=1,
        tie_word_embeddings=False,
    ),
    "granitemoeshared": tiny(MIXTRAL, **GRANITE_SCALES, shared_intermediate_size=36, rope_theta=321.0),
    "granitemoeshared-none": tiny(MIXTRAL, attention_multiplier=0.3, attention_bias=True, tie_word_embeddings=True),
    "granitemoe_swa": tiny(
        MIXTRAL, **GRANITE_SCALES, **WINDOWS, shared_intermediate_size=36, layer_rope_theta=[0, 33.0, 33.0]
    ),
    "flint": tiny(QWEN_MOE, **WINDOWS, shared_expert_intermediate_size=36, mlp_only_layers=[1], rope_theta=321.0),
    "flint-biases": tiny(
        QWEN_MOE,
        **WINDOWS,
        num_experts=5,
        shared_expert_intermediate_size=20,
        mlp_only_layers=[],
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "aria_text": tiny(
        LLAMA, moe_num_experts=5, moe_topk=2, moe_num_shared_experts=3, intermediate_size=28, attention_bias=True
    ),
    "cohere2_moe": tiny(
        LAYER_NORM,
        intermediate_size=28,
        num_experts=5,
        head_dim=8,
        **WINDOWS,
        logit_scale=0.3,
        rope_theta=321.0,
        num_shared_experts=2,
        shared_expert_combination_strategy="sum",
        expert_selection_fn="sigmoid",
    ),
    "cohere2_moe-dense-first": tiny(
        MHA,
        **WINDOWS,
        **MIXED_MLPS,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=0.1,
        intermediate_size=28,
        prefix_dense_intermediate_size=44,
        num_experts=4,
        num_experts_per_tok=3,
        logit_scale=0.7,
    ),
}
CASES |= {
    "gpt_bigcode": tiny(GPT, n_inner=44),
    "gpt_bigcode-each-head": tiny(GPT, multi_query=False, scale_attn_weights=False, tie_word_embeddings=False),
    "xglm": tiny(
        TOKENS,
        pad_token_id=1,
        **{"init_std": 0.03, "d_model": 60, "num_layers": 3, "attention_heads": 6, "ffn_dim": 44},
        max_position_embeddings=64,
        activation_function="relu",
    ),
    "biogpt": tiny(MHA, hidden_act="relu"),
    "biogpt-unscaled": tiny(MHA, scale_embedding=False, tie_word_embeddings=False),
}
EXPERTS |= NEW_EXPERTS
CASES |= NEW_EXPERTS

# Fields of dropout in transformers' configs, by family; of most it is attention's alone.
_GPT_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
DROPOUTS: dict[str, tuple[str, ...]] = {
    **{case: ("attention_dropout",) for case in CASES if "-" not in case},
    **dict.fromkeys(("openai-gpt", "gpt2", "gptj"), _GPT_DROPOUTS),
    "gpt_bigcode": _GPT_DROPOUTS,
    "xglm": ("dropout", "attention_dropout", "activation_dropout"),
    "biogpt": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "ernie4_5": (),
    "ernie4_5_moe": (),
    "seed_oss": ("attention_dropout", "residual_dropout"),
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
