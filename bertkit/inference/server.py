"""Serve a trained model over HTTP: predictions as `bertkit predict` makes them, metrics, and a page to try the model.

Every request passes `Gate`, which checks the Host header and the token; everything after it is a FastAPI application.
Requests hold inputs only: nothing in them is used as a path, a name or code, and no text of them is logged or counted.

Left out: TLS, several models and several processes, which are the work of a reverse proxy.
"""

import asyncio
import hmac
import ipaddress
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import bertkit
from bertkit.data.formats.inputs import Input, count_characters, parse_line
from bertkit.data.sequences import TOKENS_A_BATCH
from bertkit.errors import UsageError, make_printable
from bertkit.inference.batching import Batcher, Busy
from bertkit.inference.page import render_page
from bertkit.inference.predictor import Predictor
from bertkit.system.progress import Report, ignore
from bertkit.system.signals import Interrupted, note_signals
from bertkit.tasks.schema import STRING, Schema, make_array, make_object
from bertkit.tasks.task import Result

LONGEST_BODY = 1 << 20  # bytes of a request
MOST_DRAINED = 16 << 20  # bytes read from a request that is too large, so that its sender gets to the answer
MOST_INPUTS = 256  # of a request
LONGEST_INPUT = 20_000  # characters; a context counts once per ending
MOST_WAITING = 1024  # inputs
MOST_REQUESTS = 2048  # being read or answered; each may hold LONGEST_BODY
DEADLINE = 30.0  # seconds from the first byte to the answer
TOKENS_AT_ONCE = {"cpu": 1024}  # a batch; other devices take TOKENS_A_BATCH
LEAVING = 0.5  # seconds in which answers tell clients to close their connections, before the server does
BACKLOG = 2048  # connections that wait to be accepted
JSON = "application/json"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:@/\s]+))(?::\d{1,5})?")  # of the header, with or without a port
TOKEN = re.compile(r"[!-~]+")  # printable ASCII
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


# --- Requests ---------------------------------------------------------------------------------------------------------


class Gate:
    """Check the Host header and the token of every request, and count the requests to /predict.

    A page of another site may point its own name at this address (DNS rebinding); its requests then carry that name.

    Args:
        hosts: Allowed hosts; None allows IP addresses and the name of this machine, for an address that means all.
        token: Required as `Authorization: Bearer`, except by /health; the page at / asks for it.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None, token: str | None, metrics: Metrics) -> None:
        self.app, self.hosts, self.metrics = app, hosts, metrics
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
            await refusal.respond()(scope, receive, send_safely)
        finally:
            self.active -= 1
            if scope["path"] == "/predict":
                self.metrics.requests.labels(status).inc()
                self.metrics.seconds.observe(time.perf_counter() - began)

    async def check(self, scope: Scope) -> None:
        """Raise a Refusal of a request with a wrong Host header, without the token, or beyond MOST_REQUESTS."""
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not self.is_allowed(hosts[0].decode("latin-1")):
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
        return is_address(host) or host in (*LOOPBACK, socket.gethostname().lower(), socket.getfqdn().lower())

    def knows_token(self, scope: Scope) -> bool:
        """Return whether the request has the token, or none is required; the comparison takes constant time."""
        if self.token is None:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return hmac.compare_digest(token.strip(), self.token) and kind.lower() == b"bearer"


async def read_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        Refusal: It is not JSON by its Content-Type, or too large.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == JSON
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= LONGEST_BODY and is_json:
            parts.append(part)
        elif size > MOST_DRAINED:
            break
    if not is_json:
        raise Refusal(415, f"the Content-Type must be {JSON}; send the inputs as JSON")
    if size > LONGEST_BODY:
        raise Refusal(413, f"the request has more than {LONGEST_BODY:,} bytes; send the inputs in several requests")
    return b"".join(parts)


def read_request(body: bytes) -> tuple[list[Input | UsageError], bool]:
    """Return the inputs of a request, each as it is or the error in it, and whether they are a list.

    Raises:
        Refusal: The request is not JSON, or has too many inputs.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise Refusal(400, "the request is not UTF-8; convert it") from None
    is_list = text.lstrip(" \t\r\n").startswith("[")
    try:
        found = msgspec.json.decode(text, type=list[msgspec.Raw]) if is_list else [msgspec.json.decode(text)]
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refusal(400, f"the request is not JSON ({make_printable(str(error))}); correct it") from None
    if len(found) > MOST_INPUTS:
        raise Refusal(
            422, f"the request has {len(found):,} inputs, expected at most {MOST_INPUTS}; send several requests"
        )
    return [check_input(parse_line(bytes(raw).decode()) if is_list else raw) for raw in found], is_list


