"""LLaMA 1, 2 and 3.x, Code Llama, TinyLlama, SmolLM2 and all that publish as `llama`. arXiv 2302.13971, 2407.21783.

Under names of their own: InternLM3 (Shanghai AI Laboratory 2025) and IQuest-Coder (IQuest Lab 2025).
"""

from ..rules import Family
from .common import ATTENTION_BIAS, CAUSAL_LM, LLAMA_CONFIG, LLAMA_WEIGHTS, MLP_BIAS, ROTARY_BUFFERS, SPELLINGS
from .decoders import decoder

LLAMA = [*LLAMA_CONFIG, *ATTENTION_BIAS, *MLP_BIAS]

FAMILY = Family(
    "llama",
    config=LLAMA,
    weights=LLAMA_WEIGHTS,
    drops=ROTARY_BUFFERS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "LlamaForCausalLM"},
    # The name of the first conversions of LLaMA 1, whose class was still spelt LLaMAForCausalLM.
    aliases={"max_sequence_length": "max_position_embeddings"},
    inert=("is_llama_config",),
)
FAMILIES = (
    FAMILY,
    decoder("internlm3", "Llama", LLAMA, LLAMA_WEIGHTS, also={"InternLM3ForCausalLM": CAUSAL_LM}),
    decoder("iquestcoder", "Llama", LLAMA, LLAMA_WEIGHTS, also={"IQuestCoderForCausalLM": CAUSAL_LM}),
)
