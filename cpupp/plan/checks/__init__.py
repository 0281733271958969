"""The catalogue of doctor: one function a check, registered with its code, one module a subject.

Findings are shown in the order of these imports.
"""

# ruff: isort: off
from cpupp.plan.checks import hosts as _hosts
from cpupp.plan.checks import cpu as _cpu
from cpupp.plan.checks import memory as _memory
from cpupp.plan.checks import engine as _engine
from cpupp.plan.checks import preload as _preload
from cpupp.plan.checks import shm as _shm
from cpupp.plan.checks import network as _network
from cpupp.plan.checks import pairs as _pairs
from cpupp.plan.checks import model as _model
from cpupp.plan.checks import environment as _environment
from cpupp.plan.checks import whole as _whole
from cpupp.plan.findings import CHECKS

__all__ = ["CHECKS"]

del _hosts, _cpu, _memory, _preload, _engine, _shm, _network, _pairs, _model, _environment, _whole
