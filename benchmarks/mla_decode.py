"""Decoding with a latent cache: tokens a second against transformers' DeepSeek-V3 class at growing context.

The native class caches the same latents but expands all of them at every step; ours absorbs the expansion into the
query and the output. Both decode the same weights in one process, turn about; ratios are of medians.

    python benchmarks/mla_decode.py [--contexts 1024 4096 8192] [--dtypes float32 bfloat16] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from hf_llmarch import LlmArchConfig, LlmArchForCausalLM
from hf_llmarch.model.compat import CACHE

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 128,
    "q_lora_rank": None,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "max_position_embeddings": 16384,
}


def models(dtype: torch.dtype) -> tuple[DeepseekV3ForCausalLM, LlmArchForCausalLM]:
    """The native model, and ours with its weights."""
    torch.manual_seed(0)
    native = DeepseekV3ForCausalLM(
        DeepseekV3Config(**SIZES, first_k_dense_replace=SIZES["num_hidden_layers"], rope_interleave=True)
    )
    ours = LlmArchForCausalLM(
        LlmArchConfig(**SIZES, rope_interleaved=True, rope_parameters=dict(native.config.rope_parameters))
    )
    names = {"input_layernorm": "attn_norm.pre", "post_attention_layernorm": "mlp_norm.pre"}
    state = native.state_dict()
    for theirs, mine in names.items():
        state = {name.replace(theirs, mine): tensor for name, tensor in state.items()}
    ours.load_state_dict(state)
    return native.eval().to(dtype), ours.eval().to(dtype)


@torch.no_grad()
def filled_cache(model: Any, length: int, dtype: torch.dtype) -> DynamicCache:
    """A cache of random latents, as both classes lay them out: a prefill of 8k tokens would measure something else."""
    cache = DynamicCache(config=model.config)
    generator = torch.Generator().manual_seed(length)
    for layer in range(SIZES["num_hidden_layers"]):
        latent = torch.randn(1, 1, length, SIZES["kv_lora_rank"], generator=generator).to(dtype)
        rope = torch.randn(1, 1, length, SIZES["qk_rope_head_dim"], generator=generator).to(dtype)
        if isinstance(model, LlmArchForCausalLM):  # the native class moves even channels before odd ones, then rotates
            rope = rope.unflatten(-1, (2, -1)).mT.flatten(-2)
        cache.update(latent, rope, layer)
    return cache


@torch.no_grad()
def milliseconds_a_token(model: Any, context: int, dtype: torch.dtype, tokens: int) -> tuple[float, torch.Tensor]:
    cache, token = filled_cache(model, context, dtype), torch.zeros(1, 1, dtype=torch.long)
    model(token, **{CACHE: cache})  # the first step lays memory out
    begin = time.perf_counter()
    for _ in range(tokens):
        logits = model(token, **{CACHE: cache}).logits
    return (time.perf_counter() - begin) * 1e3 / tokens, logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'dtype':>9} {'context':>8} {'native sdpa':>12} {'native eager':>13} {'ours':>8}  ms a token; ratios")
    for name in options.dtypes:
        dtype = getattr(torch, name)
        native, ours = models(dtype)
        for context in options.contexts:
            times: dict[str, list[float]] = {"native sdpa": [], "native eager": [], "ours": []}
            reference = torch.empty(0)
            for run in range(options.runs + 1):
                for label, model in (("native sdpa", native), ("native eager", native), ("ours", ours)):
                    if model is native:
                        native.set_attn_implementation(label.split()[1])
                    elapsed, logits = milliseconds_a_token(model, context, dtype, options.tokens)
                    if run == 0:  # warm-up, and the proof that the same thing is timed
                        reference = logits if label == "native sdpa" else reference
                        spread = (reference.max() - reference.min()).item()
                        difference = (logits - reference).abs().max().item() / spread
                        assert difference < (1e-5 if dtype == torch.float32 else 5e-2), (label, difference)
                    else:
                        times[label].append(elapsed)
            row: dict[str, Any] = {key: round(statistics.median(values), 3) for key, values in times.items()}
            row |= {"dtype": name, "context": context}
            row["x sdpa"] = round(row["native sdpa"] / row["ours"], 2)
            row["x eager"] = round(row["native eager"] / row["ours"], 2)
            rows.append(row)
            print(
                f"{name:>9} {context:>8} {row['native sdpa']:>12} {row['native eager']:>13} {row['ours']:>8}"
                f"  {row['x sdpa']}x sdpa, {row['x eager']}x eager",
                flush=True,
            )
    if options.output:
        machine = {"torch": torch.__version__, "transformers": transformers.__version__, "cpu": platform.machine()}
        record = {"machine": {**machine, "threads": torch.get_num_threads()}, "sizes": SIZES, "rows": rows}
        options.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
