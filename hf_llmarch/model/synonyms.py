"""The names that the configs of other models have for fields of ours with the same value, for whoever types them here.

A name is here where the value can be copied as it stands; what has to be computed is for the conversion.
"""

SYNONYMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("n_embd", "n_embed", "d_model", "dim"), ("hidden_size",)),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "encoder_layers"), ("num_hidden_layers",)),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "encoder_attention_heads"), ("num_attention_heads",)),
    **dict.fromkeys(("num_kv_heads", "n_kv_heads", "n_head_kv", "num_query_groups"), ("num_key_value_heads",)),
    "d_kv": ("head_dim",),
    **dict.fromkeys(("n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "hidden_dim"), ("intermediate_size",)),
    **dict.fromkeys(("n_positions", "n_ctx", "max_seq_len", "block_size"), ("max_position_embeddings",)),
    "activation": ("hidden_act",),
    **dict.fromkeys(("activation_function", "hidden_activation", "dense_act_fn"), ("hidden_act",)),
    "classifier_activation": ("classifier_act", "head_act"),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), ("norm_eps",)),
    **dict.fromkeys(("qkv_bias", "use_qkv_bias"), ("attention_bias",)),
    "mlp_bias": ("ffn_bias",),
    **dict.fromkeys(("use_bias", "enable_bias"), ("attention_bias", "attention_output_bias", "ffn_bias")),
    "bias": ("attention_bias", "attention_output_bias", "ffn_bias", "norm_bias"),
    "decoder_bias": ("lm_head_bias",),
    **dict.fromkeys(("attn_pdrop", "attention_probs_dropout_prob"), ("attention_dropout",)),
    **dict.fromkeys(("resid_pdrop", "resid_dropout", "residual_dropout"), ("hidden_dropout",)),
    "hidden_dropout_prob": ("hidden_dropout", "embedding_dropout"),
    **dict.fromkeys(("embd_pdrop", "embed_dropout"), ("embedding_dropout",)),
    "activation_dropout": ("ffn_dropout",),
    "dropout": ("hidden_dropout", "embedding_dropout"),
    "dropout_rate": ("hidden_dropout", "embedding_dropout", "ffn_dropout", "attention_dropout", "final_dropout"),
    **dict.fromkeys(("num_local_experts", "n_routed_experts"), ("num_experts",)),
    "n_shared_experts": ("num_shared_experts",),
    "rope_interleave": ("rope_interleaved",),
    "scale_attn_by_inverse_layer_idx": ("attention_scale_by_layer",),
    "reorder_and_upcast_attn": ("scores_in_fp32",),
    "embedding_multiplier": ("embedding_scale",),
    "residual_multiplier": ("residual_scale",),
    "attention_multiplier": ("attention_scale",),
    "init_std": ("initializer_range",),
}
