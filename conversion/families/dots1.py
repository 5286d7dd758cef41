"""dots.llm1: Qwen 3's attention with DeepSeek-V3's experts. arXiv 2506.05767."""

from ..entries import Const, Derived
from .common import ATTENTION_BIAS, LLAMA_CONFIG, LLAMA_WEIGHTS, QK_NORM, first_of_the_sliding_tail, windows
from .decoders import decoder
from .deepseek_v2 import DENSE_FIRST, FINE_EXPERTS, FINE_WEIGHTS, TRAINING
from .deepseek_v3 import SELECTION_BIAS, SIGMOID_ROUTER

FAMILY = decoder(
    "dots1",
    "Dots1",
    [
        *LLAMA_CONFIG,
        *ATTENTION_BIAS,
        Const("qk_norm", "head"),
        # Qwen's windows without the switch.
        Derived(
            ("sliding_window", "max_window_layers", "layer_types"),
            windows,
            lambda config: {
                "sliding_window": config.sliding_window,
                "max_window_layers": first_of_the_sliding_tail(config.layer_types),
                "layer_types": config.layer_types,
            },
        ),
        *FINE_EXPERTS,
        *DENSE_FIRST,
        *SIGMOID_ROUTER,
    ],
    [*LLAMA_WEIGHTS, *QK_NORM, *FINE_WEIGHTS, *SELECTION_BIAS],
    inert=TRAINING,
)