def check_input(given: Any) -> Input | UsageError:
    """Return an input, or the error in it."""
    if isinstance(given, UsageError):
        return given
    if not isinstance(given, str | dict):
        return UsageError(f"got {type(given).__name__}; give a text as a string, or an object")
    try:
        count = count_characters(given)
    except RecursionError:
        return UsageError("the input is nested too deeply; give texts only")
    if count > LONGEST_INPUT:
        return UsageError(f"the input has {count:,} characters, expected at most {LONGEST_INPUT:,}; split it")
    return given


# --- The application --------------------------------------------------------------------------------------------------


def make_app(
    predictor: Predictor, place: str, *, hosts: frozenset[str] | None, token: str | None = None, report: Report = ignore
) -> Gate:
    """Return the application of a model.

    Args:
        place: The run or checkpoint of the predictor.
        hosts: As for `Gate`.
        report: Receives one line for each unexpected exception.
    """
    metrics, name = Metrics(), name_model(place)

    def answer(inputs: list[Input | UsageError]) -> tuple[list[Result], int]:
        lengths: list[int] = []
        results = list(predictor.stream(inputs, note=lambda found: lengths.append(int(found.sum()))))
        return results, sum(lengths)

    most_tokens = TOKENS_AT_ONCE.get(predictor.settings.model.device.type, TOKENS_A_BATCH)
    batcher = Batcher(answer, most_tokens, MOST_WAITING, metrics.note_batch, report)
    metrics.waiting.set_function(lambda: batcher.waiting)
    task, settings = predictor.task, predictor.settings
    sample = task.make_sample(settings)

    @asynccontextmanager
    async def run_model(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await asyncio.to_thread(batcher.close)

    app = FastAPI(title=name, version=bertkit.__version__, docs_url=None, redoc_url=None, lifespan=run_model)

    @app.post("/predict", openapi_extra=describe_predict(predictor, sample), summary="Predict an input or a list")
    async def predict(request: Request) -> Response:
        try:
            async with asyncio.timeout(DEADLINE):
                inputs, is_list = read_request(await read_body(request))
                results = await batcher.answer(inputs)
        except Refusal as refusal:
            return refusal.respond()
        except Busy:
            waiting = f"{batcher.waiting:,} inputs are waiting, at most {MOST_WAITING:,} may"
            return Refusal(503, f"{waiting}; try again in a second", Retry_After="1").respond()
        except TimeoutError:
            return Refusal(504, f"no answer within {DEADLINE:g} seconds; send fewer or shorter inputs").respond()
        except ClientDisconnect:
            return Refusal(400, "the request has ended early; send it again").respond()
        except UsageError as error:  # of the model, not of an input
            return Refusal(500, str(error)).respond()
        except Exception:
            return Refusal(500, "an internal error; the server's output has its name").respond()
        status = 422 if not is_list and "error" in results[0] else 200
        return Response(msgspec.json.encode(results if is_list else results[0]), status, media_type=JSON)

    @app.get("/health", summary="Tell whether the model answers")
    async def health() -> Response:
        is_alive = batcher.thread.is_alive()
        found = {"status": "ok" if is_alive else "stopped", "waiting": batcher.waiting}
        return Response(msgspec.json.encode(found), 200 if is_alive else 503, media_type=JSON)

    @app.get("/metrics", summary="Return counts for Prometheus")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    page, policy = render_page(predictor, name, place, sample)
    lock, _ = render_page(predictor, "bertkit", place, None)  # it has the same script and style

    @app.get("/", include_in_schema=False)
    async def show_page(request: Request) -> Response:
        content = page if request.scope["is_known"] else lock
        return Response(content, headers={"content-security-policy": policy}, media_type="text/html")

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        found = {404: "nothing has this path", 405: "this path takes another method"}.get(error.status_code, "refused")
        message = f"{found}; GET /openapi.json describes all"
        return Response(msgspec.json.encode({"error": message}), error.status_code, error.headers, JSON)

    return Gate(app, hosts, token, metrics)


def describe_predict(predictor: Predictor, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the OpenAPI document about /predict, with the schemas of the model's head."""
    task, settings = predictor.task, predictor.settings
    given = task.describe_input(settings)
    if len(task.list_fields(settings)) == 1:
        given = {"anyOf": [given, STRING]}
    output = task.describe_output(settings)
    cut = {"const": True, "description": "The input was truncated."}
    common = {"id": {"description": "As in the input."}, "cut": cut}
    result = output | {"properties": common | output["properties"]}
    error = make_object({"error": STRING})
    failed = make_object({"id": {}, "error": STRING}, optional=("id",))

    def describe(words: str, schema: Schema) -> dict[str, Any]:
        return {"description": words, "content": {JSON: {"schema": schema}}}

    errors = {
        "400": "The request is not JSON.",
        "401": "The token is missing or wrong.",
        "413": f"The request has more than {LONGEST_BODY:,} bytes.",
        "415": f"The Content-Type is not {JSON}.",
        "421": "The Host header names another host.",
        "422": f"The input does not fit the model, or a list has more than {MOST_INPUTS} inputs.",
        "500": "The model has failed.",
        "503": "Too many inputs are waiting.",
        "504": f"There was no answer within {DEADLINE:g} seconds.",
    }
    inputs = make_array(given) | {"maxItems": MOST_INPUTS}
    examples = {"input": {"value": sample}, "list": {"value": [sample, sample]}}
    words = "The result of an input, or a list of results, in which an invalid input has an error in its place."
    results = {"anyOf": [result, make_array({"anyOf": [result, failed]})]}
    return {
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": {"anyOf": [given, inputs]}, "examples": examples}},
        },
        "responses": {"200": describe(words, results)}
        | {status: describe(words, failed if status == "422" else error) for status, words in errors.items()},
    }


# --- The server -------------------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """A server that finishes what it has accepted before it ends, at the first SIGTERM or Ctrl-C.

    Attributes:
        stopped_by: The number of the signal; None before it.
    """

    stopped_by: int | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End at the first signal; a second one takes effect at once."""

        def stop(number: int) -> None:
            self.stopped_by, self.should_exit = number, True

        with note_signals(stop):
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, let clients close their connections, and wait for the requests that have begun."""
        self.config.loaded_app.is_leaving = True
        for _ in range(3):  # accepts the connections that the kernel has accepted
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        await asyncio.sleep(LEAVING)
        await super().shutdown(sockets)


def serve(
    run: str, host: str = "127.0.0.1", port: int = 8080, token: str | None = None, report: Report = ignore
) -> None:
    """Serve a model until a signal ends it.

    Args:
        run: As for `Predictor`.
        host: A name or an address of this machine.
        port: 0 takes a free one.
        token: Required of every client; needed unless the host is this machine only.
        report: Receives the address, and one line for each unexpected exception.

    Raises:
        UsageError: The host is not this machine only and there is no token, the address cannot be used, or the model
            cannot be loaded.
        Interrupted: A signal ended it.
    """
    check_exposure(host, token)
    with bind(host, port) as listener:
        predictor = Predictor(run)
        address = listener.getsockname()
        hosts = None if ipaddress.ip_address(address[0]).is_unspecified else frozenset({*LOOPBACK, host.lower()})
        app = make_app(
            predictor,
            run,
            hosts=hosts,
            token=token,
            report=lambda error: report(f"{error} while answering an input; the model or bertkit has a fault"),
        )
        server = Server(configure(app))
        shown = f"[{host}]" if ":" in host else host
        predictor([predictor.task.make_sample(predictor.settings)])  # warms up; a model that has diverged says so now
        report(f"{name_model(run)} answers at http://{shown}:{address[1]}; end it with Ctrl-C")
        server.run(sockets=[listener])
    if server.stopped_by is not None:
        raise Interrupted("stopped; every accepted request was answered", server.stopped_by)


def configure(app: Gate) -> uvicorn.Config:
    """Return the settings of a server that logs nothing and trusts no header about its clients."""
    return uvicorn.Config(
        app, ws="none", log_config=None, access_log=False, proxy_headers=False, server_header=False, backlog=BACKLOG
    )


def name_model(place: str) -> str:
    """Return the name of a run or checkpoint: that of its directory, or as it is on the Hub."""
    return Path(place).resolve().name if Path(place).is_dir() else place


def check_exposure(host: str, token: str | None) -> None:
    """Check that other machines can only reach the server with a token.

    Raises:
        UsageError: They could without, or the token cannot be sent in a header.
    """
    if token is not None and not TOKEN.fullmatch(token):
        raise UsageError("--token must be printable ASCII characters without spaces; give another")
    is_local = host in LOOPBACK or (is_address(host) and ipaddress.ip_address(host).is_loopback)
    if not is_local and token is None:
        raise UsageError(f"--host {host} lets other machines use the model; give a --token that they must send")


def is_address(host: str) -> bool:
    """Return whether a host is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def bind(host: str, port: int) -> socket.socket:
    """Return a socket with this address, which does not listen yet.

    Raises:
        UsageError: The address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host} is not an address of this machine ({error}); give another") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UsageError(f"{host}:{port} cannot be used ({error.strerror}); give another --port or --host") from None
    return listener
