"""Requests from the launcher: one JSON line each, answered by a reply with the same number. Standard library only."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Callable  # noqa: UP035  # Python 3.8 cannot subscript collections.abc.Callable

from .agent_mask import MASK

if TYPE_CHECKING:
    from .agent_outbox import Outbox

Operation = Callable[[dict], Any]  # type: ignore[type-arg]  # Python 3.8 cannot subscript dict when it runs this
QUICK = ("ping", "configure")


class RequestError(Exception):
    """A request that cannot be done: a stable code and the host's own words."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Requests:
    """Finds the operation of each request and sends its reply."""

    def __init__(self, outbox: Outbox, operations: dict[str, Operation]) -> None:
        self.outbox = outbox
        self.operations = operations

    def dispatch(self, line: bytes) -> None:
        """Do what a line asks for; its reply follows, perhaps later."""
        try:
            request = json.loads(line)
            operation = self.operations.get(request["op"])
            number = request["id"]
        except (ValueError, KeyError, TypeError):
            self.outbox.put({"event": "ignored", "line": line[:200].decode("ascii", "replace")})
            return
        if operation is None:
            known = ", ".join(self.operations)
            message = f"unknown operation {request['op']!r}; known: {known}"
            self.outbox.put(
                {"id": number, "ok": False, "error": {"code": "AGENT-REQUEST", "message": MASK.text(message)}}
            )
        elif request["op"] in QUICK:
            self._answer(number, operation, request)
        else:
            # A thread each, so that nothing slow keeps a heartbeat or a stop order waiting.
            threading.Thread(target=self._answer, args=(number, operation, request), daemon=True).start()

    def _answer(self, number: int, operation: Operation, request: dict[str, Any]) -> None:
        try:
            reply = {"id": number, "ok": True, "data": operation(request)}
        except RequestError as error:
            reply = {"id": number, "ok": False, "error": {"code": error.code, "message": MASK.text(str(error))}}
        except (KeyError, TypeError, ValueError) as error:
            message = f"{request['op']}: {type(error).__name__}: {error}"
            reply = {"id": number, "ok": False, "error": {"code": "AGENT-REQUEST", "message": MASK.text(message)}}
        except Exception as error:
            import traceback

            trace = traceback.format_exc(limit=-3)
            message = f"{request['op']}: {type(error).__name__}: {error}\n{trace}"
            reply = {"id": number, "ok": False, "error": {"code": "AGENT-FAILED", "message": MASK.text(message)}}
        self.outbox.put(reply)
