"""The groups of a plan or a report: links and their transports, the proof of memory, and what stock vLLM would do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from cpupp.plan.backend import GroupPlan
from cpupp.plan.group_detail import GroupDetail, MemoryProof
from cpupp.plan.stock_choice import StockChoice, StockName
from cpupp.plan.versions import NAMES_SOURCES
from cpupp.render import Page

MAX_PAIRS = 8
"""Links of one transport and reason that a page lists one by one; --json lists all."""
MAX_REASONS = 4
"""Beyond this number, reasons that differ in the hosts' names alone are told once."""
MAX_NAMES = 4
"""Names of shared memory that a page lists one by one."""
_TWO_MACHINES = re.compile(r"^\S+ and \S+ (are|assumed to be) two machines")
_TRANSPORT = {"shm": "green", "gloo": "cyan", "mixed": "yellow"}
_OUTCOME = {"right": "green", "slow": "yellow", "fails": "bold red", "hangs": "bold red"}
_INDENT = "       "
_LABEL = 8


def add_groups(page: Page, groups: Sequence[GroupPlan], details: Sequence[GroupDetail]) -> None:
    """Add every group; groups that differ in ranks and hosts alone are shown once."""
    page.heading("Groups")
    if not groups:
        page.line("  none: one rank talks to nobody")
        return
    by_name = {detail.name: detail for detail in details}
    alike: dict[object, list[GroupPlan]] = {}
    for group in groups:
        alike.setdefault(_shape(group, by_name.get(group.name)), []).append(group)
    for same in alike.values():
        _group(page, same, by_name.get(same[0].name))


def _shape(group: GroupPlan, detail: GroupDetail | None) -> object:
    place = {rank: index for index, rank in enumerate(group.ranks)}
    links = tuple((place[link.src], place[link.dst], link.transport) for link in group.links)
    if detail is None:
        return group.kind, group.backend, links
    stock = tuple((choice.versions, choice.backend, choice.outcome, choice.agree) for choice in detail.stock)
    proofs = tuple((proof.boot_id, proof.device, proof.nonce) for proof in detail.proofs)
    return group.kind, group.backend, links, tuple(map(len, detail.ranks.values())), proofs, stock


def _group(page: Page, same: Sequence[GroupPlan], detail: GroupDetail | None) -> None:
    group = same[0]
    page.parts(
        (f"  {group.name}", "bold"),
        (f"  ranks {_ranks_text(group.ranks)}  backend ", ""),
        (group.backend, f"bold {_TRANSPORT[group.backend]}"),
        (f"  ({_others(same)})" if len(same) > 1 else "", "dim"),
    )
    for transport, reason, pairs in link_bundles(group):
        _entry(page, "link" if "," not in pairs else "links", f"{pairs}  {transport}: {reason}", transport)
    if detail is not None:
        _memory(page, detail)
        _stock(page, detail)


def _others(same: Sequence[GroupPlan]) -> str:
    names = [group.name for group in same[1:]]
    if len(names) > 2:
        return f"so are {len(names)} more groups: {names[0]} to {names[-1]}"
    return f"so {'is' if len(names) == 1 else 'are'} {' and '.join(names)}"


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) <= MAX_PAIRS:
        return ", ".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    return f"{ranks[0]} to {ranks[-1]}" + (f" in steps of {step}" if step > 1 else "")


def _entry(page: Page, label: str, text: str, *words: str) -> None:
    """One labelled paragraph; words of it that have a colour, in their order."""
    styles = {**_TRANSPORT, **_OUTCOME}
    hang = label.ljust(_LABEL)
    found = [(word, styles[word.rstrip(":,")]) for word in words if word]
    page.prose(text, indent=_INDENT, hang=hang, marks=[(label, "dim"), *found] if label else found)


def link_bundles(group: GroupPlan) -> list[tuple[str, str, str]]:
    """Links of equal transport and reason as one entry; `0<->1` are the two directions of a pair."""
    pairs: dict[tuple[str, str], dict[tuple[int, int], None]] = {}
    many = len({link.reason for link in group.links}) > MAX_REASONS
    for link in group.links:
        pair = (min(link.src, link.dst), max(link.src, link.dst))
        reason = _TWO_MACHINES.sub("two machines each", link.reason) if many else link.reason
        pairs.setdefault((link.transport, reason), {})[pair] = None
    found = []
    for (transport, reason), bundle in pairs.items():
        found.append((transport, reason, _some([f"{a}<->{b}" for a, b in bundle], MAX_PAIRS)))
    return found


def _some(words: Sequence[str], most: int) -> str:
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")


def _memory(page: Page, detail: GroupDetail) -> None:
    if not detail.proofs:
        (host,) = detail.ranks
        _entry(page, "memory", f"{host}: one host, one /dev/shm")
        return
    bundles: dict[str, list[str]] = {}
    for proof in detail.proofs:
        bundles.setdefault(_proof_text(proof), []).append("<->".join(proof.hosts))
    for number, (text, pairs) in enumerate(bundles.items()):
        _entry(page, "" if number else "memory", f"{_some(pairs, MAX_NAMES)}  {text}")


