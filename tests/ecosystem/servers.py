"""A server of OpenAI's protocol in another process, and one question to it."""

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
PATIENCE = 300.0  # seconds: a busy machine takes long to import torch


@contextmanager
def serving(*command: str, log: Path) -> Iterator[str]:
    """The address of what this command serves, from when it is up until the block ends; `log` has what it prints."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    where = ["--host", HOST, "--port", str(port)]
    with log.open("w") as out, subprocess.Popen([*command, *where], stdout=out, stderr=out, env=quiet()) as server:
        try:
            wait_for(f"http://{HOST}:{port}/health", server, log)
            yield f"http://{HOST}:{port}"
        finally:
            server.terminate()


def quiet() -> dict[str, str]:
    """The environment without the Hub, and with lines long enough not to be broken."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def wait_for(url: str, server: subprocess.Popen[Any], log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no server: {log.read_text()[-2000:]}")


def ask(address: str, **request: Any) -> str:
    """The greedy answer to a chat."""
    body = json.dumps({"temperature": 0, "stream": False, **request}).encode()
    post = urllib.request.Request(f"{address}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(post, timeout=PATIENCE) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
