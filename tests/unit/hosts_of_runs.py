"""Hosts with runs on them, scripted: the agent's operations on runs by their contract, without SSH or processes."""

from __future__ import annotations

from typing import Any

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.run_hosts import RunHosts

RUN = "1130-101500-ab12"


class ScriptedHost:
    """One host; `site` is its attempt of one run as `runs` shows it, `log` what its vLLM node wrote."""

    def __init__(self, name: str, node: int, *, log: bytes = b"", run: str = RUN) -> None:
        self.name = name
        self.node = node
        self.run = run
        self.log = log
        self.down = False
        self.site: dict[str, Any] | None = site(name, node, run=run)
        self.metrics: str | None = None
        self.orders: list[str] = []

    @property
    def alive(self) -> bool:
        """Whether requests can be made."""
        return not self.down

    def request(self, op: str, *, timeout: float = 60.0, **params: Any) -> Any:
        """Answer as the agent does."""
        if self.down:
            raise CpuppError("SSH-CONNECT", "no route to host", hint="is it on?", exit_code=ExitCode.UNREACHABLE)
        self.orders.append(op)
        return getattr(self, f"_{op}")(**params)

    def close(self) -> None:
        """Nothing is open."""

    def end(self, failure: dict[str, Any] | None = None) -> None:
        """The run ends here and leaves its record."""
        if self.site is not None:
            self.site.update(held=False, ended=True)
            self.site["state"]["failure"] = failure
            self.site["state"]["nodes"][0]["alive"] = False

    def _runs(self) -> list[Any]:
        return [] if self.site is None else [self.site]

    def _run_stop(self, run: str, grace: float) -> dict[str, Any]:
        found = int(self.site is not None and self.site["held"] and run == self.run)
        if found:
            self.end()
        return {"found": found, "stuck": [], "remaining": []}

    def _run_log(self, run: str, node: int, offset: int, size: int, host: str) -> dict[str, Any]:
        if self.site is None or (run, node, host) != (self.run, self.node, self.name):
            raise CpuppError("AGENT-REQUEST", f"no log of {run}", exit_code=ExitCode.RANK_FAILED)
        data = self.log[offset : offset + min(size, 7)]  # in small pieces, through the middle of characters
        return {
            "data": data.decode("utf-8", "surrogateescape"),
            "offset": offset + len(data),
            "size": len(self.log),
            "ended": bool(self.site["ended"]),
        }

    def _run_forget(self, run: str) -> dict[str, Any]:
        if run == self.run:
            self.site = None
        return {}

    def _http(self, url: str, http_timeout: float) -> dict[str, Any]:
        if self.metrics is None:
            raise CpuppError("HTTP-FAILED", "connection refused", exit_code=ExitCode.RANK_FAILED)
        return {"status": 200, "headers": {}, "body": self.metrics}


def site(host: str, node: int, *, run: str = RUN, cluster: str = "pair", **changes: Any) -> dict[str, Any]:
    """One entry of the answer to `runs`: a detached run whose one rank here works."""
    pid = 1000 + node
    process = {"pid": pid, "name": "VLLM::Worker", "rss": 3 << 30, "cpu_s": 10.0, "state": "R"}
    state = {
        "time": 2000.0,
        "agent": 900,
        "agent_start": 1,
        "detached": True,
        "failure": None,
        "nodes": [
            {
                "node": node,
                "main_pid": 990 + node,
                "alive": True,
                "exit_code": None,
                "rss": 4 << 30,
                "cpu_s": 12.0,
                "log_bytes": 100,
                "log_time": 1990.0,
                "processes": [process],
                "ranks": {str(node): pid},
            }
        ],
    }
    record = {
        "cluster": cluster,
        "launcher": "me@laptop",
        "created": 1000.0,
        "head": node == 0,
        "num_nodes": 2,
        "hosts": ["a", "b"],
        "api": "http://127.0.0.1:8000" if node == 0 else "",
        "url": "http://10.0.0.1:8000/v1",
        "served_name": "m",
    }
    return {
        "site": f"/var/tmp/cpupp-0/{host}-0",
        "run": run,
        "attempt": 1,
        "host": host,
        "record": {"run": run, "record": record},
        "state": state,
        "held": True,
        "ended": False,
        "mine": False,
        **changes,
    }


def open_hosts(*hosts: ScriptedHost) -> RunHosts:
    """The ways to them."""
    by_name = {host.name: host for host in hosts}

    def open_session(name: str) -> ScriptedHost:
        host = by_name[name]
        if host.down:
            host.request("ping")
        return host

    return RunHosts(tuple(by_name), open_session)
