"""Mixtral 8x7B and 8x22B: Mistral with eight experts, two a token. arXiv 2401.04088."""

from ..entries import Field
from ..rules import Family
from .common import ATTENTION, CAUSAL_LM, HEAD, LAYER, LLAMA_CONFIG, PRE_NORMS, ROTARY_BUFFERS, SPELLINGS
from .experts import AUXILIARY_LOSS, LOSS_OUTPUT, ONLY_EXPERTS, ROUTER_IN_MODEL_DTYPE, experts, router, routing

SPARSE = f"{LAYER}.block_sparse_moe"
SPARSE_WEIGHTS = [*router(f"{SPARSE}.gate"), *experts(f"{SPARSE}.experts.{{e}}", "w1", "w3", "w2")]

FAMILY = Family(
    "mixtral",
    config=[
        *LLAMA_CONFIG,
        Field("sliding_window"),
        *routing("num_local_experts"),
        *ONLY_EXPERTS,
        *AUXILIARY_LOSS,
        *ROUTER_IN_MODEL_DTYPE,
        # In training: theirs is on what the experts read as well.
        Field("router_jitter_noise"),
    ],
    weights=[
        *HEAD,
        *ATTENTION,
        *PRE_NORMS,
        *SPARSE_WEIGHTS,
    ],
    drops=ROTARY_BUFFERS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "MixtralForCausalLM"},
    inert=LOSS_OUTPUT,
)
