"""A tokenizer that follows a vocabulary of which tokens have been taken out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_llmarch.conversion.destination import write_json
from hf_llmarch.conversion.sources.files import GENERATION_CONFIG, read_json

from .subject import SurgeryError, refuse

TOKENIZER = "tokenizer.json"
# Files in which a tokenizer stands in another form, with ids that would not follow.
OTHER_FORMS = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "added_tokens.json")
TOKEN_FIELDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id")


def renamed(value: Any, now: dict[int, int], name: str) -> Any:
    """Token ids as they are now."""
    if isinstance(value, list):
        return [renamed(one, now, name) for one in value]
    if value is None or value < 0:
        return value
    refuse(value not in now, f"{name}={value} is a token that would go: keep it.")
    return now[value]


def tokens_of(folder: Path, corpus: Path) -> list[int]:
    """The ids of all tokens that a corpus needs; see `trim_vocabulary`.

    Raises:
        SurgeryError: there is no `tokenizer.json`, or one of an unknown kind.
    """
    from tokenizers import Tokenizer

    content = read_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    used: set[int] = set()
    with corpus.open(encoding="utf-8") as lines:
        for line in lines:
            used.update(tokenizer.encode(line).ids)
    vocabulary = vocabulary_of(content)
    used.update(added["id"] for added in content.get("added_tokens", ()))
    used.update(
        id
        for token, id in vocabulary.items()
        if len(token) == 1 or (token.startswith(("<0x", "##")) and len(token) <= 6)
    )
    unknown = content["model"].get("unk_token", content["model"].get("unk_id"))
    used.update([vocabulary[unknown]] if unknown in vocabulary else [unknown] if isinstance(unknown, int) else [])
    # Backwards, because what a token is merged from was merged before.
    for left, right in reversed(merges_of(content)):
        if vocabulary.get(left + right) in used:
            used.update((vocabulary[left], vocabulary[right]))
    return sorted(used)


def read_tokenizer(folder: Path) -> dict[str, Any]:
    refuse(
        not (folder / TOKENIZER).is_file(),
        f"{folder} has no {TOKENIZER}, the only form of a tokenizer that is trimmed.",
    )
    content = read_json(folder / TOKENIZER)
    kind = content["model"].get("type")
    refuse(
        kind not in ("BPE", "WordPiece", "WordLevel", "Unigram"),
        f"{TOKENIZER}: a model of type {kind!r} is not trimmed.",
    )
    return content


def vocabulary_of(content: dict[str, Any]) -> dict[str, int]:
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {token: id for id, (token, _) in enumerate(vocabulary)}


def merges_of(content: dict[str, Any]) -> list[tuple[str, str]]:
    """BPE's merges, which older files write as one string each."""
    merges = content["model"].get("merges") or ()
    return [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in merges]  # type: ignore[misc]


def trim_tokenizer(folder: Path, tokens: Iterable[tuple[int, int]]) -> None:
    """Bring a folder's tokenizer, and its generation config, to the vocabulary that is left.

    Args:
        tokens: the old and the new id of each token that is left.

    Raises:
        SurgeryError: the tokenizer stands in another form as well, or in that alone.
    """
    now = dict(tokens)
    if (folder / GENERATION_CONFIG).is_file():
        generation = read_json(folder / GENERATION_CONFIG)
        changed = {name: renamed(generation[name], now, name) for name in TOKEN_FIELDS if name in generation}
        write_json(folder / GENERATION_CONFIG, {**generation, **changed})
    others = [name for name in OTHER_FORMS if (folder / name).is_file()]
    if not (folder / TOKENIZER).is_file() and not others:
        return
    if not (folder / TOKENIZER).is_file():
        raise SurgeryError(f"The tokenizer is in {others[0]}, which cannot be trimmed: make a {TOKENIZER} of it first.")
    # What a fast tokenizer does not need would contradict it.
    for name in others:
        (folder / name).unlink()
    content = read_tokenizer(folder)
    model, vocabulary = content["model"], vocabulary_of(content)
    if isinstance(model["vocab"], dict):
        model["vocab"] = {token: now[id] for token, id in vocabulary.items() if id in now}
    else:
        model["vocab"] = [entry for id, entry in enumerate(model["vocab"]) if id in now]
        if model.get("unk_id") is not None:
            model["unk_id"] = renamed(model["unk_id"], now, "unk_id")
    left = {token for token, id in vocabulary.items() if id in now}
    if model.get("merges"):
        pairs = zip(model["merges"], merges_of(content), strict=True)
        model["merges"] = [m for m, (a, b) in pairs if {a, b, a + b} <= left]
    content["added_tokens"] = [{**t, "id": now[t["id"]]} for t in content.get("added_tokens", ()) if t["id"] in now]
    if content.get("post_processor"):
        content["post_processor"] = renamed_in(content["post_processor"], now)
    (folder / TOKENIZER).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if config.is_file():
        said = read_json(config)
        decoder = said.get("added_tokens_decoder")
        if decoder:
            said["added_tokens_decoder"] = {str(now[int(id)]): t for id, t in decoder.items() if int(id) in now}
            write_json(config, said)


def renamed_in(part: Any, now: dict[int, int]) -> Any:
    """A post-processor with its tokens' new ids: `ids` lists of a template, and `[token, id]` pairs."""
    if isinstance(part, dict):
        return {
            key: [now[id] for id in value] if key == "ids" else renamed_in(value, now) for key, value in part.items()
        }
    if isinstance(part, list):
        if len(part) == 2 and isinstance(part[0], str) and isinstance(part[1], int):
            return [part[0], now[part[1]]]
        return [renamed_in(one, now) for one in part]
    return part
