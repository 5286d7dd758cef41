"""Which Python files a folder's configs name in an `auto_map`: transformers runs them for whoever trusts them, and here
they are only found and read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .files import CONFIG, read_json
from .folder import check_inside

TOKENIZER_CONFIG = "tokenizer_config.json"
# What transformers takes for an import of a file beside: `from .x import y` and `import .x`.
IMPORT = r"^(?P<before>\s*(?:from|import)\s+\.)(?P<module>{})(?=\s)"


def named_in(folder: Path) -> list[str]:
    """The files' names, without their ending, that the configs of a model and of its tokenizer name."""
    return [stem for name in (CONFIG, TOKENIZER_CONFIG) for stem in modules(auto_map(folder / name))]


def auto_map(file: Path) -> Any:
    """The classes that a config names, by what they are for; a tokenizer's may be a list."""
    if not file.is_file() or b'"auto_map"' not in file.read_bytes():
        return None
    return read_json(file).get("auto_map")


def modules(listed: Any) -> Iterator[str]:
    """The files' names, without their ending, of the classes in an `auto_map`. Those of other repositories are left."""
    entries = listed.values() if isinstance(listed, Mapping) else [listed]
    for entry in entries:
        for name in entry if isinstance(entry, list) else [entry]:
            if isinstance(name, str) and (found := re.fullmatch(r"([^\W\d]\w*)\.\w+", name)):
                yield found[1]


def closure(folder: Path, stems: Iterable[str]) -> list[Path]:
    """The files of these names that are in a folder, and those beside it that they import, and so on.

    Raises:
        CheckpointError: one is a link that leads out of the folder, or is no text.
    """
    found: dict[str, Path] = {}
    waiting = list(stems)
    while waiting:
        stem = waiting.pop()
        file = folder / f"{stem}.py"
        if stem in found or not file.is_file():
            continue
        check_inside(folder, file)
        found[stem] = file
        waiting += [match["module"] for match in re.finditer(IMPORT.format(r"[^\W\d]\w*"), text_of(file), re.M)]
    return [found[stem] for stem in sorted(found)]


def text_of(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is named in an auto_map, and is no Python file in UTF-8: {error}") from error
