"""What only doctor asks of this host, in the exact shape of plan/health.py's HealthFacts. Standard library only."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from . import agent_leftovers, agent_model, agent_probe, agent_proc, agent_site

if TYPE_CHECKING:
    from .agent_children import Children

LOADER_WORDS = re.compile(r"object '([^']*)' from LD_PRELOAD cannot be preloaded \(([^)]*)\)")
HUB = ("huggingface.co", 443)
HUB_S = 2.0
LONGEST_FILE = 64 << 20
COMPARED = (
    *("config.json", "generation_config.json", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja"),
)


def health_facts(request: dict[str, Any], children: Children) -> dict[str, Any]:
    """Return the HealthFacts mapping. preloads: libraries to try; model_path: as for the probe."""
    folder = agent_model.find_model(request["model_path"])
    memory = agent_probe.meminfo("/proc/meminfo")
    return {
        "glibc": _glibc(),
        "online": os.sysconf("SC_NPROCESSORS_ONLN"),
        "threads_per_core": 2 if _read("/sys/devices/system/cpu/smt/active") == "1" else 1,
        "governors": governors(),
        "load": os.getloadavg()[0],
        "swap_total": memory.get("SwapTotal", 0),
        "swap_free": memory.get("SwapFree", 0),
        "huge_pages": _chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        "overcommit": int(_read("/proc/sys/vm/overcommit_memory") or 0),
        "commit_left": memory.get("CommitLimit", 0) - memory.get("Committed_AS", 0),
        "shm_type": shm_mount()[0],
        "shm_options": shm_mount()[1],
        "leftovers": agent_leftovers.leftovers(time.time()),
        "processes": agent_leftovers.strangers(time.time()),
        "preloads": [{"path": path, "error": try_preload(path, children)} for path in request["preloads"]],
        "disks": disks(),
        "model_files": model_files(folder),
        "unreadable": unreadable(folder),
        "hub": _hub() if request.get("ask_hub") else "",
    }


def clock(_: dict[str, Any]) -> dict[str, float]:
    """Return this host's clock, in unix seconds."""
    return {"time": time.time()}


def try_preload(path: str, children: Children) -> str:
    """Let the host's own loader preload the library into a program that does nothing; return its complaint."""
    program = next((name for name in ("/bin/true", "/usr/bin/true") if os.path.exists(name)), "true")
    environment = {"LD_PRELOAD": path, "PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"}
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    try:
        answer = children.ask([program], 10.0, environment)
    except (OSError, ValueError) as error:
        return f"{program}: {error}"
    words = answer.errors.decode("utf-8", "replace").strip()
    found = LOADER_WORDS.search(words)
    if found:
        return found[2]
    if answer.trouble or answer.status:
        return words[-300:] or answer.trouble or f"{program} ended with status {answer.status} under it"
    return words[-300:]


def governors() -> list[str]:
    """Return the frequency governors of the CPUs that this process may use; empty where the kernel shows none."""
    found = set()
    for cpu in os.sched_getaffinity(0):
        text = _read(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor")
        if text:
            found.add(text)
    return sorted(found)


def shm_mount() -> tuple[str, list[str]]:
    """Return the type of the file system at /dev/shm and the options of its mount."""
    found: tuple[str, list[str]] = ("", [])
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if fields[4] == agent_proc.SHM:  # the last one lies on top
            options = [*fields[5].split(","), *(kind[2].split(",") if len(kind) > 2 else ())]
            found = kind[0], list(dict.fromkeys(options))
    return found


def disks() -> list[dict[str, Any]]:
    """Return where vLLM and cpupp write, with the bytes that are free there for this user."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    wanted = {"vLLM's cache": os.path.join(cache, "vllm"), "site folders": agent_site.places()[0]}
    found = []
    for what, path in wanted.items():
        folder = path
        while not os.path.isdir(folder) and folder != "/":
            folder = os.path.dirname(folder)
        with contextlib.suppress(OSError):
            space = os.statvfs(folder)
            writable = os.access(folder, os.W_OK | os.X_OK)
            entry = {"what": what, "path": path, "free": space.f_bavail * space.f_frsize, "writable": writable}
            found.append(entry)
    return found


def model_files(folder: str) -> dict[str, str]:
    """Return `size sha256` of every small file that decides what the model is, and of the headers of its weights."""
    found = {}
    for name in COMPARED:
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            if os.path.getsize(path) <= LONGEST_FILE:
                with open(path, "rb") as file:
                    found[name] = f"{os.path.getsize(path)} {hashlib.sha256(file.read()).hexdigest()[:16]}"
    for path in _weights(folder):
        with contextlib.suppress(OSError, ValueError):
            digest = hashlib.sha256(agent_model.read_header(path)).hexdigest()[:16]
            found[os.path.basename(path)] = f"{os.path.getsize(path)} {digest}"
    return found


def unreadable(folder: str) -> list[str]:
    """Return the files of the model folder that this user may not read."""
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(folder))
        paths = [os.path.join(folder, name) for name in names]
        return [path for path in paths if not os.path.isdir(path) and not os.access(path, os.R_OK)]
    return []


def _weights(folder: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))


def _hub() -> str:
    """Return why the hub cannot be reached, `reachable` when it can."""
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        return "HF_HUB_OFFLINE is set"
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return "reachable"  # by way of a proxy, as far as one can tell without asking it
    found: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection(HUB, HUB_S).close()
            found.append("reachable")
        except OSError as error:
            found.append(f"{HUB[0]}: {error.strerror or error}")

    thread = threading.Thread(target=connect, daemon=True)  # a resolver may hang for longer than any time-out
    thread.start()
    thread.join(2 * HUB_S)
    return found[0] if found else f"{HUB[0]}: no answer"


def _glibc() -> str:
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    return ""


def _chosen(text: str) -> str:
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else text


def _read(path: str) -> str:
    return agent_probe.read_text(path) or ""
