"""HTTP requests from this host, such as the launcher's questions to the API of the head. Standard library only."""

from __future__ import annotations

from typing import Any

from .agent_request import RequestError

LONGEST_BODY = 16 << 20


def http(request: dict[str, Any]) -> dict[str, Any]:
    """Make one HTTP request from this host, never through a proxy; any status is an answer."""
    import urllib.error
    import urllib.request  # with ssl and email: only the head is asked, and not before its API is there

    data = (request.get("body") or "").encode("utf-8", "surrogateescape") or None
    query = urllib.request.Request(
        request["url"], data=data, headers=request.get("headers") or {}, method=request.get("method", "GET")
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        try:
            answer = opener.open(query, timeout=float(request.get("http_timeout", 10)))
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            text = answer.read(LONGEST_BODY).decode("utf-8", "surrogateescape")
            return {"status": answer.getcode(), "headers": dict(answer.headers.items()), "body": text}
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise RequestError("HTTP-FAILED", f"{request['url']}: {reason}") from None
    except Exception as error:  # http.client has errors of its own, such as RemoteDisconnected's parents
        raise RequestError("HTTP-FAILED", f"{request['url']}: {type(error).__name__}: {error}") from None
