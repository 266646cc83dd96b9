"""Serve a trained model over HTTP: predictions as `bertkit predict` makes them, metrics, and a page to try the model.

Every request passes `Gate`, which checks the Host header and the token; everything after it is a FastAPI application.
Requests hold inputs only: nothing in them is used as a path, a name or code, and no text of them is logged or counted.

Left out: TLS, several models and several processes, which are the work of a reverse proxy.
"""

import asyncio
import ipaddress
import logging
import re
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.auto import AutoHTTPProtocol

import bertkit
from bertkit.data.formats.line import parse_line
from bertkit.data.formats.rows import Input
from bertkit.errors import UsageError, make_printable
from bertkit.inference.batching import Batcher, Busy, count_characters
from bertkit.inference.gate import BODY_DUE, JSON, LOOPBACK, MOST_DRAINED, Gate, Metrics, Refusal, is_address
from bertkit.inference.page import render_page
from bertkit.inference.predictor import Predictor
from bertkit.model.cpu import limit_kernels
from bertkit.system.progress import Report, ignore
from bertkit.system.signals import Interrupted, note_signals
from bertkit.tasks.prediction import limit_batch
from bertkit.tasks.schema import STRING, Schema, make_array, make_object
from bertkit.tasks.task import Result

LONGEST_BODY = 1 << 20  # bytes of a request
MOST_INPUTS = 256  # of a request
LONGEST_INPUT = 20_000  # characters; a context counts once per ending
MOST_WAITING = 1024  # inputs
HEAD_DUE = 8.0  # seconds until the headers of a request are complete
DEADLINE = 30.0  # seconds from a request's last byte to its answer
LEAVING = 0.5  # seconds in which answers tell clients to close their connections, before the server does
TROUBLE_APART = 10.0  # seconds
UNREAD = 35  # seconds after a signal in which clients may read their answers
BACKLOG = 2048  # connections that wait to be accepted
MOST_CONNECTIONS = 4096
SPARE_FILES = 256  # beside connections
TOKEN = re.compile(r"[!-~]+")  # printable ASCII


# --- Requests ---------------------------------------------------------------------------------------------------------


async def read_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        Refusal: It is not JSON by its Content-Type, too large, or too slow.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == JSON
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_DUE):
            async for part in request.stream():
                size += len(part)
                if size <= LONGEST_BODY and is_json:
                    parts.append(part)
                elif size > MOST_DRAINED:
                    break
    except TimeoutError:
        raise Refusal(408, f"the request was not complete after {BODY_DUE:g} seconds; send it again") from None
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


