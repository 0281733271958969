"""Checks of the machines: reach, clock, and what runs there already. Pure; times in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cpupp.plan.checks.wording import age, sudo, there
from cpupp.plan.findings import Case, Finding, check, error, info, ok, warning
from cpupp.plan.health import ProcessFacts

SLOW_S, UNSTEADY_S = 0.5, 1.0
MAX_PIDS = 6  # of a line that is pasted
MAX_SKEW_S = 2.0


@check(
    "HOST-REACH",
    "the host answers over SSH, and its python3 runs the agent",
    severities="error",
    why="everything on a host is started over this one connection",
    fix="`ssh HOST true` must work without a question; docs/ssh.md says what of your SSH configuration is honoured",
)
def host_reach(case: Case) -> Iterator[Finding]:
    """Hosts that could not be asked; all other checks are silent about them."""
    for host, (message, hint) in case.failures.items():
        cause = "cpupp starts everything on a host through this connection"
        yield error(host, "cannot be reached", evidence=message, cause=cause, fix=hint)
    for name, fact in case.facts.items():
        who = f"{fact.user}@{fact.hostname}, {fact.arch}, Linux {fact.kernel}, python3 {fact.python3}"
        yield ok(name, "reached", who)


@check(
    "SSH-LATENCY",
    "the host answers quickly and evenly over the SSH session",
    severities="warning",
    why="orders and signs of life travel this way; a session that stalls for 20 s counts as lost",
    fix="look at the load of the host and at the way to it (VPN, jump hosts, DNS of sshd)",
    needs=("timing",),
)
def ssh_latency(case: Case) -> Iterator[Finding]:
    """The median of a few small requests, and the distance between the quickest and the slowest."""
    for name, timing in case.timing.items():
        low, high = min(timing.round_trips), max(timing.round_trips)
        evidence = f"{len(timing.round_trips)} requests: {low * 1e3:.1f} to {high * 1e3:.1f} ms"
        if timing.median_s > SLOW_S or high - low > UNSTEADY_S:
            title = "answers slowly" if timing.median_s > SLOW_S else "answers unevenly"
            cause = "orders and signs of life travel this way; a session that stalls for 20 s counts as lost"
            fix = "look at the load there (`uptime`), and at the way to it"
            yield warning(name, title, evidence=evidence, cause=cause, fix=fix)
        else:
            yield ok(name, f"answers in {timing.median_s * 1e3:.1f} ms", evidence)


@check(
    "CLOCK",
    "the clocks of the hosts and of this machine agree",
    severities="warning",
    why="the lines of several hosts' logs cannot be put in order; certificates and tokens may not be valid there",
    fix="run a time service on every host: `sudo timedatectl set-ntp true`",
    needs=("timing",),
)
def clock(case: Case) -> Iterator[Finding]:
    """Each host's clock against this machine's, as exact as half a round trip."""
    for name, timing in case.timing.items():
        by = abs(timing.ahead_s)
        if by > MAX_SKEW_S:
            title = f"its clock is {by:.1f} s {'ahead of' if timing.ahead_s > 0 else 'behind'} this machine's"
            cause = "lines of several hosts' logs come in a wrong order, and certificates may not be valid"
            fix = there(name, f"{sudo(case.facts[name])}timedatectl set-ntp true")
            yield warning(name, title, evidence="asked over the session", cause=cause, fix=fix)
        else:
            yield ok(name, f"clock within {max(by, min(timing.round_trips)):.2f} s")


@check(
    "PROCESSES",
    "no vLLM and no cpupp of somebody or of some earlier time runs there",
    severities="warning info",
    why="they take cores and memory from the ranks, and may hold the ports",
    fix="`cpupp stop RUN` for a run of cpupp; others are their owner's to end",
    needs=("health",),
)
def processes(case: Case) -> Iterator[Finding]:
    """What doctor sees it tells; it ends nothing."""
    for name, health in case.health.items():
        strange = [p for p in health.processes if not p.run and (p.kind == "vllm" or p.orphan)]
        if strange:
            oldest = sorted(strange, key=lambda p: -p.age_s)
            rest = f" and {len(oldest) - 4} more" if len(oldest) > 4 else ""
            cause = "no run of this user claims them; they take cores and memory from the ranks"
            evidence = ", ".join(map(_shown, oldest[:4])) + rest
            fix = "; ".join(_rid(name, case.facts[name].user, oldest))
            one = "1 process" if len(strange) == 1 else f"{len(strange)} processes"
            title = f"{one} of {'vLLM' if any(p.kind == 'vllm' for p in strange) else 'cpupp'} already there"
            yield warning(name, title, evidence=evidence, cause=cause, fix=fix)
        runs = dict.fromkeys(p.run for p in health.processes if p.run)
        for run in runs:
            several = [p for p in health.processes if p.run == run]
            oldest_s = max(p.age_s for p in several)
            yield info(
                name,
                f"run {run} lives there",
                f"{len(several)} processes, {age(oldest_s)} old",
                fix=f"cpupp stop {run}",
            )
        if not strange and not runs:
            yield ok(name, "no other vLLM or cpupp runs there")


def _shown(process: ProcessFacts) -> str:
    return f"pid {process.pid} ({process.name}) of {process.owner}, {age(process.age_s)} old"


def _rid(host: str, user: str, oldest: Sequence[ProcessFacts]) -> Iterator[str]:
    """What to do, in order: nothing is killed that a run still owns, or that is somebody else's."""
    mine = [process for process in oldest if process.owner == user][:MAX_PIDS]
    others = [process for process in oldest if process.owner != user][:MAX_PIDS]
    if mine:
        pids = [str(process.pid) for process in mine]
        yield "first, for runs of yours: cpupp stop --all"
        yield f"then on {host}: ps -o pid,user,etime,args -p {','.join(pids)}"
        whose = ", ".join(f"{process.pid}: {age(process.age_s)} old" for process in mine)
        yield f"what is left of it ({user}'s; {whose}) and nobody needs: kill {' '.join(pids)}"
    if others:
        yield "ask " + ", ".join(f"{p.owner} about pid {p.pid} ({age(p.age_s)} old)" for p in others)
