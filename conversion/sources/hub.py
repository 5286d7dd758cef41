"""A repository of the Hub: one snapshot, downloaded and then read as a folder."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from ..errors import CheckpointError
from .files import SAFETENSORS

# Downloaded only when there is nothing better (pickles), or never.
PICKLES = ("*.bin", "*.bin.index.json")

NEVER_DOWNLOADED = (
    *("*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "*.ot", "*.npz", "*.tflite"),
    *("original/*", "onnx/*", "consolidated*"),
)


def download(repository: str, revision: str | None, allow_pickle: bool) -> Path:
    """The folder of one snapshot, with pickles only where it holds no safetensors and they are allowed.

    Raises:
        CheckpointError: the Hub did not give it; the message says why, and what to do.
    """
    try:
        snapshot = Path(snapshot_download(repository, revision=revision, ignore_patterns=[*NEVER_DOWNLOADED, *PICKLES]))
        if allow_pickle and not SAFETENSORS.is_in(snapshot):
            # The commit, so that a branch that moves meanwhile does not mix two states of the repository.
            commit = snapshot.name if re.fullmatch("[0-9a-f]{40}", snapshot.name) else revision
            snapshot = Path(snapshot_download(repository, revision=commit, ignore_patterns=list(NEVER_DOWNLOADED)))
    except (OSError, ValueError) as error:
        why = why_not(error, repository, revision)
        raise CheckpointError(
            f"{repository!r} is no local folder or file, and could not be had from the Hub: {why}"
        ) from error
    return snapshot


def why_not(error: Exception, repository: str, revision: str | None) -> str:
    """Why the Hub did not give a repository, and what to do about it."""
    page, login = f"{constants.ENDPOINT}/{repository}", "`hf auth login` lets this machine in"
    rows: tuple[tuple[type[Exception], str], ...] = (
        (GatedRepoError, f"it is gated. Accept its terms at {page}; then {login}."),
        (RepositoryNotFoundError, f"there is no such repository. Check its name; if it is private, {login}."),
        (RevisionNotFoundError, f"it has no revision {revision!r}: {page}/tree/main lists them."),
    )
    return next((why for kind, why in rows if isinstance(error, kind)), " ".join(str(error).split()))


def hub_state(path: Path) -> dict[str, str]:
    """The repository and the commit that a path in the Hub's cache belongs to, as `source` and `revision`; nothing for
    any other path."""
    match = re.search(r"(?:^|/)models--([^/]+)/snapshots/([0-9a-f]{40})(?:/|$)", path.as_posix())
    return {"source": match[1].replace("--", "/"), "revision": match[2]} if match else {}
