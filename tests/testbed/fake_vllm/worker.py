"""One rank: joins the others, announces its groups as cpupp's communicator does, and takes part in every step."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from .gang import Count, Line, Master, Member
from .script import Script, forever

if TYPE_CHECKING:
    from cpupp.plan.handoff import RankHandoff


class Place:
    """Where a rank stands: its numbers, and where rank 0 listens."""

    def __init__(self, arguments: dict[str, Any], local_rank: int) -> None:
        self.tensor = int(arguments.get("tensor_parallel_size", 1))
        self.pipeline = int(arguments.get("pipeline_parallel_size", 1))
        self.world = self.tensor * self.pipeline
        self.num_nodes = int(arguments.get("nnodes", 1))
        self.num_local = self.world // self.num_nodes
        self.node_rank = int(arguments.get("node_rank", 0))
        self.local_rank = local_rank
        self.rank = self.node_rank * self.num_local + local_rank
        self.master = (str(arguments.get("master_addr", "127.0.0.1")), int(arguments.get("master_port", 0)))

    def groups(self) -> list[tuple[str, list[int]]]:
        """Kind and ranks of every group of more than one rank that this rank is in."""
        stage, seat = divmod(self.rank, self.tensor)
        tp = [stage * self.tensor + index for index in range(self.tensor)]
        pp = [index * self.tensor + seat for index in range(self.pipeline)]
        return [(kind, ranks) for kind, ranks in (("tp", tp), ("pp", pp)) if len(ranks) > 1]


def run(script: Script, place: Place, handoff: RankHandoff | None, steps: socket.socket | None) -> None:
    """Be a rank until told to end. steps: on rank 0 alone, where the engine core asks for steps."""
    stage, seat = divmod(place.rank, place.tensor)
    script.who = f"Worker_PP{stage}" + (f"_TP{seat}" if place.tensor > 1 else "")
    script.leave_grandchild()
    script.reach("join")
    where = f"tcp://{place.master[0]}:{place.master[1]}"
    script.say(
        f"world_size={place.world} rank={place.rank} local_rank={place.local_rank} "
        f"distributed_init_method={where} backend=gloo"
    )
    member: Master | Member
    if place.rank == 0:
        member = Master(listen(place.master), place.world, script.say)
    else:
        member = Member(place.master, place.rank)
    table = member.join()
    count: Count = nullcontext
    if handoff is not None and handoff.mode != "stock":
        from . import ours

        store = place.master if place.local_rank == 0 and place.num_nodes > 1 else None
        ours.join(handoff, place.rank, place.groups(), table, store)
        count = ours.counting
    script.talk()
    script.say("Starting to load model fake...")
    script.reach("load")
    script.fill_shm()
    script.say("Loading weights took 0.01 seconds")
    script.reach("warm_up")
    script.say("Warming up model for the compilation...")
    script.say("Warming up done.")
    if isinstance(member, Master):
        assert steps is not None
        serve_steps(script, member, Line(steps), count)
    script.reach("serve")
    try:
        assert isinstance(member, Member)
        member.serve(count)
    except OSError as error:
        script.say(f"[rank{place.rank}] pair of rank 0: {error}", "ERROR")
        forever()  # as stock vLLM: followers print, and stay


def serve_steps(script: Script, master: Master, steps: Line, count: Count) -> None:
    """Take the engine core's steps, one after the other."""
    steps.send({"ready": 1})
    try:
        while True:
            steps.receive()
            with count():
                done = master.step()
            if done:
                steps.send({"done": 1})
            elif script.on_lost == "hang":
                forever()
            else:
                script.trace("WorkerProc hit an exception.", "RuntimeError: Connection closed by peer")
                steps.send({"failed": 1})
    except OSError:
        forever()  # the engine core is gone: the worker is an orphan that lives on, and keeps the master port


def listen(address: tuple[str, int]) -> socket.socket:
    """Listen on the master port, as rank 0 does."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("0.0.0.0", address[1]))
    listener.listen(256)
    return listener
