"""Check the Host header and the token of every request to the server, and count the requests for Prometheus.

Left out: what is behind it (`bertkit.inference.server`).
"""

import asyncio
import hmac
import ipaddress
import re
import socket
import time
from contextlib import suppress

import msgspec
from fastapi import Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_REQUESTS = 2048  # being read or answered; each may hold LONGEST_BODY of the server
MOST_DRAINED = 16 << 20  # bytes read of a request that is refused
BODY_DUE = 8.0  # seconds from the end of a request's headers to that of its body
JSON = "application/json"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:@/\s]+))(?::\d{1,5})?")  # of the header, with or without a port
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


class Refusal(Exception):
    """A request that is not answered with results.

    Args:
        status: The HTTP status.
        message: One line: what was got, what was expected, the remedy.
    """

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def respond(self) -> Response:
        """Return the response: an object with the key `error`."""
        return Response(msgspec.json.encode({"error": self.message}), self.status, self.headers, JSON)


class Metrics:
    """Counts for Prometheus; the only label is the HTTP status."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("bertkit_requests", "Requests to /predict.", ["status"], registry=registry)
        self.seconds = Histogram(
            "bertkit_request_seconds", "Seconds from request to answer.", buckets=SECONDS, registry=registry
        )
        self.inputs = Counter("bertkit_inputs", "Inputs given to the model.", registry=registry)
        self.tokens = Counter("bertkit_tokens", "Tokens given to the model.", registry=registry)
        self.batch = Histogram("bertkit_batch_inputs", "Inputs of a batch.", buckets=SIZES, registry=registry)
        self.waiting = Gauge("bertkit_waiting_inputs", "Inputs that wait for the model.", registry=registry)

    def note_batch(self, inputs: int, tokens: int) -> None:
        """Count a batch."""
        self.inputs.inc(inputs)
        self.tokens.inc(tokens)
        self.batch.observe(inputs)


async def drain(receive: Receive) -> None:
    """Read the rest of a request that is refused, up to a limit, so that its sender gets to the answer."""
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(BODY_DUE):
            while size <= MOST_DRAINED:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body"):
                    return


class Gate:
    """Check the Host header and the token of every request, and count the requests to /predict.

    A page of another site may point its own name at this address (DNS rebinding); its requests then carry that name.

    Args:
        hosts: Allowed hosts; None allows IP addresses and the name of this machine, for an address that means all.
        token: Required as `Authorization: Bearer`, except by /health; the page at / asks for it.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None, token: str | None, metrics: Metrics) -> None:
        self.app, self.hosts, self.metrics = app, hosts, metrics
        self.names = frozenset({*LOOPBACK, socket.gethostname().lower(), socket.getfqdn().lower()})
        self.token = None if token is None else token.encode()
        self.active = 0
        self.is_leaving = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def send_safely(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *SAFE_HEADERS]
                if self.is_leaving:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        self.active += 1
        try:
            await self.check(scope)
            await self.app(scope, receive, send_safely)
        except Refusal as refusal:
            await drain(receive)
            await refusal.respond()(scope, receive, send_safely)
        finally:
            self.active -= 1
            if scope["path"] == "/predict":
                self.metrics.requests.labels(status).inc()
                self.metrics.seconds.observe(time.perf_counter() - began)

    async def check(self, scope: Scope) -> None:
        """Raise a Refusal of a request with a wrong Host header, without the token, or beyond MOST_REQUESTS."""
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1:
            raise Refusal(400, f"the request has {len(hosts)} Host headers, expected one; send it as HTTP/1.1")
        if not self.is_allowed(hosts[0].decode("latin-1")):
            known = ", ".join(sorted(self.hosts)) if self.hosts else "an IP address or this machine's name"
            raise Refusal(421, f"the Host header names another host; expected {known}: use one of these in the address")
        if self.active > MOST_REQUESTS:
            raise Refusal(503, "too many requests at a time; try again in a second", Retry_After="1")
        scope["is_known"] = self.knows_token(scope)
        if not scope["is_known"] and scope["path"] not in ("/", "/health"):
            raise Refusal(
                401, "the token is missing or wrong; send it as Authorization: Bearer TOKEN", WWW_Authenticate="Bearer"
            )

    def is_allowed(self, header: str) -> bool:
        """Return whether the Host header names this server."""
        if not (found := HOST.fullmatch(header)):
            return False
        host = (found[1] or found[2]).lower().rstrip(".")
        if self.hosts is not None:
            return host in self.hosts
        return is_address(host) or host in self.names

    def knows_token(self, scope: Scope) -> bool:
        """Return whether the request has the token, or none is required; the comparison takes constant time."""
        if self.token is None:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return hmac.compare_digest(token.strip(), self.token) and kind.lower() == b"bearer"


def is_address(host: str) -> bool:
    """Return whether a host is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
