"""What each vLLM version can and cannot do on CPU over several hosts, with upstream's numbers.

The only place of such facts for the plan; what the ranks need sits in rank/vllm_adapter.py and rank/vllm_plugin.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OLDEST = (0, 18, 0)
NEWEST_TESTED = (0, 32, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """A fault of stock vLLM: [first, last] versions that have it, what happens, upstream's number, what cures it."""

    code: str
    first: tuple[int, int, int]
    last: tuple[int, int, int]
    what: str
    source: str
    cured_by: tuple[str, ...]


TENSOR_DICT = KnownFault(
    code="VLLM-TENSOR-DICT",
    first=(0, 18, 0),
    last=(0, 19, 99),
    what="a pipeline over hosts dies at the first request: torch.distributed has no attribute recv_tensor_dict",
    source="vllm #37933, fixed by #40150 in 0.20.0",
    cured_by=("links", "fallback"),
)

KNOWN_FAULTS = (
    TENSOR_DICT,
    KnownFault(
        code="VLLM-EAGER",
        first=(0, 27, 1),
        last=(0, 32, 0),
        what="a pipeline in eager mode dies at the first request: assert self.intermediate_tensors is not None",
        source="measured with 0.27.1 and 0.32.0; warming_up_model returns early in eager mode",
        cured_by=("links", "fallback"),
    ),
    KnownFault(
        code="VLLM-EQUAL-PORT",
        first=(0, 18, 0),
        last=(0, 27, 1),
        what="one VLLM_PORT on all hosts makes SHM names agree over hosts, and the start dies in SHMManager",
        source="measured with 0.27.1; vllm #33628, #34169, #46716",
        cured_by=("links", "fallback"),
    ),
    KnownFault(
        code="VLLM-LOCAL-GLOO",
        first=(0, 28, 0),
        last=(0, 32, 0),
        what="two vLLM nodes of one host talk by gloo although they share memory (random SHM group names)",
        source="vllm #50999; measured with 0.32.0",
        cured_by=("links",),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmNaming:
    """How stock vLLM of versions [first, last] names the shared memory of a TP or PP group.

    ident: what stands for VLLM_DIST_IDENT in the name, with `{node}` for the vLLM node that makes it up; shared_by: a
    variable that makes the idents of all vLLM nodes equal where it is equal, empty when nothing does.
    """

    first: tuple[int, int, int]
    last: tuple[int, int, int]
    ident: str
    shared_by: str
    source: str

    @property
    def versions(self) -> str:
        """`0.18 to 0.28`."""
        return f"{self.first[0]}.{self.first[1]} to {self.last[0]}.{self.last[1]}"


_PORT_SOURCE = (
    "v1/worker/cpu_worker.py: the port of the node's own init method, random or the first free from VLLM_PORT"
)
SHM_NAMINGS = (
    ShmNaming(
        first=(0, 18, 0), last=(0, 19, 99), ident="<port-of-node-{node}>", shared_by="VLLM_PORT", source=_PORT_SOURCE
    ),
    ShmNaming(
        first=(0, 20, 0), last=(0, 27, 99), ident="<port-of-node-{node}>", shared_by="VLLM_PORT", source=_PORT_SOURCE
    ),
    ShmNaming(
        first=(0, 28, 0),
        last=(0, 32, 99),
        ident="vllm_dist_<uuid-of-node-{node}>",
        shared_by="",
        source="vllm #50999: the name of the node's own file store, random",
    ),
)
"""All of them check that the names of a group agree (vllm #34169), and none that the memory is one (#46716)."""

NAMES_SOURCES = ("vllm #33628", "vllm #34169", "vllm #46716")
"""Names that agree over two machines."""

SHM_NAME = "{ident}-{kind}:0-[{ranks}]-cpushm"
"""device_communicators/cpu_communicator.py, `_CPUSHMDistributed.make_group_name`, 0.18 to 0.32 (kind: tp or pp)."""

SHM_MAX_RANKS = 8
"""A group with more ranks dies in vLLM's SHM operations (csrc/cpu/shm.cpp, MAX_SHM_RANK_NUM)."""

SHM_ISA = "avx512f"
"""On x86-64 only the build for AVX-512 has SHM operations (torch.ops._C.init_shm_manager); the AVX2 build has none."""


def shm_naming(version: str) -> ShmNaming | None:
    """How this version names shared memory; the newest known way for a newer or unknown one."""
    parsed = parse_version(version)
    if parsed is None or parsed > SHM_NAMINGS[-1].last:
        return SHM_NAMINGS[-1]
    return next((naming for naming in SHM_NAMINGS if naming.first <= parsed <= naming.last), None)


JOINED = "joined its groups"
SERVING = "serving"
PHASES: tuple[tuple[str, re.Pattern[str] | None], ...] = (
    ("waiting", None),
    ("started, importing", None),
    ("reading the model's configuration", re.compile(r"non-default args|Resolved architecture")),
    ("starting engine and workers", re.compile(r"Initializing a V1 LLM engine|OpenMP thread binding info")),
    ("joining the other ranks", re.compile(r"world_size=\d+ rank=\d+")),
    (JOINED, None),
    ("loading weights", re.compile(r"Starting to load model")),
    ("weights loaded", re.compile(r"Loading weights took|Model loading took")),
    ("compiling", re.compile(r"Dynamo bytecode transform|[Cc]ompiling (a |the )?(graph|model)|torch\.compile takes")),
    ("warming up", re.compile(r"Warming up model|[Ww]arming up")),
    ("warmed up", re.compile(r"Warming up done|for KV cache|KV cache size")),
    ("starting the API", re.compile(r"Starting vLLM (API )?server|Started server process")),
    (SERVING, re.compile(r"Application startup complete")),
)
"""What a vLLM node does, in the order of a start, and the log line (vLLM 0.18 to 0.32) that says so, if one does."""

AFTER_JOINING = ("weights loaded", "compiling", "warming up", "warmed up", "starting the API", "serving")
"""Phases that no rank can reach before it has joined, and so announced, its groups."""


WORKER_EXCEPTION = re.compile(r"WorkerProc (hit an exception|failed)")
"""The log line with which a worker tells of an exception that it survives, while its peers wait for ever (vllm #23985);
v1/executor/multiproc_executor.py, 0.18 to 0.32."""

METHOD_ENV = "VLLM_WORKER_MULTIPROC_METHOD"
FORK_SAFE = "libiomp5"
"""How a vLLM node starts its processes, and the OpenMP runtime with which they can be forked (rank/vllm_start.py)."""


def parse_version(text: str) -> tuple[int, int, int] | None:
    """Read `0.32.0`, `0.32.0+cpu`, `0.32.0rc1` into three numbers; None when it is no version."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        return None
    return int(match[1]), int(match[2]), int(match[3] or 0)


def known_faults(version: str) -> tuple[KnownFault, ...]:
    """Faults of stock vLLM at this version."""
    parsed = parse_version(version)
    if parsed is None:
        return ()
    return tuple(fault for fault in KNOWN_FAULTS if fault.first <= parsed <= fault.last)


def version_warning(version: str) -> str | None:
    """Say when a version is newer than what cpupp was tested with (the announcements still guard the run)."""
    parsed = parse_version(version)
    if parsed is None or parsed <= NEWEST_TESTED:
        return None
    return f"vLLM {version} is newer than {_text(NEWEST_TESTED)}, the newest that cpupp was tested with"


def binds_by_global_rank(version: str) -> bool:
    """Whether a worker looks for its cores in VLLM_CPU_OMP_THREADS_BIND at its global rank, not at its local one.

    0.18 and 0.19 do (v1/worker/cpu_worker.py: `omp_cpuids_list[self.rank]`), so their list holds all ranks of all
    nodes: with this node's alone every rank but the head's dies with IndexError.
    """
    parsed = parse_version(version)
    return parsed is not None and parsed < (0, 20, 0)


def takes_micro_batches(version: str) -> bool:
    """Whether rank/scheduler.py may stand in the place of this version's scheduler.

    vLLM calls that interface its own, so only versions whose scheduler was read and run: 0.32
    (v1/core/sched/scheduler.py, v1/engine/core.py). Older, newer and unknown ones keep their own.
    """
    parsed = parse_version(version)
    return parsed is not None and (0, 32, 0) <= parsed < (0, 33, 0)


def too_old(version: str) -> str | None:
    """Say when a version cannot be used at all."""
    parsed = parse_version(version)
    if parsed is None or parsed >= OLDEST:
        return None
    return f"vLLM {version} is older than {_text(OLDEST)}, the oldest that cpupp supports"


def phase_of(line: str, now: str = "waiting") -> str | None:
    """What the vLLM node that wrote this line does, if that is later in a start than `now`; else None."""
    names = [name for name, _ in PHASES]
    reached = names.index(now) if now in names else len(names)
    later = PHASES[reached + 1 :]
    return next((name for name, pattern in reversed(later) if pattern is not None and pattern.search(line)), None)


def _text(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
