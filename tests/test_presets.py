"""Presets against what their papers and cards publish, and against the models that they make."""

from typing import Any

import pytest

from hf_llmarch import LlmArchConfig
from hf_llmarch.conversion.families import families
from hf_llmarch.study import measure, presets
from hf_llmarch.study.analysis import analyze

# Parameters as published, to the digit, by the paper or the card on the Hub.
PUBLISHED = {
    **{"bert-base": "110M", "roberta-base": "125M", "roberta-large": "355M"},
    **{"flan-t5-small": "77.0M", "flan-t5-base": "248M", "flan-t5-large": "783M"},
    **{"flan-t5-xl": "2.85B", "flan-t5-xxl": "11.1B"},
    **{"switch-base-128": "7.4B", "switch-large-128": "26.3B", "switch-c-2048": "1571B"},
    **{"bart-base": "139M", "bart-large": "406M", "gpt-1": "117M"},
    **{"gpt-2": "124M", "gpt-2-medium": "355M", "gpt-2-large": "774M", "gpt-2-xl": "1558M"},
    **{"gpt-3-small": "125M", "gpt-3-large": "760M", "gpt-3-xl": "1.3B", "gpt-3-2.7b": "2.7B", "gpt-3-6.7b": "6.7B"},
    **{"gpt-3-13b": "13B", "gpt-3-175b": "175B", "gpt-j-6b": "6.05B"},
    **{"palm-8b": "8.63B", "palm-62b": "62.50B"},
    **{"bloom-560m": "559214592", "bloom-1b1": "1065314304", "bloom-1b7": "1722408960", "bloom-3b": "3002557440"},
    **{"bloom-7b1": "7069016064", "bloom-176b": "176247271424", "mpt-7b": "6.65B", "mpt-30b": "30.0B"},
    **{"llama-7b": "6.7B", "llama-13b": "13.0B", "llama-33b": "32.5B"},
    **{"llama-2-7b": "6.74B", "llama-2-13b": "13.0B", "llama-2-70b": "69.0B", "llama-3-8b": "8.03B"},
    **{"llama-3-70b": "70.6B", "llama-3.1-8b": "8.03B", "llama-3.1-70b": "70.6B"},
    **{"llama-3.2-1b": "1.24B", "llama-3.2-3b": "3.21B", "code-llama-7b": "6.74B", "code-llama-34b": "33.7B"},
    **{"tinyllama-1.1b": "1.10B", "mistral-7b-v0.1": "7.24B", "mistral-7b-v0.3": "7.25B"},
    **{"mixtral-8x7b": "46.7B", "mixtral-8x22b": "141B"},
    **{"qwen2-0.5b": "0.49B", "qwen2-1.5b": "1.54B", "qwen2-7b": "7.62B", "qwen2-72b": "72.7B"},
    **{"qwen3-0.6b": "0.6B", "qwen3-1.7b": "1.7B", "qwen3-4b": "4.0B", "qwen3-8b": "8.2B", "qwen3-14b": "14.8B"},
    **{"qwen3-32b": "32.8B", "qwen3-30b-a3b": "30.5B", "qwen3-235b-a22b": "235B"},
    **{"gemma-2b": "2.51B", "gemma-7b": "8.54B", "gemma-2-2b": "2.61B", "gemma-2-9b": "9.24B", "gemma-2-27b": "27.2B"},
    **{"gemma-3-270m": "268M", "gemma-3-1b": "1.00B", "command-r": "35.0B", "command-r-plus": "104B"},
    **{"deepseek-moe-16b": "16.4B", "deepseek-v2-lite": "15.7B", "deepseek-v2": "236B"},
    **{"deepseek-v3": "671B", "deepseek-r1": "671B", "gpt-oss-20b": "20.91B", "gpt-oss-120b": "116.83B"},
    **{"smollm2-135m": "135M", "smollm2-360m": "362M", "smollm2-1.7b": "1.71B", "smollm3-3b": "3.08B"},
    **{"olmo-2-1b": "1.48B", "olmo-2-7b": "7.30B", "olmo-2-13b": "13.7B", "olmo-2-32b": "32.2B"},
}
# Active a token; some papers count the table of embeddings, of which a token reads a row, and some do not.
ACTIVE = {"mixtral-8x7b": "12.9B", "mixtral-8x22b": "39B", "deepseek-moe-16b": "2.8B", "deepseek-v2": "21B"}
ACTIVE |= {"qwen3-235b-a22b": "22B"}
ACTIVE_WITHOUT_EMBEDDING = {"deepseek-v3": "37B", "deepseek-r1": "37B", "gpt-oss-20b": "3.61B", "gpt-oss-120b": "5.13B"}
# Without the embedding, from tables of the Gemma papers (arXiv 2403.08295, 2408.00118, 2503.19786), in millions.
BEYOND_EMBEDDING = {
    **{"gemma-2b": 1982, "gemma-7b": 7751, "gemma-2-2b": 2025, "gemma-2-9b": 8324, "gemma-2-27b": 26047},
    **{"gemma-3-1b": 698, "gemma-3-4b": 3209, "gemma-3-12b": 10759, "gemma-3-27b": 25600},
}
# What papers print and our count does not round to: sizes that stand for a name (T5, GPT-3's "350M" with the layers of
# GPT-2's 355M, LLaMA 3.1's "405B"), a vocabulary that is not given exactly (arXiv 1706.03762 table 3), another head
# (BERT's two, ModernBERT's bare model), and last digits (LLaMA's 65.2B, PaLM's 540.35B) that are one off.
ABOUT = {
    **{"transformer-base": 65e6, "transformer-big": 213e6, "gpt-3-medium": 350e6, "bert-large": 340e6},
    **{"modernbert-base": 149e6, "modernbert-large": 395e6, "llama-65b": 65.2e9, "llama-3.1-405b": 405e9},
    **{"palm-540b": 540.35e9, "t5-small": 60e6, "t5-base": 220e6, "t5-large": 770e6, "t5-3b": 2.8e9, "t5-11b": 11e9},
}


