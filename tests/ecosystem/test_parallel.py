"""Tensor, expert, pipeline and sharded data parallelism on two processes give what one process gives."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from hf_llmarch.model.parallel import pipeline_plan, refuse_sizes
from tests.tiny import HEADS, MIXED, MLA, MOE, STACKS, TOLERANCES, assert_close, redraw, text, tiny_config, variants

ROOT = Path(__file__).resolve().parents[2]

# Each case's model is spread over two processes; what they compute together is written to parallel.pt.
WORKER = """
import json, sys, traceback
from pathlib import Path
import torch
import hf_llmarch
from hf_llmarch.model.latent_attention import LatentAttention
from transformers.distributed import DistributedConfig

def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()

def run(folder, case):
    cached = case["sizes"].pop("cached", False)
    sizes = DistributedConfig(**case["sizes"])
    model = getattr(hf_llmarch, case["model"]).from_pretrained(folder, distributed_config=sizes).eval()
    ids = torch.load(folder / "ids.pt")
    options = {"use_cache": False} if case["causal"] else {}
    if case["sizes"].get("pp_size"):
        with torch.no_grad():
            logits = model(ids, **options).logits
            tokens = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, use_cache=cached)
        return {"logits": logits, "tokens": {"dynamic": tokens}}
    out = model(ids, labels=ids, **options)
    out.loss.backward()
    found = {"logits": whole(out.logits), "tokens": {}, "loss": whole(out.loss)}
    found["gradients"] = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    for cache in case["caches"]:
        found["tokens"][cache] = model.generate(
            ids, max_new_tokens=5, do_sample=False, pad_token_id=0, cache_implementation=cache, disable_compile=True
        )
    model.save_pretrained(folder / "again")
    found["absorbed"], sizes = len(absorbed), [(p.numel(), p) for p in model.parameters()]
    found["held"] = sum(getattr(p, "_local_tensor", p).numel() for _, p in sizes) / sum(n for n, _ in sizes)
    return found

absorbed = []
fold = LatentAttention.absorbed
LatentAttention.absorbed = lambda *args: absorbed.append(True) or fold(*args)

root = Path(sys.argv[1])
for case in json.loads((root / "cases.json").read_text()):
    folder = root / case["name"]
    absorbed.clear()
    try:
        found = run(folder, case)
    except Exception:
        found = {"error": traceback.format_exc()}
    if torch.distributed.get_rank() == 0 or "error" in found:
        torch.save(found, folder / "parallel.pt")
    torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""

