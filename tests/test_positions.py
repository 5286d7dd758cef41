"""Every position encoding against an implementation in double precision, written from its paper or reference code.

Nothing here reads a table of the package: only the numbers that a model hands to its layers are compared.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hf_llmarch import LlmArchConfig, LlmArchModel
from tiny import MLA, TOLERANCES, redraw, tiny_config

Floats = NDArray[np.float64]

THETA = 777.0
WIDTH = 16  # of a head: eight frequencies
POSITIONS = np.array([0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 127])


def assert_near(actual: torch.Tensor, expected: Floats) -> None:
    assert tuple(actual.shape) == expected.shape
    deviation = np.abs(actual.double().numpy() - expected).max()
    assert deviation <= TOLERANCES["double"] * (expected.max() - expected.min())


# -- rotations: arXiv 2104.09864 equation 34, as a product of complex numbers -----------------------------------------


def rotated(x: Floats, frequencies: Floats, positions: NDArray[Any], interleaved: bool, factor: float = 1.0) -> Floats:
    """`x` `(T, D)` with its first 2 * len(frequencies) channels turned, in pairs, by position times frequency."""
    n = len(frequencies)
    first, second = (
        (np.arange(0, 2 * n, 2), np.arange(1, 2 * n, 2)) if interleaved else (np.arange(n), np.arange(n) + n)
    )
    turn = factor * np.exp(1j * np.outer(positions, frequencies))
    turned = (x[:, first] + 1j * x[:, second]) * turn
    out = x.copy()
    out[:, first], out[:, second] = turned.real, turned.imag
    return out


def base_frequencies(theta: float = THETA, width: int = WIDTH) -> Floats:
    return np.array([theta ** (-2 * i / width) for i in range(width // 2)])


def check_rotation(
    config: LlmArchConfig,
    frequencies: Floats,
    factor: float = 1.0,
    positions: NDArray[Any] = POSITIONS,
    layer: int = 0,
) -> None:
    """Queries and keys of one layer of a model come out turned as they should be."""
    model: Any = LlmArchModel(config)
    position_ids = torch.from_numpy(positions)[None]
    state = model.embed_positions.prepare(torch.zeros(1, len(positions), config.hidden_size), position_ids, None)
    rotation = state[config.layer_types[layer]]["rotation"]
    generator = np.random.default_rng(0)
    q, k = generator.normal(size=(2, len(positions), config.rotary_head_dim))
    turned = model.layers[layer].self_attn.rotate(
        torch.from_numpy(q).float()[None, None], torch.from_numpy(k).float()[None, None], rotation
    )
    for ours, x in zip(turned, (q, k), strict=True):
        assert_near(ours[0, 0], rotated(x, frequencies, positions, config.rope_interleaved, factor))


def rope(interleaved: Any = False, max_position_embeddings: Any = 256, **parameters: Any) -> LlmArchConfig:
    return tiny_config(
        head_dim=WIDTH,
        rope_interleaved=interleaved,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_theta": THETA, **parameters},
    )


interleaving = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


@interleaving
def test_default(interleaved: bool) -> None:
    check_rotation(rope(interleaved=interleaved), base_frequencies())


@interleaving
@pytest.mark.parametrize(("fraction", "width"), [(0.25, 4), (0.5, 8), (0.75, 12)])
def test_partial(interleaved: bool, fraction: float, width: int) -> None:
    config = rope(interleaved=interleaved, partial_rotary_factor=fraction)
    check_rotation(config, base_frequencies(width=width))


def test_the_base_is_ten_thousand_unless_given() -> None:
    check_rotation(tiny_config(head_dim=WIDTH), base_frequencies(10000.0))


def test_local_and_global_bases() -> None:
    config = tiny_config(
        head_dim=WIDTH,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 33.0},
        },
    )
    check_rotation(config, base_frequencies(33.0), layer=0)
    check_rotation(config, base_frequencies(5000.0) / 8, layer=1)


def test_nope_layers_are_not_turned() -> None:
    config = tiny_config(head_dim=WIDTH, nope_layers=[1])
    check_rotation(config, base_frequencies(10000.0), layer=0)
    check_rotation(config, np.zeros(0), layer=1)


@interleaving
def test_mla_turns_its_rope_part_alone(interleaved: bool) -> None:
    config = tiny_config(**{**MLA, "rope_interleaved": interleaved, "rope_parameters": {"rope_theta": THETA}})
    check_rotation(config, base_frequencies(width=8))


@pytest.mark.parametrize("factor", [2.5, 8.0])
def test_linear(factor: float) -> None:
    """Positions are divided by the factor, arXiv 2306.15595."""
    check_rotation(rope(rope_type="linear", factor=factor), base_frequencies() / factor)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("factor", [2.5, 8.0])
def test_ntk(factor: float, fraction: float) -> None:
    """NTK-aware scaling: base * s^(d / (d - 2)), so that the last frequency is divided by s and the first kept."""
    width = int(WIDTH * fraction)
    frequencies = base_frequencies(THETA * factor ** (width / (width - 2)), width)
    assert frequencies[-1] == pytest.approx(base_frequencies(width=width)[-1] / factor)
    assert frequencies[0] == 1
    check_rotation(rope(rope_type="ntk", factor=factor, partial_rotary_factor=fraction), frequencies)


@pytest.mark.parametrize("longest", [15, 16, 17, 40, 127])
def test_dynamic_ntk(longest: int) -> None:
    """The base grows with the text: base * (s l / L - (s - 1))^(d / (d - 2)) beyond the original length L."""
    factor, original, length = 3.0, 16, longest + 1
    stretch = max(1.0, factor * length / original - (factor - 1))
    frequencies = base_frequencies(THETA * stretch ** (WIDTH / (WIDTH - 2)))
    config = rope(rope_type="dynamic", factor=factor, max_position_embeddings=original)
    check_rotation(config, frequencies, positions=np.arange(length))


def yarn_frequencies(
    factor: float, original: int, fast: float = 32.0, slow: float = 1.0, truncate: bool = True, width: int = WIDTH
) -> Floats:
    """arXiv 2309.00071 section 3.2, with the ramp over channels of the authors' code."""

    def channel(turns: float) -> float:
        """The channel pair that makes so many turns within the original length."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = channel(fast), channel(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    out = []
    for i, frequency in enumerate(base_frequencies(width=width)):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        out.append((1 - ramp) * frequency + ramp * frequency / factor)
    return np.array(out)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("fast", "slow"), [(32.0, 1.0), (4.0, 0.5), (6.5, 2.0)])
@pytest.mark.parametrize("factor", [4.0, 8.0])
def test_yarn(factor: float, fast: float, slow: float, truncate: bool) -> None:
    config = rope(
        **{"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 64},
        **{"beta_fast": fast, "beta_slow": slow, "truncate": truncate},
    )
    frequencies = yarn_frequencies(factor, 64, fast, slow, truncate)
    assert not np.allclose(frequencies, base_frequencies())
    assert not np.allclose(frequencies, base_frequencies() / factor)
    # "sqrt(1/t) = 0.1 ln(s) + 1" on queries and keys both.
    check_rotation(config, frequencies, factor=0.1 * math.log(factor) + 1)


def mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"attention_factor": 1.37}, 1.37),
        ({"mscale": 0.7, "mscale_all_dim": 1.2}, mscale(8, 0.7) / mscale(8, 1.2)),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({}, mscale(8, 1)),
    ],
    ids=["given", "both", "equal", "neither"],
)
def test_yarn_attention_factor(extra: dict[str, float], expected: float) -> None:
    config = rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=64, **extra)
    check_rotation(config, yarn_frequencies(8.0, 64), factor=expected)


@pytest.mark.parametrize("all_dim", [None, 0.7, 1.0])
def test_mla_scales_its_softmax_by_mscale_squared(all_dim: float | None) -> None:
    """DeepSeek-V2's code: softmax scale times (0.1 mscale_all_dim ln(s) + 1)^2."""
    parameters = {"rope_type": "yarn", "rope_theta": THETA, "factor": 40.0, "original_max_position_embeddings": 64}
    if all_dim is not None:
        parameters |= {"mscale": all_dim, "mscale_all_dim": all_dim}
    model: Any = LlmArchModel(tiny_config(**MLA, rope_parameters=parameters))
    expected = (14 + 8) ** -0.5 * (1 if all_dim is None else mscale(40, all_dim) ** 2)
    assert model.layers[1].self_attn.scaling == pytest.approx(expected, rel=1e-12)