def rounded(count: int, like: str) -> str:
    """A count in the unit and with the decimals of a published one."""
    unit = like.lstrip("0123456789.")
    decimals = len(like.removesuffix(unit).partition(".")[2])
    return f"{count / {'': 1, 'M': 1e6, 'B': 1e9}[unit]:.{decimals}f}{unit}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    found = analyze(presets.get(name), sequence_length=2)
    assert rounded(found.parameters, PUBLISHED[name]) == PUBLISHED[name]
    if name in ACTIVE:
        assert rounded(found.active_parameters, ACTIVE[name]) == ACTIVE[name]
    if name in ACTIVE_WITHOUT_EMBEDDING:
        like = ACTIVE_WITHOUT_EMBEDDING[name]
        assert rounded(found.active_without_embedding, like) == like


@pytest.mark.parametrize("name", BEYOND_EMBEDDING)
def test_parameters_beyond_the_embedding(name: str) -> None:
    found = analyze(presets.get(name), sequence_length=2)
    assert round((found.parameters - found.embedding_parameters) / 1e6) == BEYOND_EMBEDDING[name]


@pytest.mark.parametrize("name", ABOUT)
def test_parameters_about_as_published(name: str) -> None:
    assert analyze(presets.get(name), sequence_length=2).parameters == pytest.approx(ABOUT[name], rel=0.045)


def test_nanogpt_counts_without_positions() -> None:
    """What its `get_num_params` prints, for its character model and for GPT-2 (README, model.py)."""
    for name, millions in (("nanogpt-shakespeare", 10.65), ("nanogpt", 123.59)):
        found = analyze(presets.get(name), sequence_length=2)
        assert round((found.parameters - found.parts["positions"]) / 1e6, 2) == millions


