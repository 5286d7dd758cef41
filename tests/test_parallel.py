"""Tensor and expert parallelism on two processes give what one gives."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.parallel import tensor_parallel_plan
from tests.tiny import MLA, redraw, tiny_config

WORKER = """
import sys
import torch
import hf_llmarch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

folder, sizes = sys.argv[1], eval(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes)).eval()
ids = torch.load(f"{folder}/ids.pt")
out = model(ids, labels=ids, use_cache=False)
out.loss.backward()
grad = model.model.embed_tokens.weight.grad
grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
tokens = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
if torch.distributed.get_rank() == 0:
    logits = out.logits.full_tensor() if hasattr(out.logits, "full_tensor") else out.logits
    torch.save({"logits": logits.detach(), "grad": grad, "tokens": tokens}, f"{folder}/parallel.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""

EVEN: dict[str, Any] = {"hidden_size": 48, "head_dim": 12, "intermediate_size": 64, "vocab_size": 98}
EXPERTS: dict[str, Any] = {**EVEN, "num_experts": 4, "moe_intermediate_size": 32}
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "gqa": ({**EVEN, "qk_norm": "head", "attention_bias": True, "attention_output_bias": True}, {"tp_size": 2}),
    "latent": ({**EVEN, **MLA}, {"tp_size": 2}),
    "experts": ({**EXPERTS, "num_shared_experts": 1}, {"tp_size": 2}),
    "linear experts": ({**EXPERTS, "experts_layout": "linear"}, {"tp_size": 2}),
    "expert parallel": (EXPERTS, {"tp_size": 2, "ep_size": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(case: str, tmp_path: Path) -> None:
    switches, sizes = CASES[case]
    model = redraw(LlmArchForCausalLM(tiny_config(**switches))).eval()
    model.save_pretrained(tmp_path)
    ids = torch.randint(1, 90, (2, 11))
    torch.save(ids, tmp_path / "ids.pt")
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run(
        [*command, str(tmp_path / "worker.py"), str(tmp_path), repr(sizes)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    parallel = torch.load(tmp_path / "parallel.pt")
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    spread = (out.logits.max() - out.logits.min()).item()
    assert (parallel["logits"] - out.logits).abs().max() < 1e-5 * spread
    grad = model.model.embed_tokens.weight.grad
    assert (parallel["grad"] - grad).abs().max() < 1e-4 * (grad.max() - grad.min())
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(parallel["tokens"], expected)


@pytest.mark.parametrize("case", CASES)
def test_plan_names_modules_that_exist(case: str) -> None:
    config = tiny_config(**CASES[case][0])
    model = LlmArchForCausalLM(config).model
    names = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    generic = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names}
    assert set(tensor_parallel_plan(config)) <= generic
