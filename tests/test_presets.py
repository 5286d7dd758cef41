"""Presets against what their papers and cards publish, and against the models that they make."""

from collections.abc import Callable
from typing import Any

import pytest

from hf_llmarch import LlmArchConfig
from hf_llmarch.conversion.families import families
from hf_llmarch.study import measure, presets
from hf_llmarch.study.analysis import Analysis, analyze

# Parameters as keras-hub counts its own implementations of these models (keras_hub/src/models/*/*_presets.py), with the
# switches in which they differ from the configs on the Hub.
COUNTED: list[tuple[str, dict[str, Any], int]] = [
    ("t5-small", {}, 60_506_624),
    ("t5-base", {}, 222_903_552),
    ("t5-large", {}, 737_668_096),
    ("flan-t5-small", {}, 76_961_152),
    ("flan-t5-base", {}, 247_577_856),
    ("flan-t5-large", {}, 783_150_080),
    ("flan-t5-xl", {}, 2_849_757_184),
    ("flan-t5-xxl", {}, 11_135_332_352),
    ("gpt-2", {}, 124_439_808),
    ("gpt-2-medium", {}, 354_823_168),
    ("gpt-2-large", {}, 774_030_080),
    ("gpt-2-xl", {}, 1_557_611_200),
    ("bloom-560m", {}, 559_214_592),
    ("bloom-1b1", {}, 1_065_314_304),
    ("bloom-1b7", {}, 1_722_408_960),
    ("bloom-3b", {}, 3_002_557_440),
    ("llama-2-7b", {}, 6_738_415_616),
    ("llama-3.1-8b", {}, 8_030_261_248),
    ("llama-3.2-1b", {"tie_word_embeddings": False}, 1_498_482_688),
    ("llama-3.2-3b", {"tie_word_embeddings": False}, 3_606_752_256),
    ("mistral-7b-v0.1", {}, 7_241_732_096),
    ("mistral-7b-v0.3", {}, 7_248_023_552),
    ("mixtral-8x7b", {}, 46_702_792_704),
    ("qwen2-0.5b", {}, 494_032_768),
    ("qwen2-1.5b", {}, 1_543_714_304),
    ("qwen2-7b", {}, 7_615_616_512),
    ("qwen2-72b", {}, 72_706_203_648),
    ("qwen3-0.6b", {}, 596_049_920),
    ("qwen3-1.7b", {}, 1_720_574_976),
    ("qwen3-4b", {}, 4_022_468_096),
    ("qwen3-8b", {}, 8_190_735_360),
    ("qwen3-14b", {}, 14_768_307_200),
    ("qwen3-32b", {}, 32_762_123_264),
    ("qwen3-30b-a3b", {}, 30_532_122_624),
    ("qwen3-235b-a22b", {}, 235_093_634_560),
    ("gemma-2b", {}, 2_506_172_416),
    ("gemma-7b", {}, 8_537_680_896),
    ("gemma-2-2b", {}, 2_614_341_888),
    ("gemma-2-9b", {}, 9_241_705_984),
    ("gemma-2-27b", {}, 27_227_128_320),
    ("gemma-3-270m", {}, 268_098_176),
    ("gemma-3-1b", {}, 999_885_952),
    ("gemma-3-4b", {"vocab_size": 262144}, 3_880_099_328),
    ("gemma-3-12b", {"vocab_size": 262144}, 11_765_788_416),
    ("gemma-3-27b", {"vocab_size": 262144}, 27_009_002_240),
    ("gpt-oss-20b", {}, 20_914_757_184),
    ("gpt-oss-120b", {}, 116_829_156_672),
    # nanoGPT's own count of GPT-2 without biases (transformer_sizing.ipynb).
    ("nanogpt", {"vocab_size": 50257}, 124_337_664),
]
# What a published count may be of, from ours.
KINDS: dict[str, Callable[[Analysis], int]] = {
    "parameters": lambda found: found.parameters,
    "active": lambda found: found.active_parameters,
    "without_embedding": lambda found: found.parameters - found.embedding_parameters,
    "active_without_embedding": lambda found: found.active_without_embedding,
}
UNITS = {"": 1, "M": 1e6, "B": 1e9}
PUBLISHED = [name for name, row in presets.table().items() if row["published"]]


@pytest.mark.parametrize(("name", "switches", "count"), COUNTED, ids=[name for name, _, _ in COUNTED])
def test_parameters_are_those_of_another_implementation(name: str, switches: dict[str, Any], count: int) -> None:
    assert analyze(presets.get(name, **switches), sequence_length=2).parameters == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    """To the digit that is printed; else within a bound that is needed, and for a reason that is given."""
    found, published = analyze(presets.get(name), sequence_length=2), presets.row(name)["published"]
    within = published.get("within", {})
    assert set(published) - {"source", "within", "because"} <= set(KINDS)
    assert ("because" in published) == bool(within)
    for kind in set(KINDS) & set(published):
        printed, count = published[kind], KINDS[kind](found)
        unit = printed.lstrip("0123456789.")
        decimals = len(printed.removesuffix(unit).partition(".")[2])
        rounded = f"{count / UNITS[unit]:.{decimals}f}{unit}"
        if kind in within:
            assert rounded != printed
            assert count == pytest.approx(float(printed.removesuffix(unit)) * UNITS[unit], rel=within[kind])
        else:
            assert rounded == printed


def test_few_presets_have_no_published_count() -> None:
    """A checkpoint whose authors print none, one that the paper has with more experts, and nanoGPT, counted below."""
    assert set(presets.names()) - set(PUBLISHED) == {"roformer-base", "switch-base-8", "nanogpt", "nanogpt-shakespeare"}


def test_nanogpt_counts_without_positions() -> None:
    """What its `GPT` prints when it is made, by `get_num_params` (model.py)."""
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
        assert set(row) == {"source", "parameters", "active", "published", "note", "family", "config"}, name
        assert row["source"]
        assert not row["published"] or row["published"]["source"]
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
