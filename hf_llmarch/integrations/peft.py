"""What PEFT adapts of our models where a user names no modules: rows for `llmarch` in PEFT's tables of defaults.

PEFT looks a model up by its type, in a table for each of its methods, and has no function that would enter one there.
"""

import re

# Queries and values, as for LLaMA. MLA's values come of a latent, which is adapted where it is made and not where it is
# read (kv_b_proj): absorbed decoding needs that weight as it is.
QUERIES_AND_VALUES = ("q_proj", "v_proj", "q_b_proj", "kv_a_proj_with_mqa")

# Methods that adapt other modules than LoRA does; PEFT adapts those of a list that a model has.
DEFAULTS: dict[str, tuple[str, ...]] = {
    # A bias on what becomes values.
    "BEFT_TARGET": ("v_proj", "kv_b_proj"),
    # A factor on keys, on values (both come out of MLA's kv_b_proj) and on the feed-forward's inner activations.
    "IA3_TARGET": ("k_proj", "v_proj", "kv_b_proj", "down_proj"),
    "IA3_FEEDFORWARD": ("down_proj",),
    # The norms of the residual stream, wherever the placement has them.
    "LNTUNING_TARGET": (
        *(f"{branch}_norm.{slot}" for branch in ("attn", "cross", "mlp") for slot in ("pre", "post", "out")),
        "norm",
    ),
    # Each linear layer of a block.
    "OSF_TARGET": (
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    ),
}


def register(model_type: str) -> None:
    """Enter `model_type` into every table of defaults of the installed PEFT, if there is one. Twice does no harm."""
    try:
        from peft.utils import constants
    except ImportError:
        return
    for name, table in vars(constants).items():
        if found := re.fullmatch(r"TRANSFORMERS_MODELS_TO_(\w+)_MODULES_MAPPING", name):
            table[model_type] = list(DEFAULTS.get(found[1], QUERIES_AND_VALUES))