def check(config: LlmArchConfig) -> None:
    # Longer than the window, where there is one and the positions allow it: nothing is computed on the meta device.
    length = min(4100 if config.sliding_window else 33, config.max_position_embeddings)
    sizes: dict[str, Any] = {"batch_size": 2, "sequence_length": length}
    found = analyze(config, **sizes, dtype="float32")
    seen = measure.measure(config, **sizes)
    assert (found.parameters, found.forward_flops) == (seen.parameters, seen.forward_flops)
    if seen.decode_flops is not None:
        assert (found.decode_flops, found.kv_cache_bytes) == (seen.decode_flops, seen.kv_cache_bytes)
    assert all(formula.value == formula.counted for formula in found.formulas)


ONE_A_FAMILY = {row["family"] or name: name for name, row in presets.table().items()}


@pytest.mark.parametrize("name", ONE_A_FAMILY.values())
def test_few_layers_are_what_is_measured(name: str) -> None:
    """As many as there are kinds of layers."""
    config = presets.get(name)
    kinds = list(zip(config.layer_types, config.mlp_layer_types or config.layer_types, strict=True))
    check(presets.get(name, num_hidden_layers=max(kinds.index(kind) for kind in set(kinds)) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", presets.names())
def test_whole_presets_are_what_is_measured(name: str) -> None:
    check(presets.get(name))


def test_every_preset_is_fresh_and_can_be_changed() -> None:
    for name in presets.names():
        kinds = presets.get(name).layer_types
        changed = presets.get(name, num_hidden_layers=4)
        assert changed.num_hidden_layers == len(changed.layer_types) == 4
        assert changed.layer_types == kinds[:4]
        assert presets.get(name).num_hidden_layers == len(kinds) != 4


def test_a_pattern_cannot_be_guessed() -> None:
    assert presets.get("llama-3-8b", num_hidden_layers=40).num_hidden_layers == 40
    with pytest.raises(ValueError, match="Give layer_types too"):
        presets.get("gemma-3-1b", num_hidden_layers=40)


def test_rows_state_their_numbers() -> None:
    for name, row in presets.table().items():
        found = analyze(presets.get(name), sequence_length=2)
        assert (row["parameters"], row["active"]) == (found.parameters, found.active_parameters), name


def test_rows_name_their_source_and_families_that_exist() -> None:
    for name, row in presets.table().items():
        assert set(row) == {"source", "parameters", "active", "note", "family", "config"}, name
        assert row["source"]
        assert row["family"] in (None, *families()), name


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="Did you mean 'transformer-base'"):
        presets.get("transformer-bas")


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [
        ("llama-3-8b", "150M", 150e6),
        ("bert-base", 30e6, 30e6),
        ("gemma-2-9b", "600M", 600e6),
        ("deepseek-v3", "1B", 1e9),
        ("t5-base", "60M", 60e6),
        ("gpt-oss-20b", "2B", 2e9),
    ],
)
def test_scaled_keeps_the_style(name: str, size: str | float, count: float) -> None:
    original, config = presets.get(name), presets.scaled(name, parameters=size)
    assert analyze(config, sequence_length=2).parameters == pytest.approx(count, rel=0.1)
    assert config.attention_kind == original.attention_kind
    for ratio in ("intermediate_size", "moe_intermediate_size"):
        if getattr(original, ratio):
            share = getattr(config, ratio) / config.hidden_size
            assert share == pytest.approx(getattr(original, ratio) / original.hidden_size, rel=0.03)
    group = config.num_attention_heads / config.num_key_value_heads
    assert group == original.num_attention_heads / original.num_key_value_heads
    assert set(config.layer_types) == set(original.layer_types)
    assert config.vocab_size == original.vocab_size


def test_scaled_says_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="vocabulary of 128,256"):
        presets.scaled("llama-3-8b", parameters="1M")
    with pytest.raises(ValueError, match="write it like 150M"):
        presets.scaled("llama-3-8b", parameters="much")