def test_mscale_squared_of_deepseek_v3() -> None:
    """1.8739 at factor 40 with mscale_all_dim 1, the published model's."""
    assert mscale(40, 1.0) ** 2 == pytest.approx(1.8739, abs=1e-4)


def llama3_frequencies(factor: float, low: float, high: float, original: int) -> Floats:
    """Llama 3.1's reference code: by wavelength, keep the short ones, divide the long ones, blend between."""
    out = []
    for frequency in base_frequencies():
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            out.append(frequency)
        elif wavelength > original / low:
            out.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(out)


@pytest.mark.parametrize(("factor", "low", "high", "original"), [(8.0, 1.0, 4.0, 64), (4.0, 2.0, 8.0, 100)])
def test_llama3(factor: float, low: float, high: float, original: int) -> None:
    frequencies = llama3_frequencies(factor, low, high, original)
    ratio = frequencies / base_frequencies()
    # All three regions are met.
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(1 / factor)
    assert ((1 / factor + 0.01 < ratio) & (ratio < 0.99)).any()
    config = rope(
        **{"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high},
        original_max_position_embeddings=original,
    )
    check_rotation(config, frequencies)


SHORT = [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]
LONG = [1.1, 1.9, 2.8, 4.0, 6.0, 9.0, 12.0, 15.0]


@pytest.mark.parametrize("given", [{}, {"factor": 6.0}, {"attention_factor": 1.21}], ids=["ratio", "factor", "given"])
@pytest.mark.parametrize(("length", "factors"), [(31, SHORT), (32, SHORT), (33, LONG), (100, LONG)])
def test_longrope(length: int, factors: list[float], given: dict[str, float]) -> None:
    """arXiv 2402.13753: a factor a frequency, one list up to the original length, one beyond; Phi-3's attention."""
    original, longest = 32, 128
    config = rope(
        **{"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **given},
        original_max_position_embeddings=original,
        max_position_embeddings=longest,
    )
    scale = given.get("factor", longest / original)
    attention_factor = given.get("attention_factor", math.sqrt(1 + math.log(scale) / math.log(original)))
    frequencies = base_frequencies() / np.array(factors)
    check_rotation(config, frequencies, attention_factor, positions=np.arange(length))


# -- added to the embedding: arXiv 1706.03762 section 3.5 -------------------------------------------------------------


def sinusoid(position: int, channel: int, width: int, endpoint: bool) -> float:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i + 1) = cos(pos / 10000^(2i/d)); tensor2tensor's code has
    10000^(i / (d/2 - 1)) instead, so that the last wave has the full 10000."""
    i = channel // 2
    angle = position / 10000 ** (i / (width // 2 - 1) if endpoint else 2 * i / width)
    return math.sin(angle) if channel % 2 == 0 else math.cos(angle)


@pytest.mark.parametrize("endpoint", [False, True])
@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sinusoidal(layout: str, offset: int, endpoint: bool) -> None:
    width = 48
    model = LlmArchModel(
        tiny_config(
            position_encoding="sinusoidal",
            sinusoidal_layout=layout,
            position_offset=offset,
            sinusoidal_endpoint=endpoint,
        )
    )
    x = torch.zeros(1, len(POSITIONS), width)
    table = model.embed_positions.embed(x, torch.from_numpy(POSITIONS)[None])[0]
    expected = np.array([[sinusoid(int(p) + offset, c, width, endpoint) for c in range(width)] for p in POSITIONS])
    if layout == "halves":
        # Marian: all sines, then all cosines.
        expected = np.concatenate((expected[:, 0::2], expected[:, 1::2]), axis=1)
    assert_near(table, expected)


@pytest.mark.parametrize("offset", [0, 2])
def test_learned(offset: int) -> None:
    model = redraw(LlmArchModel(tiny_config(position_encoding="learned", position_offset=offset)))
    positions = torch.tensor([[0, 5, 63], [2, 0, 1]])
    table = model.embed_positions.embed(torch.zeros(2, 3, 48), positions)
    assert torch.equal(table, model.embed_positions.weight[positions + offset])


# -- added to the scores ----------------------------------------------------------------------------------------------


def score_bias(config: LlmArchConfig, length: int) -> torch.Tensor:
    """`(H, T, S)` as a model gives it to its layers."""
    model = redraw(LlmArchModel(config))
    x = torch.zeros(1, length, config.hidden_size)
    state = model.embed_positions.prepare(x, torch.arange(length)[None], None)
    return state["full_attention"]["position_bias"][0].detach()


def alibi_slopes(heads: int, bias_max: float) -> list[float]:
    """The authors' recursive rule, arXiv 2108.12409 footnote 8: a geometric sequence for a power of two; else that of
    the largest power of two below, and then every second one of twice as many heads."""
    power = math.log2(heads)
    if power.is_integer():
        ratio = 2 ** (-bias_max / heads)
        return [ratio ** (k + 1) for k in range(heads)]
    closest = 2 ** math.floor(power)
    return alibi_slopes(closest, bias_max) + alibi_slopes(2 * closest, bias_max)[0::2][: heads - closest]


def alibi(heads: int, bias_max: int, **switches: Any) -> LlmArchConfig:
    return tiny_config(
        **{"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 4},
        **{"position_encoding": "alibi", "alibi_bias_max": bias_max, **switches},
    )


@pytest.mark.parametrize("bias_max", [8, 16])
@pytest.mark.parametrize("heads", [1, 6, 8, 12, 112])
def test_alibi(heads: int, bias_max: int) -> None:
    length = 29
    slopes = alibi_slopes(heads, bias_max)
    expected = np.array([[[-m * abs(i - j) for j in range(length)] for i in range(length)] for m in slopes])
    bias = score_bias(alibi(heads, bias_max), length)
    assert_near(bias, expected)
    # The smallest slopes drown in a spread taken over all heads.
    assert bias[:, 1, 0].tolist() == pytest.approx([-m for m in slopes], rel=1e-6)


def test_alibi_scaled_is_multiplied_by_the_attention_scale() -> None:
    slopes = alibi_slopes(6, 8)
    for switches, scale in (({}, 4**-0.5), ({"attention_scale": 0.3}, 0.3)):
        bias = score_bias(alibi(6, 8, alibi_scaled=True, **switches), 7)
        assert bias[:, 1, 0].tolist() == pytest.approx([-m * scale for m in slopes], rel=1e-6)


def test_alibi_in_bf16_rounds_slope_and_product() -> None:
    """Falcon: bf16(bf16(slope) * place of the key), the same for all queries."""

    def bf16(number: float) -> float:
        """Eight significant bits, ties to even."""
        mantissa, exponent = math.frexp(number)
        return math.ldexp(round(mantissa * 256), exponent - 8)

    assert bf16(0.1) == torch.tensor(0.1).bfloat16().item()
    bias = score_bias(alibi(12, 8, alibi_in_bf16=True), 29)
    expected = [[bf16(bf16(m) * j) for j in range(29)] for m in alibi_slopes(12, 8)]
    assert bias.expand(12, 29, 29)[:, 3].tolist() == expected
    assert bias.expand(12, 29, 29)[:, 20].tolist() == expected


def t5_bucket(distance: int, buckets: int, max_distance: int) -> int:
    """The causal bucket of a key so far behind the query, as Mesh TensorFlow's `_relative_position_bucket` has it:
    half of them for single distances, the others for logarithmically growing ranges up to max_distance.

    Compared as integers, (n / exact)^rest >= (max / exact)^k, so that no logarithm rounds at a boundary.
    """
    distance, exact = max(distance, 0), buckets // 2
    rest = buckets - exact
    if distance < exact:
        return distance
    reached = (
        max(k for k in range(rest + 1) if distance**rest * exact**k >= max_distance**k * exact**rest)
        if (distance <= max_distance)
        else rest
    )
    return min(exact + reached, buckets - 1)


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (12, 50), (7, 30)])
def test_t5_bias(buckets: int, max_distance: int) -> None:
    length = max_distance + 12
    config = tiny_config(
        **{"position_encoding": "relative_bias", "relative_attention_num_buckets": buckets},
        relative_attention_max_distance=max_distance,
    )
    weight = redraw(LlmArchModel(config)).embed_positions.relative_attention_bias.weight
    rows = [[t5_bucket(i - j, buckets, max_distance) for j in range(length)] for i in range(length)]
    assert {bucket for row in rows for bucket in row} == set(range(buckets))
    expected = weight.detach()[torch.tensor(rows)].permute(2, 0, 1)
    assert torch.equal(score_bias(config, length), expected)
