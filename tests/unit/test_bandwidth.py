"""The probe of memory bandwidth, on this machine."""

from __future__ import annotations

import os
from typing import Any

from cpupp.plan.facts import BandwidthFacts, decode
from cpupp.rank import agent_bandwidth, agent_probe
from cpupp.rank.agent_children import Children

GIB = 1 << 30


def measured_facts(cpus: list[dict[str, int]]) -> list[dict[str, Any]]:
    """What is measured; a machine that is too busy just now for the probe's few seconds is asked again."""
    return next(filter(None, (agent_bandwidth.bandwidth_facts(cpus, 4 * GIB, Children()) for _ in range(4))), [])


def test_every_core_reads_at_once() -> None:
    found = [decode(BandwidthFacts, facts) for facts in measured_facts(agent_probe.cpu_facts())]
    measured = {cpu for facts in found for cpu in facts.cpus}
    assert measured
    assert measured <= os.sched_getaffinity(0)
    for facts in found:
        assert 0 < facts.cpu_share <= 1
        of_one_core = facts.bytes_per_s / facts.cpu_share / len(facts.cpus)
        assert 0.5e9 < of_one_core < 200e9  # no cache, and no interpreter loop


def test_hardware_threads_of_a_core_are_measured_once() -> None:
    (cpu, *_) = sorted(os.sched_getaffinity(0))
    twins = [{"cpu": cpu, "core": 0, "socket": 0, "numa": 0}, {"cpu": 4095, "core": 0, "socket": 0, "numa": 0}]
    (found,) = measured_facts(twins)
    assert found["cpus"] == [cpu]


def test_too_little_memory_is_not_touched() -> None:
    assert agent_bandwidth.bandwidth_facts(agent_probe.cpu_facts(), 16 << 20, Children()) == []


def test_a_cpu_that_may_not_be_used_leaves_no_half_sum() -> None:
    gone = [{"cpu": 4095, "core": 0, "socket": 0, "numa": 0}]
    assert agent_bandwidth.bandwidth_facts(gone, 4 * GIB, Children()) == []
