"""What the vLLM of this host itself says: which flags it knows, which architectures, and whether in a pipeline.

Importing it takes seconds of a core, so this is asked once for each build, beside all else.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from .agent_engine import probe_environment

if TYPE_CHECKING:
    from .agent_children import Children

ASK_S = 240.0
ASK = r"""
import json, os, sys
out = os.dup(1)
os.dup2(2, 1)  # vLLM may print
order = json.loads(sys.argv[1])
answer = {"unknown_flags": [], "architectures": {}, "error": ""}
def words(error):
    return type(error).__name__ + ": " + " ".join(str(error).split())[-500:]
def flags():
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    from vllm.entrypoints.cli import serve  # where its parser is made moved between versions
    parser = serve.make_arg_parser(FlexibleArgumentParser())
    known = {name.replace("_", "-") for name in parser._option_string_actions}
    for flag in order["flags"]:
        plain = flag.split("=")[0].split(".")[0].replace("_", "-")
        if plain not in known and not any(name.startswith(plain) for name in known):
            answer["unknown_flags"].append(flag)
def models():
    from vllm.model_executor.models.interfaces import supports_pp
    from vllm.model_executor.models.registry import ModelRegistry
    for name in order["architectures"]:
        entry = ModelRegistry.models.get(name)
        if entry is None:
            answer["architectures"][name] = "absent"
        else:
            # Loaded here: inspect_model_cls would import all of vLLM once more, in a process of its own.
            answer["architectures"][name] = "pipeline" if supports_pp(entry.load_model_cls()) else "single"
for step in (flags, models):
    try:
        step()
    except BaseException as error:
        answer["error"] = step.__name__ + ": " + words(error)
os.write(out, ("@vllm " + json.dumps(answer) + "\n").encode())
"""


def ask_vllm(request: dict[str, Any], children: Children) -> dict[str, Any]:
    """Ask the engine's vLLM about `flags` and `architectures` (see VllmFacts)."""
    order = json.dumps({"flags": request["flags"], "architectures": request["architectures"]})
    environment = probe_environment()
    environment.update({"VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    environment.update({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    answer: dict[str, Any] = {"unknown_flags": [], "architectures": {}, "error": ""}
    try:
        said = children.ask([os.path.expanduser(request["python"]), "-c", ASK, order], ASK_S, environment)
    except (OSError, ValueError) as error:
        return {**answer, "error": f"{request['python']}: {getattr(error, 'strerror', None) or error}"}
    for line in said.output.decode("utf-8", "replace").splitlines():
        if line.startswith("@vllm "):
            return {**answer, **json.loads(line[len("@vllm ") :])}
    words = said.errors.decode("utf-8", "replace").strip()[-500:]
    return {**answer, "error": said.trouble or words or f"exit status {said.status}"}
