"""Lay out the tests that transformers runs on its own classes: `python tests/host/fetch.py TARGET [CHECKOUT]`.

The source distribution on the package index holds `tests/test_*.py` and none of the folders beside them. What these
files import from there gets stand-ins without any test, unless a checkout of the repository is given.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

STAND_INS = {
    "__init__.py": "",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    # The tests that start processes are for the model types on a list of transformers, which is without ours.
    "distributed_testing_utils.py": "def __getattr__(name):\n    return None\n",
}


def from_distribution(target: Path) -> None:
    """The tests of the source distribution, of the version that is installed, with the stand-ins."""
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        wanted = ["--no-binary", ":all:", "--no-build-isolation", f"transformers=={version('transformers')}"]
        subprocess.run([*download, "--dest", folder, *wanted], check=True)
        with tarfile.open(next(Path(folder).glob("transformers-*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        shutil.copytree(next(Path(folder).glob("transformers-*/tests")), target / "tests")
    for name, text in STAND_INS.items():
        path = target / "tests" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def from_checkout(target: Path, checkout: Path) -> None:
    """A link to the tests of the checkout.

    Raises:
        SystemExit: where the checkout is of another version than the one installed, whose tests may ask for more.
    """
    source = checkout / "src" / "transformers" / "__init__.py"
    if not source.is_file():
        raise SystemExit(f"{checkout} is no checkout of transformers: it has no src/transformers/__init__.py.")
    found = re.search(r'^__version__ = "(.+)"', source.read_text(encoding="utf-8"), re.MULTILINE)
    stated, installed = found and found[1], version("transformers")
    if stated != installed:
        raise SystemExit(f"{checkout} is transformers {stated}, installed is {installed}: git checkout v{installed}")
    (target / "tests").symlink_to(checkout.resolve() / "tests")


def main(target: str, checkout: str | None = None) -> None:
    shutil.rmtree(target, ignore_errors=True)
    Path(target).mkdir(parents=True)
    if checkout is None:
        from_distribution(Path(target))
    else:
        from_checkout(Path(target), Path(checkout))


if __name__ == "__main__":
    main(*sys.argv[1:])
