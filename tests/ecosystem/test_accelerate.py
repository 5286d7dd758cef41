"""accelerate: two processes, each with its own half of every batch, train as one process with the whole."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DeepSpeedPlugin

from tests.tiny import HEADS, MIXED, MLA, MOE, redraw, text, tiny_config

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

WORKER = """
import json, sys, traceback
from pathlib import Path
import torch
from accelerate import Accelerator, PartialState, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
import hf_llmarch

def shard(accelerator):
    # accelerate turns to FSDP on GPUs alone, and keeps to DDP on CPU: it is told otherwise. The plugin reads what
    # `accelerate launch` made of the config file.
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    accelerator.state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP

def run(accelerator, folder, name):
    model = getattr(hf_llmarch, name).from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    ids = torch.load(folder / "ids.pt")
    half = ids.shape[1] // 2
    mine = slice(half * accelerator.process_index, half * (accelerator.process_index + 1))
    losses = []
    for batch in ids:
        loss = model(input_ids=batch[mine], labels=batch[mine]).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    state = accelerator.get_state_dict(model)
    kinds = {type(part).__name__ for part in model.modules()}
    held = sum(p._local_tensor.numel() if hasattr(p, "_local_tensor") else p.numel() for p in model.parameters())
    return {"losses": losses, "state": state, "held": held, "kinds": kinds}

accelerator = Accelerator(cpu=True)
root = Path(sys.argv[1])
for folder, name in json.loads((root / "cases.json").read_text()).items():
    try:
        if sys.argv[2] == "fsdp2":
            shard(accelerator)
        found = run(accelerator, root / folder, name)
    except Exception:
        found = {"error": traceback.format_exc()}
    if accelerator.is_main_process or "error" in found:
        torch.save(found, root / folder / f"{sys.argv[2]}.pt")
    accelerator.wait_for_everyone()
accelerator.end_training()
"""

BALANCED: dict[str, Any] = {
    **MOE,
    **{"router_selection_bias": True, "router_bias_update_rate": 0.01, "router_aux_loss_coef": 0.1},
}
READS: dict[str, Any] = {"topology": "encoder-decoder", "decoder_start_token_id": 1, "pad_token_id": 0}
CASES: dict[str, dict[str, Any]] = {
    "gqa": {"qk_norm": "head", "attention_bias": True},
    "tied": {**MIXED, "tie_word_embeddings": True, "embedding_scale": 3.0},
    "mla": MLA,
    "packed experts": BALANCED,
    "linear experts": {**BALANCED, "num_experts": 24, "experts_layout": "linear"},  # some get no token
    "parallel block": {"parallel_block": True},
    "encoder": {"topology": "encoder"},
    "encoder-decoder": {**READS, "share_source_embeddings": False, "tie_word_embeddings": True},
}
# Embeddings of two stacks that are one. By DistributedDataParallel, and by FSDP2 of `from_pretrained`: test_parallel.
SHARED = {"shared embeddings": {**READS, "tie_word_embeddings": True}}
LAUNCHES: dict[str, list[str]] = {
    "ddp": ["--num_processes", "2", "--multi_gpu"],
    "fsdp2": ["--config_file", str(EXAMPLES / "fsdp2.yaml")],
}


def model_of(case: str) -> Any:
    config = tiny_config(**{**CASES, **SHARED}[case])
    return redraw(HEADS[config.topology](config))


def batches() -> torch.Tensor:
    """`(steps, rows, length)`"""
    return text(20, 7).view(5, 4, 7)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, Any]]:
    """`accelerate launch`, once for each way; gives what came of a case."""
    root = tmp_path_factory.mktemp("accelerate")
    kinds = {}
    for case in (*CASES, *SHARED):
        model = model_of(case)
        model.save_pretrained(root / case)
        torch.save(batches(), root / case / "ids.pt")
        kinds[case] = type(model).__name__
    (root / "cases.json").write_text(json.dumps(kinds))
    (root / "worker.py").write_text(WORKER)
    done: set[str] = set()

    def launch(way: str, case: str) -> dict[str, Any]:
        if way not in done:
            command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCHES[way]]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            port = ["--main_process_port", "0"]
            script = [str(root / "worker.py"), str(root), way]
            result = subprocess.run(
                [*command, *port, *script], env=environment, capture_output=True, text=True, timeout=600
            )
            assert result.returncode == 0, result.stderr[-3000:]
            done.add(way)
        return torch.load(root / case / f"{way}.pt")

    return launch


@pytest.mark.slow
@pytest.mark.shows("Training", "accelerate launch, DistributedDataParallel on 2 processes: as 1 process", "accelerate")
@pytest.mark.parametrize("case", [*CASES, *SHARED])
def test_ddp(case: str, launched: Callable[[str, str], dict[str, Any]]) -> None:
    found = check(case, launched("ddp", case))
    assert "DistributedDataParallel" in found["kinds"]


@pytest.mark.slow
@pytest.mark.shows("Training", "accelerate launch, FSDP2 on 2 processes: as 1 process", "accelerate")
@pytest.mark.parametrize("case", CASES)
def test_fsdp2(case: str, launched: Callable[[str, str], dict[str, Any]]) -> None:
    found = check(case, launched("fsdp2", case))
    assert found["held"] < 0.56 * sum(p.numel() for p in model_of(case).parameters())  # of 5 experts, 3
    assert any(kind.startswith("FSDP") for kind in found["kinds"])


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARED)
def test_fsdp2_of_accelerate_refuses(case: str, launched: Callable[[str, str], dict[str, Any]]) -> None:
    """accelerate puts two modules of one weight together, not three: torch then says which weight is in two groups."""
    error = launched("fsdp2", case)["error"].splitlines()[-1]
    assert "ValueError: Parameter 'model.embed_tokens.weight' is shared" in error


def check(case: str, found: dict[str, Any]) -> dict[str, Any]:
    """The losses of every step and the weights after the last are those of one process."""
    assert "error" not in found, found["error"]
    model = model_of(case).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-3)
    losses = []
    for batch in batches():
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    state = {name.removeprefix("module."): tensor for name, tensor in found["state"].items()}
    assert state.keys() >= dict(model.named_parameters()).keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=2e-5, rtol=1e-4, msg=name)
    return found


@pytest.mark.shows("Training", "DeepSpeed ZeRO-3: its config is read; running it needs a GPU", "accelerate")
def test_deepspeed_config_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is looked at is the file; deepspeed itself, which asks for a CUDA toolkit, is not here.
    monkeypatch.setattr("accelerate.utils.imports._is_package_available", lambda *args, **kwargs: True)
    plugin = DeepSpeedPlugin(hf_ds_config=str(EXAMPLES / "deepspeed_zero3.json"))
    assert plugin.zero_stage == 3
    assert plugin.hf_ds_config.is_zero3()
    assert plugin.hf_ds_config.get_value("zero_optimization.reduce_bucket_size") == "auto"
    assert plugin.zero3_save_16bit_model
