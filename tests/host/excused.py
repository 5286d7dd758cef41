"""Tests of transformers that fail on some styles, each with the reason."""

from dataclasses import dataclass
from fnmatch import fnmatch


@dataclass(frozen=True)
class Excuse:
    """Args:
    tests: their names, patterns as of a shell, `|` between them.
    styles: of `styles.py`, likewise.
    native: the class of transformers on which the same tests fail for the same reason. None: no class does, and the
        reason is a decision of ours.
    reason: why they fail.
    """

    tests: str
    styles: str
    native: str | None
    reason: str

    def covers(self, test: str, style: str) -> bool:
        named = ((test, self.tests), (style, self.styles))
        return all(any(fnmatch(name, pattern) for pattern in patterns.split("|")) for name, patterns in named)


EXCUSED = (
    Excuse(
        "test_assisted_decoding_*|test_beam_search_generate_dict_outputs_use_cache|test_cache_format"
        "|test_generate_from_inputs_embeds_with_static_cache|test_generate_with_static_cache"
        "|test_greedy_generate_dict_outputs_use_cache",
        "sliding|chunked|gemma2|gpt_oss",
        "MistralForCausalLM, Gemma2ForCausalLM",
        "The cache of a window shorter than the text holds fewer keys than the test expects.",
    ),
    Excuse(
        "test_left_padding_compatibility",
        "gemma2",
        "Gemma2ForCausalLM",
        "The last place of a text is padding, and in its window no token is real.",
    ),
    Excuse(
        "test_moe_parallel_plans_shard_experts",
        "gpt_oss",
        "GptOssModel",
        "Experts with biases are whole on each device under tensor parallelism: cut, each would add its whole bias.",
    ),
    Excuse(
        "test_training_overfit",
        "per_layer",
        "LlamaModel with a per_layer_config",
        "The test reads num_key_value_heads of the whole model, which transformers refuses where layers differ in it.",
    ),
    Excuse(
        "test_model_rope_scaling_from_config_*",
        "seq2seq_rope",
        "MoonshineModel",
        "The test scales the RoPE of `config.get_text_config(decoder=True)`, for an encoder-decoder a copy.",
    ),
    Excuse(
        "test_eager_matches_batched_and_grouped_inference_1_fp32",
        "*",
        None,
        "In fp32 on a CPU our own loop runs in place of the grouped product, see `experts.py`, so that is not called.",
    ),
    Excuse(
        "test_training_gradient_checkpointing_use_reentrant_true",
        "moe_packed",
        None,
        "Reentrant checkpoints run the routers without gradients: a loss on them would train nothing, and is refused.",
    ),
    Excuse(
        "test_bc_cache_name_forward",
        "*",
        None,
        "The cache by its old name gives no warning: PEFT before 0.22 knows no other, and nobody could act on it.",
    ),
)
