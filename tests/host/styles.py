"""The architectures on which transformers' own tests are run: a row each, on top of the sizes of its kind."""

from typing import Any

Switches = dict[str, Any]

# transformers' tests expect two layers, 99 tokens or few more, and a model of less than a million parameters.
SIZES: Switches = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def decoder(**switches: Any) -> Switches:
    return {**SIZES, **switches}


def encoder(**switches: Any) -> Switches:
    whole: Switches = {"topology": "encoder", "num_key_value_heads": 4, "classifier_pooling": "first"}
    return {**SIZES, **whole, **switches}


def seq2seq(**switches: Any) -> Switches:
    whole: Switches = {
        "topology": "encoder-decoder",
        "num_key_value_heads": 4,
        "decoder_start_token_id": 0,
        "classifier_pooling": "eos",
        "classifier_dense": True,
        "classifier_bias": True,
    }
    return {**SIZES, **whole, **switches}


MLP: Switches = {"ffn_type": "mlp", "hidden_act": "gelu", "ffn_bias": True}
BIASES: Switches = {"attention_bias": True, "attention_output_bias": True}
POST: Switches = {"norm_placement": "post", "final_norm": False, "norm_type": "layernorm", "norm_eps": 1e-5}
MOE: Switches = {"num_experts": 4, "moe_intermediate_size": 16}
MLA: Switches = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
ALTERNATING = ["sliding_attention", "full_attention"]
T5: Switches = {
    "ffn_type": "mlp",
    "hidden_act": "relu",
    "position_encoding": "relative_bias",
    "relative_attention_num_buckets": 8,
    "attention_scale": 1.0,
    "tie_word_embeddings": True,
    "logit_scale": 0.17,
}

STYLES: dict[str, Switches] = {
    # decoders: positions
    "llama": decoder(),
    "learned": decoder(position_encoding="learned", norm_type="layernorm", **MLP, **BIASES),
    "sinusoidal": decoder(position_encoding="sinusoidal", embedding_scale=5.0, **MLP),
    "alibi": decoder(position_encoding="alibi", norm_type="layernorm", **MLP),
    "relative_bias": decoder(position_encoding="relative_bias", relative_attention_num_buckets=8),
    # heads, norms and blocks
    "mha_biases": decoder(num_key_value_heads=4, ffn_bias=True, **BIASES),
    "tied": decoder(tie_word_embeddings=True),
    "qk_norm": decoder(qk_norm="head", head_dim=10),
    "post_norm": decoder(**POST),
    "parallel": decoder(parallel_block=True, norm_type="layernorm", rope_interleaved=True),
    "per_layer": decoder(
        per_layer_config={1: {"intermediate_size": 21, "hidden_act": "gelu", "num_key_value_heads": 1}}
    ),
    # windows and scores
    "sliding": decoder(sliding_window=4),
    "chunked": decoder(attention_chunk_size=4, layer_types=["chunked_attention", "full_attention"]),
    "gemma2": decoder(
        sliding_window=4,
        layer_types=ALTERNATING,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        norm_placement="sandwich",
        norm_offset=1.0,
        embedding_scale=5.65,
        tie_word_embeddings=True,
    ),
    "gpt_oss": decoder(
        sliding_window=4,
        layer_types=ALTERNATING,
        attention_sinks=True,
        ffn_bias=True,
        router_bias=True,
        swish_beta=1.702,
        glu_limit=7.0,
        glu_up_offset=1.0,
        **BIASES,
        **MOE,
    ),
    # latent attention and experts
    "mla": decoder(**MLA),
    "deepseek": decoder(
        rope_interleaved=True,
        mlp_layer_types=["dense", "sparse"],
        num_experts=8,
        moe_intermediate_size=16,
        num_shared_experts=1,
        router_score="sigmoid",
        router_selection_bias=True,
        router_group_score="top2",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        **MLA,
    ),
    "moe_packed": decoder(router_aux_loss_coef=0.01, **MOE),
    "moe_linear": decoder(experts_layout="linear", **MOE),
    "capacity": decoder(expert_capacity=4, **MOE),
    # encoders
    "bert": encoder(
        position_encoding="learned",
        type_vocab_size=2,
        embedding_norm=True,
        pooler=True,
        lm_head_transform=True,
        lm_head_bias=True,
        tie_word_embeddings=True,
        **POST,
        **MLP,
        **BIASES,
    ),
    "modernbert": encoder(
        sliding_window=4,
        layer_types=ALTERNATING,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        norm_type="layernorm",
        norm_bias=False,
        embedding_norm=True,
        first_attention_norm=False,
        hidden_act="gelu",
        lm_head_transform=True,
        tie_word_embeddings=True,
    ),
    "albert": encoder(
        position_encoding="learned",
        embedding_size=16,
        layer_groups=1,
        embedding_norm=True,
        pooler=True,
        classifier_pooling="pooler",
        lm_head_transform=True,
        lm_head_bias=True,
        tie_word_embeddings=True,
        **POST,
        **MLP,
        **BIASES,
    ),
    # encoder-decoders
    "t5": seq2seq(**T5),
    "bart": seq2seq(
        position_encoding="learned",
        position_offset=2,
        embedding_norm=True,
        lm_head_bias=True,
        tie_word_embeddings=True,
        **POST,
        **MLP,
        **BIASES,
    ),
    "seq2seq_rope": seq2seq(source_stack={"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}),
    "switch": seq2seq(
        num_experts=4, num_experts_per_tok=1, norm_topk_prob=False, mlp_layer_types=["dense", "sparse"], **T5
    ),
}
