"""Tests that transformers wrote for its own classes, run on ours. `make test-host` fetches them and names their folder
with `--host-tests`; without it nothing here is collected.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
from transformers import testing_utils

COUNTED = ("passed", "failed", "xfailed", "skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--host-tests", type=Path, help="the folder that holds `tests` of the installed transformers")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if config.getoption("--host-tests", default=None) else True


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--host-tests", default=None)
    if folder:
        sys.path.insert(0, str(folder.resolve()))
        # Before the tests import it: it sets the eps under the names of all architectures, and ours has one of them.
        testing_utils.set_config_for_less_flaky_test = lambda config: setattr(config, "norm_eps", 1.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line a style: how many tests passed, failed, are excused (`excused.py`), or do not apply."""
    if not terminalreporter.config.getoption("--host-tests", default=None):
        return
    counts = {outcome: Counter[str]() for outcome in COUNTED}
    for outcome, styles in counts.items():
        tests = {report.nodeid for report in terminalreporter.getreports(outcome) if "::" in report.nodeid}
        styles.update(test.split("::")[1].removeprefix("Test_") for test in tests)
    terminalreporter.write_line(f"{'style':24} passed  failed excused skipped")
    for style in sorted(set().union(*counts.values())):
        terminalreporter.write_line(f"{style:24}" + "".join(f"{counts[o][style]:7} " for o in COUNTED))
