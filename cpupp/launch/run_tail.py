"""`cpupp logs`: the lines of a run's vLLM nodes as one stream, from the record and from the hosts."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.run_find import Target
from cpupp.launch.run_hosts import answer_of
from cpupp.launch.run_logs import LogStream, attempt_folder, follow, log_streams, nodes_recorded
from cpupp.launch.run_stop import is_over
from cpupp.launch.runs import run_in
from cpupp.launch.session import run_all
from cpupp.plan.loglines import merge
from cpupp.plan.runs import Run
from cpupp.plan.status import RankPlace, newest_attempt, own_site, places_reported

BATCH = 256
PATIENCE_S = 60.0
"""How long a host that is lost while its log is followed is asked again."""

Lines = list[tuple[int, str]]
"""Lines with the vLLM node that wrote each."""


class LogView:
    """What of a run's logs is wanted. rank: of that rank's vLLM node alone; attempt: None for the last, and on."""

    def __init__(
        self,
        target: Target,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        wanted: re.Pattern[str] | None = None,
        tail: int | None = None,
    ) -> None:
        self.target = target
        self._attempt = attempt
        self._wanted = wanted
        self._tail = tail
        self._lost: dict[str, CpuppError] = {}
        run = target.run
        # An attached launcher of this machine has all output in the record; everybody else asks the hosts.
        self._ask_hosts = not is_over(run) and (run.detached or not run.folder)
        self.places = target.recorded().places or self._places_on_hosts()
        self.nodes = self._chosen(rank)
        if attempt is not None and not 1 <= attempt <= run.attempt:
            raise _usage("LOGS-ATTEMPT", f"run {run.run} has no attempt {attempt}", f"it has 1 to {run.attempt}")

    def ranks(self, node: int) -> tuple[int, ...]:
        """The ranks of a vLLM node; none where they are not known."""
        return tuple(place.rank for place in self.places if place.node_rank == node and place.rank >= 0)

    def errors(self) -> list[CpuppError]:
        """The hosts whose part is missing."""
        return list(self._lost.values())

    def lines(self, *, follow: bool) -> Iterator[Lines]:
        """The lines there are, in order; with follow, also those to come, until the run has ended."""
        attempt = self._attempt or self._run().attempt
        while True:
            yield from self._of_attempt(attempt, follow)
            if not follow or self._attempt is not None or self._run().attempt <= attempt:
                return
            attempt += 1

    def _of_attempt(self, attempt: int, follow_on: bool) -> Iterator[Lines]:
        streams = log_streams(
            self.target.run,
            self.nodes,
            self.target.hosts,
            attempt=attempt,
            ask_hosts=self._ask_hosts and attempt == self.target.run.attempt,
            patience_s=PATIENCE_S if follow_on else 0.0,
        )
        try:
            yield from self._history(streams, finish=not follow_on)
            if follow_on:
                for index, lines in follow(streams, lambda: self._over(attempt)):
                    yield [(streams[index].node, line) for line in lines if self._is_wanted(line)]
        finally:
            for stream in streams:
                stream.close()
                if stream.error is not None and not is_over(self._run()):
                    self._lost[stream.host] = stream.error

    def _history(self, streams: list[LogStream], *, finish: bool) -> Iterator[Lines]:
        def of(stream: LogStream) -> Iterable[str]:
            lines = (line for line in _whole(stream, finish) if self._is_wanted(line))
            return lines if self._tail is None else deque(lines, maxlen=self._tail)

        merged = merge([of(stream) for stream in streams])
        while batch := list(islice(merged, BATCH)):
            yield [(streams[index].node, line) for index, line in batch]

    def _is_wanted(self, line: str) -> bool:
        return self._wanted is None or self._wanted.search(line) is not None

    def _over(self, attempt: int) -> bool:
        """Whether nobody will write to the logs of this attempt any more, as far as the record tells."""
        run = self._run()
        return self._ask_hosts or run.state.ended or run.attempt > attempt

    def _run(self) -> Run:
        run = self.target.run
        return (run_in(Path(run.folder)) if run.folder else None) or run

    def _chosen(self, rank: int | None) -> dict[int, str]:
        nodes = {place.node_rank: place.host for place in self.places}
        run = self.target.run
        if not nodes and run.folder:
            nodes = nodes_recorded(attempt_folder(Path(run.folder), self._attempt or run.attempt))
        if rank is None:
            return nodes
        node = next((place.node_rank for place in self.places if place.rank == rank), None)
        if node is None:
            ranks = ", ".join(str(place.rank) for place in self.places) or "none that is known"
            raise _usage("LOGS-RANK", f"run {run.run} has no rank {rank}", f"its ranks: {ranks}")
        return {node: nodes[node]}

    def _places_on_hosts(self) -> tuple[RankPlace, ...]:
        if not self._ask_hosts:
            return ()
        run, hosts = self.target.run, self.target.hosts
        answers, _ = run_all({name: partial(answer_of, hosts, name, run.run) for name in hosts.names})
        attempt = newest_attempt(run, answers)
        sites = {n: site for n, answer in answers.items() if (site := own_site(answer, run.run, attempt)) is not None}
        bare = [
            RankPlace(rank=-1, host=site.host, node_rank=node)
            for site in sites.values()
            for node, report in site.nodes.items()
            if not report.ranks
        ]
        return (*places_reported(sites), *bare)


def _whole(stream: LogStream, finish: bool) -> Iterator[str]:
    with suppress(OSError):
        yield from stream.history()
    if finish:
        yield from stream.rest()


def _usage(code: str, message: str, hint: str) -> CpuppError:
    return CpuppError(code, message, hint=hint, exit_code=ExitCode.USAGE)