def _proof_text(proof: MemoryProof) -> str:
    verdict = "one memory" if proof.shared else "not shared"
    if proof.boot_id is None or proof.device is None or proof.nonce is None:
        return f"{verdict} (assumed, nobody asked)"
    boot = "same boot id" if proof.boot_id else "boot ids differ"
    device = "same /dev/shm device" if proof.device else "/dev/shm devices differ"
    nonce = "nonces read" if proof.nonce else "nonces not read"
    return f"{verdict}: {boot}, {device}, {nonce}"


def _stock(page: Page, detail: GroupDetail) -> None:
    """What stock vLLM would do: the installed version with its names, then the others, equal ones together."""
    _names(page, detail.stock[0])
    rows: list[tuple[str, StockChoice]] = []
    for choice in detail.stock:
        if rows and not rows[-1][1].here and _said(rows[-1][1]) == _said(choice):
            newest = rows[-1][0].partition(" to ")[2]
            rows[-1] = (f"{choice.versions.partition(' to ')[0]} to {newest}", choice)
        else:
            rows.append((f"{choice.here} (here)" if choice.here else choice.versions, choice))
    wide = max(len(version) for version, _ in rows)
    for number, (version, choice) in enumerate(rows):
        _stock_row(page, "" if number else "stock", f"{version:{wide}}", choice)
    if detail.cost:
        _entry(page, "cost", detail.cost)
    traps = [(choice.versions, choice.trap) for choice in detail.stock if choice.trap]
    if traps:
        oldest, newest = traps[-1][0].partition(" to ")[0], traps[0][0].partition(" to ")[2]
        _entry(page, "beware", f"stock {oldest} to {newest}: {traps[0][1]} ({', '.join(NAMES_SOURCES)})")


def _said(choice: StockChoice) -> tuple[object, ...]:
    return choice.agree, choice.backend, choice.outcome, choice.why


def _stock_row(page: Page, label: str, version: str, choice: StockChoice) -> None:
    names = "names agree " if choice.agree else "names differ"
    sources = f" ({', '.join(choice.sources)})" if choice.sources else ""
    why = f": {choice.why}{sources}" if choice.why else ""
    start = f"{label:{_LABEL}}{version}  {names}  {choice.backend:4}  "
    marks = [(label, "dim")] if label else []
    marks += [(choice.backend, _TRANSPORT[choice.backend])] if choice.backend else []
    page.prose(
        f"{choice.outcome}{why}", indent=_INDENT, hang=start, marks=[*marks, (choice.outcome, _OUTCOME[choice.outcome])]
    )


def _names(page: Page, choice: StockChoice) -> None:
    version = choice.here or choice.versions
    agree = "agree" if choice.agree else "differ"
    who = ", one vLLM node makes them" if len(choice.names) == 1 else ""
    _entry(page, "names", f"{agree}{who}; stock vLLM {version} names the shared memory:")
    shown = choice.names if len(choice.names) <= MAX_NAMES else (*choice.names[: MAX_NAMES - 1], choice.names[-1])
    left = len(choice.names) - len(shown)
    wide = max(len(_maker(name)) for name in shown)
    for number, name in enumerate(shown):
        if left and number == len(shown) - 1:
            page.parts((f"{_INDENT}{'':{_LABEL}}  and {left} more", "dim"))
        page.prose(_short(name.name), indent=f"{_INDENT}{'':{_LABEL}}", hang=f"{_maker(name):{wide}}  ", style="dim")


def _maker(name: StockName) -> str:
    what = "rank" if len(name.ranks) == 1 else "ranks"
    ranks = _some(list(map(str, name.ranks)), MAX_NAMES)
    return f"{name.host}, {what} {ranks}:"


def _short(name: str) -> str:
    """A name with most of a long list of ranks left out."""
    return re.sub(r"\[(\d+-\d+)(?:-\d+){6,}-(\d+)\]", r"[\1-...-\2]", name)


def groups_data(groups: Sequence[GroupPlan], details: Iterable[GroupDetail]) -> list[dict[str, Any]]:
    """Groups as JSON values: `links` has every ordered pair, `memory` the proof of each pair of hosts."""
    by_name = {detail.name: detail for detail in details}
    return [{**_group_data(group), **_detail_data(by_name.get(group.name))} for group in groups]


def _group_data(group: GroupPlan) -> dict[str, Any]:
    return {
        "name": group.name,
        "kind": group.kind,
        "ranks": list(group.ranks),
        "backend": group.backend,
        "reason": group.reason,
        "links": [
            {"ranks": [link.src, link.dst], "transport": link.transport, "reason": link.reason} for link in group.links
        ],
    }


def _detail_data(detail: GroupDetail | None) -> dict[str, Any]:
    if detail is None:
        return {}
    return {
        "memory": {
            "shared_by": [list(hosts) for hosts in detail.memories],
            "proofs": [asdict(proof) for proof in detail.proofs],
        },
        "stock": [asdict(choice) for choice in detail.stock],
    }
