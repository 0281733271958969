"""The communicator of one TP or PP group: a transport for every link, proved, agreed by all ranks, and announced.

Pure torch: vLLM is met in `vllm_adapter` alone. Positions count inside the group, ranks are global.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpupp.errors import CpuppError, ExitCode
from cpupp.plan.handoff import GroupReport, RankHandoff
from cpupp.rank.board import Board
from cpupp.rank.collectives import Collectives
from cpupp.rank.gloo_link import GlooLink
from cpupp.rank.gloo_loop import calm_gloo_loops
from cpupp.rank.identity import SHM_DIR, Exchange, Obstacle, exchange_over, prove
from cpupp.rank.outcome import decide, hindered
from cpupp.rank.ring import TIMEOUT_SECONDS, Ring
from cpupp.rank.segments import Segment
from cpupp.rank.shm_link import ShmLink
from cpupp.rank.slices import Slicer, agree
from cpupp.rank.step_clock import talks
from cpupp.rank.stream_link import StreamLink
from cpupp.rank.streams import connect, neighbours
from cpupp.rank.wire import Wire

logger = logging.getLogger("vllm.cpupp")  # below vLLM's own logger, which prints it
NEIGHBOUR_RING_BYTES = 8 << 20
OTHER_RING_BYTES = 1 << 20
Link = ShmLink | GlooLink | StreamLink


class Communicator:
    """Point to point and collectives of the group `name` (`pp:0`, `tp:0`), as this rank sees it.

    A PP group talks point to point: every pair that shares memory gets two rings. A TP group talks in collectives:
    the ranks that share memory get a board. Everything else goes over torch.distributed, but for the tensor dicts of
    neighbours in a PP group, which get a connection of their own.

    address: the IP address where the other ranks reach this one; without it torch.distributed carries everything.
    tensor_group: of a PP group, this rank's TP communicator if there is one: large tensors then cross hosts in slices.
    per_link: false gives the whole group one transport, as vLLM does: shared memory for all or for none.

    Raises CpuppError on all ranks when the handoff demands shm and some link cannot have it.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        handoff: RankHandoff,
        *,
        per_link: bool = True,
        tensor_group: Communicator | None = None,
        address: str = "",
        shm_dir: Path = SHM_DIR,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self.name, self.kind = name, name[:2]
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.position = self.ranks.index(dist.get_rank())
        self._timeout = timeout
        self._shm_dir, self._per_link = shm_dir, per_link
        self._rings: dict[tuple[int, int], Ring] = {}
        self._segments: list[Segment] = []
        self._links: dict[int, Link] = {}
        self._remote: list[GlooLink | StreamLink] = []
        self.board: Board | None = None
        calm_gloo_loops()
        exchange = exchange_over(group)
        prefix = f"cpupp-{_short(handoff.run)}-{handoff.attempt}"
        self.verdict = prove(
            exchange,
            self.position,
            prefix=prefix,
            obstacle=_known_obstacle(handoff),
            demanded=handoff.backend == "shm",
            threads=torch.get_num_threads(),
            shm_dir=shm_dir,
        )
        failures = self._settle(exchange, f"{prefix}-{name.replace(':', '')}-{self.verdict.tag}")
        self.outcome = decide(self.ranks, self.verdict, failures, per_link=per_link)
        if self.kind == "pp" and per_link:
            self._connect_streams(exchange, address)
        self._slicer = self._agree_on_slices(exchange, tensor_group) if tensor_group and per_link else None
        names = [f"rank {rank}" for rank in self.ranks]
        self._collectives = Collectives(self._boarded(), self.position, self.board, Wire(group, self.position, names))
        if self.outcome.backend != "shm" and any(i.demanded for i in self.verdict.identities):
            raise CpuppError(
                "SHM-DEMANDED",
                f"group {name} of ranks {self.ranks}: backend shm is demanded, but {self.outcome.reason}",
                hint="set the backend to auto, or place these ranks on one host",
                exit_code=ExitCode.RANK_FAILED,
            )

    # Settling: which subset shares memory, and its segments. Each step ends in an exchange, whatever happened in it.

    def _settle(self, exchange: Exchange, stem: str) -> list[Obstacle]:
        """Make and map the segments if nothing hinders; return what each rank has met, the same list on all."""
        failures = [i.obstacle for i in self.verdict.identities]
        if hindered(self.verdict, failures, per_link=self._per_link):
            return failures
        subset = self.verdict.subset_of(self.position)
        for step in (self._create, self._attach):
            failures = [Obstacle(row[0]) for row in exchange(bytes([self._try(step, subset, stem)]))]
            if any(failures):
                break
        for segment in self._segments:
            if segment.path.name.startswith(stem):
                segment.unlink()
        if any(failures):
            self._release()
        else:
            self._connect(subset)
        return failures

    def _try(self, step: Any, subset: tuple[int, ...], stem: str) -> Obstacle:
        try:
            step(subset, stem)
        except OSError as error:
            logger.warning("cpupp: group %s: no shared memory: %s", self.name, error)
            found = Obstacle.of(error)
            return Obstacle.ATTACH if step == self._attach else found
        except Exception:  # whatever it is: the peers are in the exchange and must hear of it
            logger.exception("cpupp: group %s: no shared memory", self.name)
            return Obstacle.INTERNAL
        return Obstacle.NONE

    def _create(self, subset: tuple[int, ...], stem: str) -> None:
        if len(subset) == 1:
            return
        if self.kind == "tp":
            self._own(Board.create(self._shm_dir / f"{stem}-{self.position}"))
            return
        for other in subset:
            if other != self.position:
                pair = self.position, other
                path = self._shm_dir / f"{stem}-{self.position}.{other}"
                self._rings[pair] = Ring.create(path, self._link_name(*pair), self._capacity(*pair))
                self._own(self._rings[pair].segment)

    def _attach(self, subset: tuple[int, ...], stem: str) -> None:
        for other in subset:
            if other == self.position:
                continue
            if self.kind == "tp":
                self._own(Board.attach(self._shm_dir / f"{stem}-{other}"))
                continue
            pair = other, self.position
            path = self._shm_dir / f"{stem}-{other}.{self.position}"
            self._rings[pair] = Ring.attach(path, self._link_name(*pair), self._capacity(*pair))
            self._own(self._rings[pair].segment)

    def _own(self, segment: Segment) -> None:
        self._segments.append(segment)

    def _connect(self, subset: tuple[int, ...]) -> None:
        if len(subset) == 1:
            return
        if self.kind == "tp":
            mine, *others = self._segments
            others.insert(subset.index(self.position), mine)
            names = [f"rank {self.ranks[i]}" for i in subset]
            self.board = Board(others, subset.index(self.position), names, self._timeout)
            return
        for other in subset:
            if other != self.position:
                out, into = self._rings[self.position, other], self._rings[other, self.position]
                self._links[other] = ShmLink(out, into, timeout=self._timeout)

    def _connect_streams(self, exchange: Exchange, address: str) -> None:
        pairs = [pair for pair in neighbours(len(self.ranks)) if self.transport(*pair) == "gloo"]
        if not pairs:
            return
        made = connect(exchange, self.position, pairs, address)
        for other in sorted({i for pair in pairs if self.position in pair for i in pair} - {self.position, *made}):
            # Slower by half a millisecond a hop, and otherwise nobody would know.
            logger.warning("cpupp: group %s: no connection to rank %d: hops go by gloo", self.name, self.ranks[other])
        for other, connection in made.items():
            link = StreamLink(connection, self.ranks[self.position], self.ranks[other], self.group, other)
            self._links[other] = link
            self._remote.append(link)

    def _capacity(self, source: int, target: int) -> int:
        size = len(self.ranks)
        return NEIGHBOUR_RING_BYTES if (target - source) % size == 1 else OTHER_RING_BYTES

    def _link_name(self, source: int, target: int) -> str:
        return f"rank {self.ranks[source]} -> rank {self.ranks[target]}"

    def _agree_on_slices(self, exchange: Exchange, group: Communicator) -> Slicer:
        size, shares = len(group.ranks), group.outcome.backend == "shm"
        transports = [self.transport(self.position, p) for p in range(len(self.ranks))]
        sliced = agree(exchange, exchange_over(group.group), transports, self.position, shares, size, group.position)
        return Slicer(group, size, group.position, sliced)

    # The outcome

    def transport(self, source: int, target: int) -> str:
        """`shm` or `gloo` of the link between two positions."""
        return self.outcome.transport(source, target)

    def _boarded(self) -> tuple[tuple[int, ...], ...]:
        """The subsets that have a board. A PP group has none: it talks point to point."""
        return self.outcome.subsets if self.kind == "tp" else tuple((i,) for i in range(len(self.ranks)))

    def summary(self) -> str:
        """Backend and reason in one line."""
        return f"{self.outcome.backend}, {self.outcome.reason}"

    def report(self) -> GroupReport:
        """What this rank announces to the launcher."""
        size = range(len(self.ranks))
        return GroupReport(
            rank=self.ranks[self.position],
            pid=os.getpid(),
            kind=self.kind,
            ranks=list(self.ranks),
            backend=self.outcome.backend,
            links=[[self.ranks[a], self.ranks[b], self.transport(a, b)] for a in size for b in size if a != b],
            reason=self.outcome.reason,
        )

    # Point to point

    @talks
    def send_tensor_dict(self, items: Mapping[str, Any], target: int) -> None:
        """Send to the position `target`; returns before the receiver has it. Raises FrameError, PeerLostError."""
        if self._slicer is not None:
            items = self._slicer.cut(items, target)
        self._link(target).send(items, self._drain)
        for link in self._remote:
            link.expect()  # while the frame is on its way, this costs nobody time

    @talks
    def recv_tensor_dict(self, source: int) -> dict[str, Any]:
        """Receive the next dict from the position `source`. Raises FrameError, PeerLostError."""
        items = self._link(source).recv()
        return items if self._slicer is None else self._slicer.join(items)

    def _link(self, other: int) -> Link:
        link = self._links.get(other)
        if link is None:
            me, peer = self.ranks[self.position], self.ranks[other]
            link = self._links[other] = GlooLink(self.group, me, peer)
            self._remote.append(link)
        return link

    def _drain(self) -> bool:
        drained = [link.drain() for link in self._links.values() if isinstance(link, ShmLink)]
        return any(drained)

    # Collectives

    @talks
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the group, in place."""
        if tensor.is_contiguous():
            self._collectives.all_reduce(tensor)
            return
        dense = tensor.contiguous()
        self._collectives.all_reduce(dense)
        tensor.copy_(dense)

    @talks
    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenate the equally shaped tensors of all ranks along `dim`; equal to torch.cat of them."""
        out, parts = self._parts(tensor, dim)
        self._collectives.all_gather(tensor.contiguous(), parts)
        return out

    @talks
    def gather(self, tensor: torch.Tensor, target: int, dim: int) -> torch.Tensor | None:
        """As `all_gather`, on the position `target` alone; None elsewhere."""
        if self.position != target:
            self._collectives.gather(tensor.contiguous(), target, None)
            return None
        out, parts = self._parts(tensor, dim)
        self._collectives.gather(tensor.contiguous(), target, parts)
        return out

    def _parts(self, tensor: torch.Tensor, dim: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Room for the concatenation, and the view of it that belongs to each rank (sglang #8041)."""
        shape = list(tensor.shape)
        size = shape[dim]
        shape[dim] *= len(self.ranks)
        out = tensor.new_empty(shape)
        return out, [out.narrow(dim, i * size, size) for i in range(len(self.ranks))]

    def _release(self) -> None:
        for segment in self._segments:
            segment.unlink()
            segment.close()
        self._segments.clear()
        self._rings.clear()

    def close(self) -> None:
        """Let what was sent leave, then unmap the segments."""
        for link in self._links.values():
            with suppress(CpuppError):
                link.close()
        if self.board is not None:
            self.board.close()
        self._links.clear()
        self._segments.clear()
        self.board = None


def _known_obstacle(handoff: RankHandoff) -> Obstacle:
    """Why this rank may not use shared memory, as far as the launcher knew it beforehand."""
    if handoff.backend == "gloo":
        return Obstacle.FORCED
    return Obstacle.NO_ROOM if handoff.no_shm else Obstacle.NONE


def _short(run: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", run)[:40]