TP, EP, PP, FSDP = {"tp_plan": "auto"}, {"tp_size": 2, "ep_size": 2}, {"pp_size": 2}, {"fsdp_size": 2}
EXPERTS: dict[str, Any] = {**MOE, "num_experts": 4}
READS: dict[str, Any] = {"topology": "encoder-decoder", "decoder_start_token_id": 1, "pad_token_id": 0}
PARALLEL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mha": ({"attention_type": "mha", "num_key_value_heads": 6}, TP),
    "gqa": ({}, TP),
    "biases and norms by head": (
        {"attention_bias": True, "attention_output_bias": True, "qk_norm": "head", "ffn_bias": True, "clip_qkv": 0.9},
        TP,
    ),
    "queries' bias alone": ({"attention_bias": True, "lm_head_bias": True}, TP),
    "fewer heads than processes": ({"attention_type": "mqa", "num_key_value_heads": 1}, TP),
    "heads that do not split": ({"num_key_value_heads": 3, "attention_bias": True, "qk_norm": "head"}, TP),
    "norm over the projection": ({"qk_norm": "projection"}, TP),
    "sinks": ({"attention_sinks": True}, TP),
    "latent": (MLA, TP),
    "latent without query rank": ({**MLA, "q_lora_rank": None, "mla_cache": "expanded"}, TP),
    "windows": (MIXED, TP),
    "alibi": ({"position_encoding": "alibi"}, TP),
    "relative bias": ({"position_encoding": "relative_bias"}, TP),
    "learned positions": ({"position_encoding": "learned", "embedding_scale": 3.0, "embedding_norm": True}, TP),
    "parallel block": ({"parallel_block": True, "parallel_norms": 2}, TP),
    "shared norm": ({"parallel_block": True, "norm_type": "layernorm", "ffn_type": "mlp"}, TP),
    "sandwich": ({"norm_placement": "sandwich", "norm_offset": 1.0, "final_logit_softcapping": 1.5}, TP),
    "tied": ({"tie_word_embeddings": True, "logit_scale": 0.5}, TP),
    "learned swish": ({"swish_beta": "learned"}, TP),
    "packed experts": ({**EXPERTS, "num_shared_experts": 1, "shared_expert_gate": True}, TP),
    "linear experts": ({**EXPERTS, "experts_layout": "linear", "ffn_bias": True}, TP),
    "experts with biases": ({**EXPERTS, "ffn_bias": True}, TP),
    "experts with learned swish": ({**EXPERTS, "swish_beta": "learned", "ffn_type": "mlp"}, TP),
    "dense and sparse": ({**EXPERTS, "mlp_layer_types": ["dense", "sparse", "sparse"]}, TP),
    "expert choice": ({**EXPERTS, "router_type": "expert_choice", "use_cache": False}, TP),
    "capacity": ({**EXPERTS, "capacity_factor": 0.8}, TP),
    "encoder": ({"topology": "encoder", "norm_placement": "post", "lm_head_transform": True}, TP),
    "encoder-decoder": ({**READS, "source_stack": {"num_attention_heads": 4, "num_key_value_heads": 4}}, TP),
    "encoder-decoder with one key head": ({**READS, "num_key_value_heads": 1, "attention_type": "mqa"}, TP),
    "t5": ({**READS, "position_encoding": "relative_bias", "tie_word_embeddings": True}, TP),
    "experts apart": (EXPERTS, EP),
    "experts apart, with room": ({**EXPERTS, "capacity_factor": 0.8}, EP),
    "experts apart, overflowing": ({**EXPERTS, "capacity_factor": 0.8, "overflow": "next_best"}, EP),
    "experts apart, with biases": ({**EXPERTS, "ffn_bias": True, "swish_beta": "learned"}, EP),
    "experts apart, latent": ({**EXPERTS, **MLA, "num_shared_experts": 1}, EP),
    "stages": ({}, PP),
    "stages, tied and scaled": ({"tie_word_embeddings": True, "embedding_scale": 3.0}, PP),
    "stages, alibi": ({"position_encoding": "alibi"}, PP),
    "stages, relative bias": ({"position_encoding": "relative_bias"}, PP),
    "stages, windows": (MIXED, PP),
    "stages, latent": (MLA, PP),
    "stages, experts": (EXPERTS, PP),
    "shards": ({}, FSDP),
    "shards, latent": ({**MLA, "tie_word_embeddings": True}, FSDP),
    "shards, experts": (EXPERTS, FSDP),
    "shards, encoder-decoder": (READS, FSDP),
}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "odd heads": (
        {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 30},
        TP,
        "num_attention_heads=3 cannot be split over tp_size=2",
    ),
    "stages, learned positions": (
        {"position_encoding": "learned", "embedding_norm": True},
        PP,
        "pp_size=2: no pipeline with position_encoding='learned', embedding_norm=True",
    ),
    "stages, encoder-decoder": (READS, PP, "pp_size=2: no pipeline with topology='encoder-decoder'"),
    "stages, cache": ({"num_attention_heads": 4}, {**PP, "cached": True}, "generate(use_cache=False)"),
}
Case = tuple[Any, dict[str, Any]]


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Runs every case on the same two processes; gives a case's model, in one piece, and what came out of two."""
    root = tmp_path_factory.mktemp("parallel")
    cases, models = [], {}
    for name, (switches, sizes, *_) in {**PARALLEL, **REFUSED}.items():
        config = tiny_config(**switches)
        kind = HEADS[config.topology]
        models[name] = model = redraw(kind(config)).eval()
        folder = root / name
        model.save_pretrained(folder)
        torch.save(text(2, 12), folder / "ids.pt")
        causal = config.topology == "decoder"
        generates = config.topology != "encoder" and config.router_type != "expert_choice" and sizes != FSDP
        static = causal and config.num_experts is None
        caches = (["dynamic"] + ["static"] * static) if generates else []
        cases.append({"name": name, "model": kind.__name__, "sizes": sizes, "causal": causal, "caches": caches})
    (root / "cases.json").write_text(json.dumps(cases))
    (root / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(root / "worker.py"), str(root)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]

    def found(name: str) -> Case:
        return models[name], {**torch.load(root / name / "parallel.pt"), "folder": root / name}

    return found


