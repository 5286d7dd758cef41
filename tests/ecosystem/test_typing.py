"""What a type checker and an editor make of the package, as `py.typed` promises."""

import subprocess
import sys
from pathlib import Path

import jedi
import pytest

import hf_llmarch
from hf_llmarch import LlmArchConfig, conversion

SOURCE = Path(hf_llmarch.__file__).parent

RIGHT = """\
from pathlib import Path
from typing import Literal, assert_type

from hf_llmarch import LlmArchConfig, LlmArchForCausalLM
from hf_llmarch.study import presets
from hf_llmarch.study.analysis import LayerReach, receptive_field
from hf_llmarch.conversion.cards import write
from hf_llmarch.conversion import convert, export, plan, verify
from hf_llmarch.conversion.engine import Report
from hf_llmarch.conversion.plans import Plan
from hf_llmarch.conversion.certificate import Certificate

config = LlmArchConfig(hidden_size=64, qk_norm="head", layer_types=["full_attention"] * 8, attention_scale=1)
assert_type(config.hidden_size, int)
assert_type(config.head_dim, int)  # filled in where it was not given
assert_type(config.sliding_window, int | None)
assert_type(config.qk_norm, Literal["none", "head", "heads", "projection"])
assert_type(LlmArchForCausalLM(config).config, LlmArchConfig)
assert_type(LlmArchForCausalLM.from_pretrained("folder"), LlmArchForCausalLM)
report = convert("source", Path("folder"), dtype="bfloat16", verify=True)
assert_type(report, Report)
assert_type(report.certificate, Certificate | None)
assert_type(verify("source", "folder").ok, bool)
assert_type(export("folder", "back").bytes, int)
assert_type(plan({"model_type": "llama"}, ["model.norm.weight"]), Plan)
assert_type(receptive_field(config), list[LayerReach])
assert_type(presets.get("transformer-base", hidden_size=32), LlmArchConfig)
assert_type(write("folder"), Path)
"""

# A line, and the code of the error that mypy must find in it.
WRONG = {
    'LlmArchConfig(hidden_size="wide")': "arg-type",
    'LlmArchConfig(qk_norm="heads of state")': "arg-type",
    "LlmArchConfig(hiden_size=64)": "call-arg",
    'config.topology = "cubic"': "assignment",
    'convert("source")': "call-arg",
    'verify("source", "folder").okay': "attr-defined",
}


@pytest.mark.slow
@pytest.mark.shows("Study", "Types: `mypy --strict` on a user's script finds what is wrong and nothing else", "mypy")
def test_a_users_script_is_checked(tmp_path: Path) -> None:
    # As installed: mypy follows neither setuptools' package-dir nor editable installs.
    package = tmp_path / "types" / "hf_llmarch"
    package.mkdir(parents=True)
    for file in (*SOURCE.glob("*.py"), SOURCE / "py.typed"):
        (package / file.name).symlink_to(file)
    (package / "conversion").symlink_to(Path(conversion.__file__).parent)
    (tmp_path / "user.py").write_text(RIGHT + "\n".join(WRONG) + "\n")
    options = ["--strict", "--follow-imports=silent", "--no-error-summary", "--no-incremental", "--no-pretty"]
    finished = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "user.py"],
        cwd=tmp_path,
        env={"MYPYPATH": "types", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert not finished.stderr
    found = [line for line in finished.stdout.splitlines() if ": error: " in line]
    first = RIGHT.count("\n") + 1
    expected = [(f"user.py:{first + i}", f"[{code}]") for i, code in enumerate(WRONG.values())]
    assert [(line.split(": error: ")[0], line.rsplit(" ", 1)[1]) for line in found] == expected, finished.stdout


@pytest.mark.shows("Study", "An editor shows what a config field does, on hover and in completion", "jedi")
def test_fields_have_their_text_in_an_editor() -> None:
    """Of some fields: that each has one is test_config's."""
    lines = ["from hf_llmarch.model.configuration_llmarch import LlmArchConfig", "config: LlmArchConfig"]
    some = ("hidden_size", "norm_placement", "router_aux_loss_scope", "eos_token_id")
    script = jedi.Script("\n".join([*lines, *(f"config.{name}" for name in some)]))
    for row, name in enumerate(some, start=len(lines) + 1):
        (hovered,) = script.help(row, len("config.") + 1)
        (completed,) = script.complete(row, len(f"config.{name}"))
        for found in (hovered, completed):
            assert " ".join(found.docstring().split()) == LlmArchConfig.docs()[name]
