"""Python files of a source that its `auto_map`s name: kept beside our model, and given back. Nothing here runs them.

A tokenizer's travel with the model too, for transformers opens the same tokenizer there. Where one has the name of a
file of ours it gets another, and what imports it follows.
"""

from __future__ import annotations

import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_llmarch.model.compat import code_files

from .destination import write_json
from .preserved import FOLDER
from .sources.code import IMPORT, TOKENIZER_CONFIG, auto_map, closure, modules, named_in, text_of
from .sources.files import read_json
from .sources.folder import check_inside

PREFIX = "source_"


def carry(source: Path, folder: Path) -> None:
    """Put a foreign source's code into the folder of our model that is being made, before our own files come.

    Raises:
        CheckpointError: a file that is named leads out of the source, or is no UTF-8.
    """
    if not source.is_dir():
        return
    listed = auto_map(source / TOKENIZER_CONFIG)
    tokenizers = closure(source, modules(listed))
    renamed = new_names(tokenizers)
    for file in closure(source, named_in(source)):
        copy(file, folder / FOLDER / file.name)
    for file in tokenizers:
        copy(file, target := folder / f"{renamed.get(file.stem, file.stem)}.py")
        if renamed:
            target.write_bytes(with_imports(text_of(file), renamed).encode())
    if renamed:
        copy(source / TOKENIZER_CONFIG, folder / FOLDER / TOKENIZER_CONFIG)
        write_json(
            folder / TOKENIZER_CONFIG, {**read_json(source / TOKENIZER_CONFIG), "auto_map": moved(listed, renamed)}
        )


def give_back(ours: Path, folder: Path) -> None:
    """Put the code that an exported folder's configs name into it, as it was in the source.

    A tokenizer's config that nobody has changed since comes back in the source's own bytes.
    """
    original, current = ours / FOLDER / TOKENIZER_CONFIG, folder / TOKENIZER_CONFIG
    if original.is_file() and current.is_file():
        check_inside(ours, original)
        before, now = read_json(original), read_json(current)
        listed = before.get("auto_map")
        renamed = new_names(closure(ours / FOLDER, modules(listed)))
        if now.get("auto_map") == moved(listed, renamed):
            restored = {**now, "auto_map": listed}
            shutil.copyfile(original, current) if restored == before else write_json(current, restored)
    named = named_in(folder)
    # What was put beside the model since, such as another tokenizer, is not among the source's own.
    for home in (ours / FOLDER, ours):
        missing = [stem for stem in named if not (folder / f"{stem}.py").exists()]
        for file in closure(home, missing):
            if not (folder / file.name).exists():
                copy(file, folder / file.name)


def moved(listed: Any, renamed: Mapping[str, str]) -> Any:
    """An `auto_map` whose files have other names."""

    def name(value: Any) -> Any:
        module, dot, rest = str(value).partition(".")
        return f"{renamed[module]}{dot}{rest}" if isinstance(value, str) and module in renamed else value

    def names(value: Any) -> Any:
        return [name(one) for one in value] if isinstance(value, list) else name(value)

    return {key: names(value) for key, value in listed.items()} if isinstance(listed, Mapping) else names(listed)


def new_names(tokenizers: Iterable[Path]) -> dict[str, str]:
    """Other names of the files that would be in the way of our model's."""
    ours, theirs = {file.stem for file in code_files()}, {file.stem for file in tokenizers}
    return {stem: free_name(stem, ours | theirs) for stem in sorted(ours & theirs)}


def with_imports(text: str, renamed: Mapping[str, str]) -> str:
    """A file's text that imports its neighbours by their new names."""
    pattern = IMPORT.format("|".join(map(re.escape, renamed)))
    return re.sub(pattern, lambda match: match["before"] + renamed[match["module"]], text, flags=re.M)


def free_name(stem: str, taken: set[str]) -> str:
    while stem in taken:
        stem = PREFIX + stem
    return stem


def copy(file: Path, target: Path) -> None:
    """A file, which stays for its owner alone if it was."""
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, target)
    target.chmod(target.stat().st_mode & file.stat().st_mode | stat.S_IWUSR)