def check(model: Any, found: dict[str, Any]) -> None:
    assert "error" not in found, found["error"]
    ids = text(2, 12)
    causal = model.config.topology == "decoder"
    model.zero_grad()
    out = model(ids, labels=ids, **({"use_cache": False} if causal else {}))
    assert_close(found["logits"], out.logits.detach(), "cache")
    for cache, tokens in found["tokens"].items():
        expected = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert torch.equal(tokens, expected), cache
    if "gradients" not in found:
        return
    out.loss.backward()
    assert found["loss"].item() == pytest.approx(out.loss.item(), rel=1e-5)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        size = (gradient.max() - gradient.min()).item() or gradient.abs().item()  # of a single number
        deviation = (found["gradients"][name] - gradient).abs().max().item()
        assert deviation <= TOLERANCES["gradient"] * size, name
    again = type(model).from_pretrained(found["folder"] / "again")
    for name, parameter in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name


def of(sizes: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("case", [name for name, (_, given) in PARALLEL.items() if given is sizes])


@pytest.mark.slow
@pytest.mark.shows("Parallel", 'tensor parallel (tp_plan="auto") on 2 processes: logits, all gradients, tokens, saving')
@of(TP)
def test_tensor_parallel(case: str, spread: Callable[[str], Case]) -> None:
    model, found = spread(case)
    check(model, found)
    assert found["held"] < 0.85  # of the parameters, by each process
    if model.config.attention_kind == "mla" and model.config.mla_cache == "latent":
        assert found["absorbed"]


@pytest.mark.slow
@pytest.mark.shows("Parallel", "expert parallel on 2 processes: logits, all gradients, tokens, saving")
@of(EP)
def test_expert_parallel(case: str, spread: Callable[[str], Case]) -> None:
    check(*spread(case))


@pytest.mark.slow
@pytest.mark.shows("Parallel", "pipeline of 2 processes: logits and tokens")
@of(PP)
def test_pipeline(case: str, spread: Callable[[str], Case]) -> None:
    check(*spread(case))


@pytest.mark.slow
@pytest.mark.shows("Parallel", "FSDP2 by from_pretrained on 2 processes: logits, all gradients, saving")
@of(FSDP)
def test_sharded(case: str, spread: Callable[[str], Case]) -> None:
    check(*spread(case))


@pytest.mark.slow
@pytest.mark.shows("Parallel", "what cannot be spread is refused, by name")
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, spread: Callable[[str], Case]) -> None:
    _, found = spread(case)
    error = found["error"].splitlines()[-1]
    assert error.startswith("ValueError: ")
    assert REFUSED[case][2] in error


def build(switches: dict[str, Any]) -> Any:
    config = tiny_config(**switches)
    with torch.device("meta"):
        return HEADS[config.topology](config)


EVERY = [pytest.param(variant.switches, id=label) for label, _, variant in (*variants(), *variants(STACKS))]


@pytest.mark.shows("Parallel", "plans for every switch name what the model has")
@pytest.mark.parametrize("switches", EVERY)
def test_plans_name_what_the_model_has(switches: dict[str, Any]) -> None:
    model = build(switches)
    modules = {generic(name): module for name, module in model.named_modules()}
    parameters = {generic(name) for name, _ in model.named_parameters()}
    for plan in (model.tp_plan, model.ep_plan):
        assert plan.keys() <= modules.keys() | parameters
        assert set(plan.values()) <= set(ALL_PARALLEL_STYLES.keys())
        for name, style in plan.items():
            if style in ("colwise", "rowwise") and name in modules:
                assert isinstance(modules[name], nn.Linear)
    assert {generic(name) for name in model.pp_plan} <= modules.keys()
    # What is cut by columns is put together by rows, in the same module.
    places = {
        style: {name.rsplit(".", 1)[0] for name, given in model.tp_plan.items() if given == style and name in modules}
        for style in ("colwise", "rowwise")
    }
    assert places["colwise"] == places["rowwise"]


