"""The facts of this host, in the exact shape of plan/facts.py's HostFacts. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import resource
import socket
import sys
from typing import TYPE_CHECKING, Any

from . import agent_bandwidth, agent_engine, agent_model, agent_net, agent_proc, agent_site

if TYPE_CHECKING:
    from .agent_children import Children

CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"
UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"
NONCE = re.compile(r"cpupp-nonce-[A-Za-z0-9._-]{1,100}")
LIMITS = {"nofile": "NOFILE", "nproc": "NPROC", "memlock": "MEMLOCK", "stack": "STACK", "as": "AS", "core": "CORE"}
ISA = re.compile(r"avx|amx|sse4|fma|f16c|bf16|vnni")
# Prefixes of variables that change what vLLM, torch, gloo or OpenMP do.
MATTERS = (
    *("VLLM_", "GLOO_", "OMP_", "KMP_", "GOMP_", "MKL_", "TORCH", "PYTORCH", "NCCL_", "MASTER_", "RANK", "WORLD_SIZE"),
    *("LOCAL_RANK", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHON", "VIRTUAL_ENV", "CONDA", "MALLOC_", "TCMALLOC_", "HF_"),
    *(
        "TRANSFORMERS_",
        "CUDA_VISIBLE_DEVICES",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "NO_PROXY",
        "TMPDIR",
        "LC_ALL",
    ),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.IGNORECASE)


class Nonces:
    """The nonce files that this agent put into /dev/shm, each held by a lock so that a later agent knows the dead."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    def write(self, name: str, value: str) -> str:
        """Create the file (0600); return why it could not be done, else an empty string."""
        if not NONCE.fullmatch(name):
            raise ValueError(f"nonce name {name!r} does not match {NONCE.pattern}")
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(f"{agent_proc.SHM}/{name}", flags, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            self._held[name] = descriptor
            os.write(descriptor, value.encode("ascii"))
        except OSError as error:
            return str(error.strerror)
        return ""

    def clear(self) -> None:
        """Remove all nonce files of this agent."""
        while self._held:
            name, descriptor = self._held.popitem()
            with contextlib.suppress(OSError):
                os.unlink(f"{agent_proc.SHM}/{name}")
            os.close(descriptor)


def sweep_nonces() -> None:
    """Remove nonce files of this user that no living agent holds."""
    for name in agent_proc.shm_files():
        if NONCE.fullmatch(name):
            with contextlib.suppress(OSError), open(f"{agent_proc.SHM}/{name}", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(f"{agent_proc.SHM}/{name}")


def read_nonces(names: dict[str, str], values: dict[str, str]) -> list[str]:
    """Return the hosts whose nonce file is in our /dev/shm with the right content, or empty for want of a page."""
    seen = []
    for host, name in names.items():
        if not NONCE.fullmatch(name):
            continue
        with contextlib.suppress(OSError), open(f"{agent_proc.SHM}/{name}", "rb") as file:
            if file.read(1000) in (values[host].encode("ascii"), b""):
                seen.append(host)
    return seen


def host_facts(request: dict[str, Any], nonces: Nonces, children: Children) -> dict[str, Any]:
    """Return the HostFacts mapping; `routes` and `shm_seen` are empty, as they need the other hosts."""
    nonce = request.get("nonce")
    if nonce:
        nonces.write(nonce["name"], nonce["value"])
    names = agent_net.SlowNames()
    memory = meminfo("/proc/meminfo")
    connection = os.environ.get("SSH_CONNECTION", "").split()
    limits = request.get("free_port_range")
    return {
        "name": request["name"],
        "hostname": socket.gethostname(),
        "boot_id": agent_site.boot_id(),
        "user": _user(),
        "uid": os.getuid(),
        "arch": os.uname().machine,
        "kernel": os.uname().release,
        "isa": isa_flags(),
        "cpu_model": cpu_model(),
        "python3": ".".join(str(part) for part in sys.version_info[:3]),
        "shm": shm_facts(),
        "shm_seen": [],
        "cpus": cpu_facts(),
        "cpu_quota": cpu_quota(),
        "memory_total": memory.get("MemTotal", 0),
        "memory_available": memory.get("MemAvailable", 0),
        "memory_limit": memory_limit(),
        "numa": numa_facts(),
        "bandwidth": agent_bandwidth.bandwidth_facts(cpu_facts(), memory_room(memory), children)
        if request.get("bandwidth")
        else [],
        "interfaces": agent_net.interfaces(),
        "routes": [],
        "ssh_address": connection[2] if len(connection) == 4 else "",
        "name_resolves_to": agent_net.resolve(socket.gethostname()),
        "ports": agent_net.check_ports(list(request.get("ports", ()))),
        "free_ports": agent_net.free_ports(
            request.get("num_free_ports", 0), tuple(limits) if limits else agent_net.FREE_PORT_RANGE
        ),
        "ulimits": {name: resource.getrlimit(getattr(resource, "RLIMIT_" + key))[0] for name, key in LIMITS.items()},
        "environment": environment_facts(os.environ),
        "engine": agent_engine.engine_facts(request["engine_python"], children),
        "model": agent_model.model_facts(request["model_path"]),
        "slow_names": names.verdict(),
    }


def environment_facts(environ: Any) -> dict[str, str]:
    """Return the variables that change vLLM; of secrets only that they are set."""
    found = {}
    for name, value in sorted(environ.items()):
        if name.startswith(MATTERS):
            found[name] = "(set)" if SECRET.search(name) else re.sub(r"://[^/@\s]*@", "://(hidden)@", value)
    return {name: value.encode("utf-8", "replace").decode() for name, value in found.items()}


def shm_facts() -> dict[str, Any]:
    """Describe /dev/shm (see ShmFacts); all zero when there is none."""
    try:
        device = os.stat(agent_proc.SHM).st_dev
        space = os.statvfs(agent_proc.SHM)
    except OSError:
        return {"device": 0, "size": 0, "free": 0, "writable": False}
    return {
        "device": device,
        "size": space.f_blocks * space.f_frsize,
        "free": space.f_bavail * space.f_frsize,
        "writable": _can_create(),
    }


def _can_create() -> bool:
    # Mode bits do not know about read-only mounts and full disks.
    path = f"{agent_proc.SHM}/cpupp-nonce-try-{os.urandom(8).hex()}"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        os.unlink(path)
    except OSError:
        return False
    return True


def cpu_facts() -> list[dict[str, int]]:
    """Return the CPUs that this process may run on (see CpuFacts)."""
    found = []
    for cpu in sorted(os.sched_getaffinity(0)):
        topology = f"{CPU}/cpu{cpu}/topology"
        node = 0
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(f"{CPU}/cpu{cpu}") if re.fullmatch(r"node\d+", name)]
            node = int(names[0][4:]) if names else 0
        core = _number(f"{topology}/core_id", cpu)
        found.append({"cpu": cpu, "core": core, "socket": _number(f"{topology}/physical_package_id", 0), "numa": node})
    return found


def numa_facts() -> list[dict[str, int]]:
    """Return the NUMA nodes with memory (see NumaFacts); empty on a kernel that shows none."""
    try:
        nodes = sorted(int(name[4:]) for name in os.listdir(NODE) if re.fullmatch(r"node\d+", name))
    except OSError:
        return []
    found = []
    for node in nodes:
        memory = meminfo(f"{NODE}/node{node}/meminfo")
        total, free = memory.get("MemTotal", 0), memory.get("MemFree", 0)
        if total:
            found.append({"node": node, "memory_total": total, "memory_free": free})
    return found


def isa_flags() -> list[str]:
    """Return the vector extensions of the CPU as /proc/cpuinfo spells them, sorted."""
    key, value = cpuinfo("flags", "Features")
    return sorted(flag for flag in value.split() if key == "Features" or ISA.search(flag))


def cpu_model() -> str:
    """Return what /proc/cpuinfo calls the first CPU, empty where it has no name (as on many Arm machines)."""
    return cpuinfo("model name")[1]


def cpuinfo(*keys: str) -> tuple[str, str]:
    """Return the first line of /proc/cpuinfo with one of these keys, as key and value; both empty without one."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return key.strip(), value.strip()
    return "", ""


def cpu_quota() -> float | None:
    """Return the number of cores that the cgroup grants, the least of all levels; None without a limit."""
    quotas = []
    for folder in cgroup_folders("cpu"):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            text = read_text(f"{folder}/cpu.max") or ""
            if text:
                quota, period = text.split()
            else:
                quota, period = (
                    read_text(f"{folder}/cpu.cfs_quota_us") or "max",
                    read_text(f"{folder}/cpu.cfs_period_us") or "",
                )
            if quota not in ("max", "-1"):
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit() -> int | None:
    """Return the cgroup's memory limit in bytes, the least of all levels; None without one."""
    limits = []
    for folder in cgroup_folders("memory"):
        text = read_text(f"{folder}/memory.max") or read_text(f"{folder}/memory.limit_in_bytes") or ""
        if text.isdigit() and int(text) < UNLIMITED:
            limits.append(int(text))
    return min(limits, default=None)


def memory_room(memory: dict[str, int]) -> int:
    """Return the bytes that a process can still take: what is available, within the cgroup's limit."""
    limit = memory_limit()
    available = memory.get("MemAvailable", 0)
    return available if limit is None else min(available, limit)


def cgroup_folders(controller: str) -> list[str]:
    """Return this process's cgroup folder of the controller and all above it, in v1 and v2 hierarchies."""
    paths: dict[str, str] = {}
    for line in (read_text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            paths[name] = path
    found = []
    for line in (read_text("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if kind[0] == "cgroup2":
            path = paths.get("", "/")
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            path = paths.get(controller, "/")
        else:
            continue
        root, top = fields[3], fields[4]
        if path.startswith(root.rstrip("/") + "/"):
            path = path[len(root.rstrip("/")) :]
        # In a container the path can be the outside one: then only the mount itself is ours.
        folder = os.path.normpath(top + "/" + path)
        while folder.startswith(top):
            if os.path.isdir(folder):
                found.append(folder)
            folder = os.path.dirname(folder)
    return found


def meminfo(path: str) -> dict[str, int]:
    """Return the sizes in a meminfo file of the kernel or of a NUMA node, in bytes."""
    found = {}
    for line in (read_text(path) or "").splitlines():
        # `MemTotal:  123 kB`, in a node's file `Node 0 MemTotal:  123 kB`
        match = re.search(r"(\w+):\s+(\d+) kB", line)
        if match:
            found[match[1]] = int(match[2]) * 1024
    return found


def _number(path: str, default: int) -> int:
    text = (read_text(path) or "").strip()
    return int(text) if text.isdigit() else default


def read_text(path: str) -> str | None:
    """Return a file's text without blanks around it, None when it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
