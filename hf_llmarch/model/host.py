"""The libraries that this code runs on; any release other than it was made for is refused, in one sentence.

This file travels with a pushed model. It is imported before any name of transformers that another release may lack.
"""

import re
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"

# Library -> the oldest release and the one before which support ends. CI and `make test-compat` test both ends.
SUPPORTED: dict[str, tuple[str, str]] = {
    "torch": ("2.7.1", "3"),
    "transformers": ("5.16.1", "6"),
    "peft": ("0.19", "1"),
}


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version: (5, 30, 0) for `5.30.0.dev0`, (2, 7, 1) for `2.7.1+cpu`."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def check(library: str, found: str) -> None:
    """Refuse a release of a library that this code was not made for.

    Raises:
        ImportError: saying which are supported, which was found and what to do.
    """
    oldest, before = SUPPORTED[library]
    if not release(oldest) <= release(found) < release(before):
        raise ImportError(
            f"hf_llmarch {__version__} supports {library} >={oldest},<{before} and found {found}: install a supported "
            f"release, for example `pip install '{library}>={oldest},<{before}'`."
        )


def installed(library: str) -> str | None:
    """The version of a library, which need not be imported for it; None where it is not installed."""
    loaded = getattr(sys.modules.get(library), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def require(library: str) -> str:
    """The version of a library that has to be there, which is checked."""
    # A build without metadata says its version itself.
    found = installed(library) or str(import_module(library).__version__)
    check(library, found)
    return found


require("torch")
FOUND = release(require("transformers"))
