"""The vocabulary: more rows, fewer rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .operation import operation
from .subject import Change, Move, Subject, each, fp32, refuse
from .tokenizer import TOKEN_FIELDS, renamed, tokens_of


def rows(subject: Subject) -> list[str]:
    """The tensors with a row a token."""
    names = subject.have("", f"{subject.root}embed_tokens.weight")
    return [*names, *(subject.have("", "lm_head.weight", "lm_head.bias") if subject.has_head else ())]


@operation
def grow_vocabulary(subject: Subject, vocab_size: int | None = None, multiple_of: int | None = None) -> Change:
    """More tokens, or padding to a multiple, which matrix products like: exact for the old tokens' logits.

    A new row is the mean of all old ones, in the embedding and in the head: so a new token's logit is the mean logit,
    and takes about 1 / vocab_size of the probability (Hewitt 2021, "Initializing new word embeddings").

    Args:
        vocab_size: the new number of rows. None: the old one, before it is padded.
        multiple_of: pad to a multiple of this number.

    Raises:
        SurgeryError: for a smaller vocabulary.
    """
    config = subject.config
    size = config.vocab_size if vocab_size is None else vocab_size
    size = -(-size // multiple_of) * multiple_of if multiple_of else size
    refuse(size < config.vocab_size, f"vocab_size={config.vocab_size} cannot grow to {size}: trim_vocabulary shrinks.")
    moves = [each(name, partial(grown, size=size)) for name in rows(subject)]
    result = subject.changed(moves, vocab_size=size)
    why = "The old tokens have their rows; the new ones' logits are the mean logit."
    return Change(result, True, why, "the new rows", tokens=[(i, i) for i in range(config.vocab_size)])


def grown(tensor: Tensor, size: int) -> Tensor:
    mean = fp32(lambda t: t.mean(0, keepdim=True))(tensor)
    return torch.cat((tensor, mean.expand(size - len(tensor), *tensor.shape[1:])))


@operation
def trim_vocabulary(subject: Subject, tokens: Sequence[int] | None = None, corpus: str | None = None) -> Change:
    """Only the tokens that are kept, under new ids in the old order: exact for their logits.

    In a folder, `tokenizer.json` and the special tokens' ids follow. With a `corpus`, all tokens that its text is made
    of are kept, with the special tokens, single characters and bytes, and for BPE the tokens that those are merged
    from: so the corpus becomes the same tokens as before, under their new ids.

    Args:
        tokens: the old ids that stay.
        corpus: a text file, for a folder with a `tokenizer.json`.

    Raises:
        SurgeryError: for ids that there are not, for a special token that would go, for a tokenizer in another form.
    """
    config = subject.config
    refuse((tokens is None) == (corpus is None), "Give tokens or a corpus: what is to stay of the vocabulary.")
    if corpus is not None:
        refuse(subject.folder is None, "corpus: a model in memory has no tokenizer; give tokens.")
        tokens = tokens_of(Path(subject.folder or ""), Path(corpus))
    kept = sorted(set(tokens or ()))
    refuse(
        not kept or kept[0] < 0 or kept[-1] >= config.vocab_size, f"tokens are ids from 0 to {config.vocab_size - 1}."
    )
    now = {old: new for new, old in enumerate(kept)}
    switches: dict[str, Any] = {"vocab_size": len(kept)}
    for name in TOKEN_FIELDS[:4]:
        switches[name] = renamed(getattr(config, name), now, name)
    moves: list[Move] = [each(name, partial(chosen_rows, kept=kept)) for name in rows(subject)]
    result = subject.changed(moves, **switches)
    return Change(result, True, "The tokens that are kept have their rows.", tokens=list(now.items()))


def chosen_rows(tensor: Tensor, kept: Sequence[int]) -> Tensor:
    return tensor[torch.tensor(kept, device=tensor.device)]
