"""Presets against what their papers publish."""

import pytest
import torch

from hf_llmarch import LlmArchForConditionalGeneration
from hf_llmarch.study import presets


# arXiv 1706.03762, table 3: 65 and 213 million parameters (their vocabulary's exact size is not given).
@pytest.mark.parametrize(("name", "millions"), [("transformer-base", 65), ("transformer-big", 213)])
def test_parameters_are_those_of_the_paper(name: str, millions: int) -> None:
    with torch.device("meta"):
        model = LlmArchForConditionalGeneration(presets.get(name))
    assert model.num_parameters() / 1e6 == pytest.approx(millions, rel=0.04)


def test_every_preset_is_fresh_and_can_be_changed() -> None:
    for name in presets.names():
        changed = presets.get(name, num_hidden_layers=2)
        assert changed.num_hidden_layers == len(changed.layer_types) == 2
        assert presets.get(name).num_hidden_layers != 2


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="Did you mean 'transformer-base'"):
        presets.get("transformer-bas")
