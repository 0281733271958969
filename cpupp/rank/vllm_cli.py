"""vLLM's command line, run as `python -m vllm.entrypoints.cli.main` runs it; see vllm_start for what differs."""

from __future__ import annotations

import runpy

from cpupp.rank.vllm_start import relax_collector

if __name__ == "__main__":
    relax_collector()
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__", alter_sys=True)
