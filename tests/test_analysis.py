"""The receptive field, against the model itself: which input tokens move the last token's hidden state."""

import pytest
import torch

from hf_llmarch import LlmArchModel
from hf_llmarch.study.analysis import receptive_field
from tests.tiny import redraw, tiny_config

LENGTH = 14


def moved_by(model: LlmArchModel, layers: int) -> int:
    """How many input embeddings have a gradient on the last token's state after so many layers."""
    embeds = torch.randn(1, LENGTH, model.config.hidden_size, requires_grad=True)
    hidden = model(inputs_embeds=embeds, output_hidden_states=list(range(layers + 1))).hidden_states
    state = hidden[layers]
    (gradient,) = torch.autograd.grad(state[0, -1].sum(), embeds)
    return int((gradient.abs().sum(-1) > 0).sum())


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"sliding_window": 3},
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {"attention_chunk_size": 4},
        {"attention_chunk_size": 5, "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
        {"topology": "encoder", "sliding_window": 2},
    ],
)
def test_reach_is_what_gradients_show(switches: dict[str, object]) -> None:
    config = tiny_config(final_norm=False, **switches)
    model = redraw(LlmArchModel(config)).double().eval()
    torch.set_default_dtype(torch.float64)
    try:
        for layer in receptive_field(config, LENGTH)[:-1]:  # the last state is replaced by the final one
            assert moved_by(model, layer.layer + 1) == layer.reach, layer
    finally:
        torch.set_default_dtype(torch.float32)


def test_positions_by_layer() -> None:
    config = tiny_config(
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        nope_layers=[2],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    )
    assert [layer.positions for layer in receptive_field(config)] == [
        "rope (default, theta 10000)",
        "rope (linear, theta 1e+06)",
        "none",
    ]
