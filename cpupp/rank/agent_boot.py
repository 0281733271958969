"""The first lines that run on a host: make the agent's modules importable from memory, and start one of them.

The launcher sends this file's text followed by a call of `run` (see launch/bundle.py); nothing is written to the host's
disk. Written for any Python 3, so that an old one is told what is wrong instead of failing on its syntax.
"""

import importlib
import importlib.machinery
import sys
import types

PACKAGE = "cpupp_agent"
OLDEST = (3, 8)


class MemoryFinder:
    """Finds and loads the modules of `cpupp_agent` from a dict of file name without suffix -> source text.

    Without the base classes of importlib.abc: that module imports thirty others.
    """

    def __init__(self, sources: "dict[str, str]") -> None:
        self.sources = sources

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> "importlib.machinery.ModuleSpec | None":
        """Return the spec of one of our modules, None for any other."""
        head, _, name = fullname.rpartition(".")
        if head != PACKAGE or name not in self.sources:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=fullname)  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        """Let Python make the module object."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module's source in its namespace."""
        name = module.__name__
        exec(compile(self.get_source(name), name, "exec"), module.__dict__)

    def get_source(self, fullname: str) -> str:
        """Return the source text, which lets tracebacks show lines."""
        return self.sources[fullname.rpartition(".")[2]]


def run(sources: "dict[str, str]", entry: str) -> None:
    """Make the modules importable and call `main(sources)` of the module `entry`; its result is the exit status."""
    if sys.version_info < OLDEST:
        found = ".".join(str(part) for part in sys.version_info[:3])
        sys.stderr.write(f"cpupp needs python3 >= 3.8 on the host, {sys.executable} is {found}\n")
        sys.exit(78)
    package = types.ModuleType(PACKAGE)
    package.__path__ = []
    sys.modules[PACKAGE] = package
    sys.meta_path.insert(0, MemoryFinder(sources))
    sys.exit(importlib.import_module(PACKAGE + "." + entry).main(sources))