def generic(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


LAYERS_THAT_DIFFER: dict[str, tuple[dict[str, Any], set[str]]] = {
    "biases of packed experts": ({**EXPERTS, "per_layer_config": {"1": {"ffn_bias": True}}}, {"embed_tokens", "attn"}),
    "attention kinds": ({"per_layer_config": {"1": {"qk_norm": "projection"}}}, {"embed_tokens", "mlp"}),
    "norms by head": ({"per_layer_config": {"1": {"qk_norm": "head"}}}, {"embed_tokens", "attn", "norm", "mlp"}),
}


@pytest.mark.parametrize("case", LAYERS_THAT_DIFFER)
def test_a_plan_suits_all_layers(case: str) -> None:
    switches, expected = LAYERS_THAT_DIFFER[case]
    plan = build(switches).model.tp_plan
    kinds = {"q_norm": "norm", "k_norm": "norm", "self_attn": "attn", "mlp": "mlp", "embed_tokens": "embed_tokens"}
    assert {next(kinds[part] for part in reversed(name.split(".")) if part in kinds) for name in plan} == expected


ONE_PIECE_EXAMPLES: dict[str, dict[str, Any]] = {
    "topology": {"topology": "encoder"},
    "position_encoding": {"position_encoding": "sinusoidal"},
    "type_vocab_size": {"type_vocab_size": 2, "topology": "encoder"},
    "embedding_size": {"embedding_size": 30},
    "embedding_norm": {"embedding_norm": True},
    "embedding_dropout": {"embedding_dropout": 0.1},
    "final_dropout": {"final_dropout": 0.1},
}


@pytest.mark.parametrize("name", ONE_PIECE_EXAMPLES)
def test_what_stays_in_one_piece(name: str) -> None:
    config = tiny_config(**ONE_PIECE_EXAMPLES[name])
    assert not pipeline_plan(config)
    with pytest.raises(ValueError, match=f"pp_size=2: no pipeline with .*{name}="):
        refuse_sizes(config, DistributedConfig(pp_size=2))


def test_capacity_under_expert_parallelism_of_old_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_llmarch.model.parallel.EP_DISPATCHES", False)
    sizes = DistributedConfig(tp_size=2, ep_size=2)
    refuse_sizes(tiny_config(**EXPERTS), sizes)
    for bound in ({"capacity_factor": 1.5}, {"expert_capacity": 3}):
        with pytest.raises(ValueError, match=r"capacity_factor and expert_capacity need transformers 5\.19 or newer"):
            refuse_sizes(tiny_config(**EXPERTS, **bound), sizes)


SEQUENCES: dict[str, tuple[dict[str, Any], bool]] = {
    "rope": ({}, True),
    "learned": ({"position_encoding": "learned"}, True),
    "mla": (MLA, True),
    "experts": (MOE, True),
    "alibi": ({"position_encoding": "alibi"}, False),
    "relative bias": ({"position_encoding": "relative_bias"}, False),
    "softcap": ({"attn_logit_softcapping": 5.0}, False),
    "sinks": ({"attention_sinks": True}, False),
    "capacity": ({**MOE, "capacity_factor": 1.5}, False),
    "windows": (MIXED, False),
    "chunks": ({"attention_chunk_size": 4}, False),
    "both sides": ({"topology": "encoder"}, False),
    "encoder-decoder": (READS, False),
}


@pytest.mark.shows("Parallel", "context parallel is said to work where the host's form of it does")
@pytest.mark.parametrize("case", SEQUENCES)
def test_context_parallel(case: str) -> None:
    switches, supported = SEQUENCES[case]
    model = build(switches)
    assert model.supports_context_parallel is supported
    assert model.model.supports_context_parallel is supported