class Application:
    """The answers to all paths.

    Args:
        place: The run or checkpoint of the predictor.
        hosts: As for `Gate`.
        report: Receives one line for each unexpected exception.

    Attributes:
        gate: The complete application.
    """

    def __init__(
        self, predictor: Predictor, place: str, hosts: frozenset[str] | None, token: str | None, report: Report
    ) -> None:
        self.predictor, self.report, self.metrics = predictor, report, Metrics()
        self.silent_until = 0.0
        most_tokens = limit_batch(predictor.settings.model.device)
        self.batcher = Batcher(self.answer_batch, most_tokens, MOST_WAITING, self.metrics.note_batch, report)
        self.metrics.waiting.set_function(lambda: self.batcher.waiting)
        name = name_model(place)
        self.page, self.policy = render_page(predictor, name, place, predictor.sample)
        self.lock, _ = render_page(predictor, "bertkit", place, None)  # it has the same script and style
        app = FastAPI(
            title=name,
            version=bertkit.__version__,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            lifespan=self.run_model,
        )
        about = describe_predict(predictor) | describe_security(token)
        app.post("/predict", openapi_extra=about, summary="Predict an input or a list")(self.predict)
        app.get("/health", summary="Tell whether the model answers")(self.tell_health)
        counts = {200: {"content": {"text/plain": {"schema": STRING}}}}
        options = {"response_class": Response, "responses": counts, "openapi_extra": describe_security(token)}
        app.get("/metrics", summary="Return counts for Prometheus", **options)(self.show_metrics)
        app.get("/", include_in_schema=False)(self.show_page)
        for path in ("/", "/health"):  # load balancers ask so
            app.head(path, include_in_schema=False)(self.tell_health)
        app.exception_handler(HTTPException)(refuse)
        if token is not None:
            describe_token(app)
        self.gate = Gate(app, hosts, token, self.metrics)

    @asynccontextmanager
    async def run_model(self, app: FastAPI) -> AsyncIterator[None]:
        """Run the model's thread as long as the application."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: self.note_trouble(context.get("exception")))
        self.batcher.start()
        yield
        await asyncio.to_thread(self.batcher.close)

    def note_trouble(self, error: BaseException | None) -> None:
        """Report an error outside of requests, such as too many open files, but not more often than TROUBLE_APART."""
        now = time.monotonic()
        if now >= self.silent_until:
            self.silent_until = now + TROUBLE_APART
            self.report(type(error).__name__)

    def answer_batch(self, inputs: list[Input | UsageError]) -> tuple[list[Result], int]:
        """Return the results of a batch, and the number of its tokens."""
        lengths: list[int] = []
        results = list(self.predictor.stream(inputs, note=lambda found: lengths.append(int(found.sum()))))
        return results, sum(lengths)

    async def predict(self, request: Request) -> Response:
        """Answer an input or a list of inputs."""
        try:
            inputs, is_list = read_request(await read_body(request))
            async with asyncio.timeout(DEADLINE):
                results = await self.answer(inputs, request)
        except Refusal as refusal:
            return refusal.respond()
        except Busy:
            waiting = f"{self.batcher.waiting:,} inputs are waiting and the request has {len(inputs):,}"
            message = f"{waiting}, at most {MOST_WAITING:,} may wait; try again in a second"
            return Refusal(503, message, Retry_After="1").respond()
        except TimeoutError:
            return Refusal(504, f"no answer within {DEADLINE:g} seconds; send fewer or shorter inputs").respond()
        except ClientDisconnect:
            return Refusal(400, "the connection was closed before the request was complete; send it again").respond()
        except UsageError as error:  # of the model, not of an input
            return Refusal(500, str(error)).respond()
        except Exception as error:
            self.report(type(error).__name__)
            return Refusal(500, "an internal error; the server's output has its name").respond()
        status = 422 if not is_list and "error" in results[0] else 200
        return Response(msgspec.json.encode(results if is_list else results[0]), status, media_type=JSON)

    async def answer(self, inputs: Sequence[Input | UsageError], request: Request) -> list[Result]:
        """Return the results of the inputs; they are dropped if the client closes its connection.

        Raises:
            ClientDisconnect: It did.
        """
        answer = asyncio.ensure_future(self.batcher.answer(inputs))
        leaving = asyncio.ensure_future(request.receive())  # whose next message can only be that the client has left
        try:
            await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientDisconnect
            return answer.result()
        finally:
            answer.cancel()
            leaving.cancel()
            await asyncio.wait((answer, leaving))  # until the inputs are out of the queue

    async def tell_health(self) -> Response:
        """Tell whether the model's thread is alive."""
        is_alive = self.batcher.thread.is_alive()
        found = {"status": "ok" if is_alive else "stopped", "waiting": self.batcher.waiting}
        return Response(msgspec.json.encode(found), 200 if is_alive else 503, media_type=JSON)

    async def show_metrics(self) -> Response:
        """Return the counts."""
        return Response(generate_latest(self.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def show_page(self, request: Request) -> Response:
        """Return the page to try the model, or without the token one that asks for it."""
        content = self.page if request.scope["is_known"] else self.lock
        return Response(content, headers={"content-security-policy": self.policy}, media_type="text/html")


def make_app(
    predictor: Predictor, place: str, *, hosts: frozenset[str] | None, token: str | None = None, report: Report = ignore
) -> Gate:
    """Return the application of a model; arguments as for `Application`."""
    return Application(predictor, place, hosts, token, report).gate


async def refuse(request: Request, error: HTTPException) -> Response:
    """Answer a request with another path or method."""
    found = {404: "unknown path", 405: "this path takes another method"}.get(error.status_code, "refused")
    message = f"{found}; GET /openapi.json lists the paths"
    return Response(msgspec.json.encode({"error": message}), error.status_code, error.headers, JSON)


def describe_security(token: str | None) -> dict[str, Any]:
    """Return the part of a path in the OpenAPI document that names its token, if one is required."""
    return {} if token is None else {"security": [{"token": []}]}


def describe_token(app: FastAPI) -> None:
    """Add the token to the OpenAPI document."""
    document = app.openapi()
    document.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}


def describe_predict(predictor: Predictor) -> dict[str, Any]:
    """Return the part of the OpenAPI document about /predict, with the schemas of the model's head."""
    given, output, sample = predictor.input_schema, predictor.output_schema, predictor.sample
    if len(sample) == 1:
        given = {"anyOf": [given, STRING]}
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
        "408": f"The request was not complete after {BODY_DUE:g} seconds.",
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


class TimedProtocol(AutoHTTPProtocol):
    """HTTP over a connection that is closed if the headers of a request are not complete in time."""

    head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Expect a request."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        self.expect_head()

    def data_received(self, data: bytes) -> None:
        """Handle a part of a request."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self.expect_head()
        else:
            self.forget_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection."""
        self.forget_head()
        super().connection_lost(exc)

    def expect_head(self) -> None:
        """Close the connection after HEAD_DUE unless the headers are complete by then."""
        if self.head_due is None:
            self.head_due = self.loop.call_later(HEAD_DUE, self.transport.close)

    def forget_head(self) -> None:
        """Leave the connection open."""
        if self.head_due is not None:
            self.head_due.cancel()
            self.head_due = None


class Server(uvicorn.Server):
    """A server that finishes what it has accepted before it ends, at the first SIGTERM or Ctrl-C.

    Args:
        report: Called as soon as it listens.

    Attributes:
        stopped_by: The number of the signal; None before it.
    """

    def __init__(self, config: uvicorn.Config, report: Callable[[], None]) -> None:
        super().__init__(config)
        self.report = report
        self.stopped_by: int | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End at the first signal; a second one takes effect at once."""

        def stop(number: int) -> None:
            self.stopped_by, self.should_exit = number, True

        with note_signals(stop):
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then say so."""
        await super().startup(sockets)
        self.report()

    async def shutdown(self, sockets: list[socket.socket]) -> None:
        """Stop accepting, let clients close their connections, and wait for the requests that have begun.

        Closing the listener resets the connections that wait in the kernel, so they are accepted first. Only then are
        clients told to close theirs: a client told earlier would connect again at once, and be reset.
        """
        loop, waiting = asyncio.get_running_loop(), []
        (listener,) = sockets
        loop.remove_reader(listener)
        await asyncio.sleep(0)  # until asyncio has made the connections that it has accepted
        with suppress(OSError):  # no more are waiting, or none can be accepted
            while True:
                waiting.append(listener.accept()[0])
        for server in self.servers:
            server.close()
        self.config.loaded_app.is_leaving = True
        connect = loop.connect_accepted_socket
        await asyncio.gather(*(connect(self.make_protocol, one) for one in waiting), return_exceptions=True)
        await asyncio.sleep(LEAVING)
        await super().shutdown(sockets)

    def make_protocol(self) -> asyncio.Protocol:
        """Return the protocol of a connection, as uvicorn makes it."""
        return self.config.http_protocol_class(self.config, self.server_state, self.lifespan.state)


def serve(
    run: str,
    host: str = "127.0.0.1",
    port: int = 8080,
    token: str | None = None,
    precision: str = "auto",
    report: Report = ignore,
) -> None:
    """Serve a model until a signal ends it.

    Args:
        run: As for `Predictor`, and `precision`.
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
    limit_kernels()
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addHandler(logging.NullHandler())  # which would print each malformed request
    with bind(host, port) as listener:
        with ThreadPoolExecutor(1) as loading:
            predictor = loading.submit(load_predictor, run, precision).result()
        address = listener.getsockname()
        hosts = None if ipaddress.ip_address(address[0]).is_unspecified else frozenset({*LOOPBACK, host.lower()})
        app = make_app(
            predictor,
            run,
            hosts=hosts,
            token=token,
            report=lambda error: report(f"internal error: {error}"),
        )
        shown = f"[{host}]" if ":" in host else host
        ready = f"{name_model(run)} answers at http://{shown}:{address[1]}; end it with Ctrl-C"
        allow_files(MOST_CONNECTIONS)
        server = Server(configure(app), lambda: report(ready))
        server.run(sockets=[listener])
    if server.stopped_by is not None:
        raise Interrupted("stopped; every accepted request was answered", server.stopped_by)


def load_predictor(run: str, precision: str) -> Predictor:
    """Return a predictor that has answered an input, so that a model that has diverged says so now.

    It runs in a thread that ends: as long as another thread has OpenMP workers, those of the model's thread sleep
    between operations, and a text takes up to half as long again.
    """
    predictor = Predictor(run, precision=precision)
    predictor([predictor.sample])
    return predictor


def configure(app: Gate) -> uvicorn.Config:
    """Return the settings of a server that logs nothing and trusts no header about its clients."""
    return uvicorn.Config(
        app,
        http=TimedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=UNREAD,
    )


def allow_files(count: int) -> None:
    """Allow this process `count` connections beside its other open files, as far as the system permits."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES if most == resource.RLIM_INFINITY else min(count + SPARE_FILES, most)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


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
    is_local = host.lower() in LOOPBACK or (is_address(host) and ipaddress.ip_address(host).is_loopback)
    if not is_local and token is None:
        raise UsageError(f"--host {host} lets other machines use the model; give a --token that they must send")


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address.

    Raises:
        UsageError: The address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)  # asyncio sets TCP_NODELAY only where the protocol is named
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host} is not an address of this machine ({error}); give another") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)  # so that no other server takes the address while the model is loaded
    except OSError as error:
        listener.close()
        raise UsageError(f"{host}:{port} cannot be used ({error.strerror}); give another --port or --host") from None
    return listener
