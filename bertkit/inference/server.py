"""Serve a trained model over HTTP: predictions as `bertkit predict` makes them, metrics, and a page to try the model.

Requests hold inputs only: nothing in them is used as a path, a name or code, and no text of them is logged or counted.

Left out: TLS, several models and several processes, which are the work of a reverse proxy.
"""

import asyncio
import hmac
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import regex
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from markdown_it import MarkdownIt
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

import bertkit
from bertkit.data.formats.rows import Input
from bertkit.data.tokenizer import get_cached_tokenizer
from bertkit.errors import UsageError, list_some, make_printable
from bertkit.inference.address import bind
from bertkit.inference.batching import Batcher, count_characters
from bertkit.inference.export import FEW_TOKENS, add_export
from bertkit.inference.predictor import Predictor
from bertkit.model.cpu import limit_kernels
from bertkit.reports.html import load_template
from bertkit.reports.tables import find_main, list_shown
from bertkit.reports.verdict import describe_verdict
from bertkit.system.hub import CARD, find_file
from bertkit.system.progress import Report, ignore
from bertkit.tasks.answers import Result
from bertkit.tasks.option import REDACTIONS
from bertkit.tasks.prediction import limit_batch
from bertkit.tasks.schema import PROBABILITY, STRING, make_array, make_object
from bertkit.training.recipe import read_recipe
from bertkit.training.run_dir import ENVIRONMENT, METRICS_FILE, RECIPE_FILE, read_metrics, read_record

LONGEST_BODY = 1 << 20  # bytes of a request
MOST_INPUTS = 256  # inputs of a request
LONGEST_INPUT = 20_000  # characters
MOST_WAITING = 1024  # inputs
DEADLINE = 30.0  # seconds from a request's headers to its answer
JSON = "application/json"
Redaction = tuple[str | None, float | None]  # the arguments of `Predictor.with_redaction`
Asked = tuple[Redaction, Input | UsageError]
MOST_LABELS = 12  # named on the page
ABOUT_DECIDED = {  # name on the page -> a value that other data have decided, and what it means
    "Answers": ("least_confidence", "only where the likeliest label has a probability of {:.3g} or more"),
    "Answers questions": ("tau", "where the best span scores more than {:.3g} above no answer"),
    "Redacts": ("redaction_threshold", "words with a probability of {:.3g} or more of being in a name"),
}
EXAMPLE_INPUTS: dict[str, list[dict[str, Any]]] = {  # head -> inputs to try beside the sample; none is from any data
    "BertForSequenceClassification": [
        {"text": "The room was clean, but nobody answered the phone."},
        {"text": "Please send me the invoice for March again."},
    ],
    "BertForTokenClassification": [
        {"text": "Ada Lovelace wrote to Charles Babbage from London."},
        {"text": "Flights from Lisbon to Oslo are sold by Norwegian until Friday."},
    ],
    "BertForQuestionAnswering": [
        {
            "question": "When was the bridge opened?",
            "context": "The bridge took four years to build. It was opened in 1932 by the mayor of the city.",
        },
        {
            "question": "Who painted the bridge?",
            "context": "The bridge took four years to build. It was opened in 1932 by the mayor of the city.",
        },
    ],
    "BertForMaskedLM": [{"text": "Paris is the [MASK] of France."}],
}
CHINESE_INPUTS: dict[str, list[dict[str, Any]]] = {  # as EXAMPLE_INPUTS, for a Chinese vocabulary
    "BertForSequenceClassification": [
        {"text": "房间很干净，服务也热情，下次还会来。"},
        {"text": "请把三月的发票再寄一次。"},
    ],
    "BertForTokenClassification": [{"text": "鲁迅生于浙江绍兴，曾在北京大学任教。"}],
    "BertForQuestionAnswering": [
        {"question": "大桥是哪一年通车的？", "context": "大桥修了四年，1932年由市长宣布通车。"}
    ],
    "BertForMaskedLM": [{"text": "巴黎是法国的首[MASK]。"}],
    "BertForPreTraining": [{"text": "巴黎是法国的首[MASK]。"}],
}
HAN = regex.compile(r"\p{Script=Han}")
CARD_HEADER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)  # YAML for the Hub
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
UVICORN = {  # nothing is logged, and no header about the client is trusted
    "ws": "none",
    "log_config": None,
    "log_level": "critical",
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
    "headers": [("x-content-type-options", "nosniff"), ("x-frame-options", "DENY"), ("referrer-policy", "no-referrer")],
    "limit_concurrency": 1000,  # connections; most systems let a process open 1,024 files
    "timeout_graceful_shutdown": 35,  # seconds after a signal in which requests are answered
}

SERVED_REQUESTS = Counter("bertkit_requests", "Requests to /predict.", ["status"])
SERVED_SECONDS = Histogram("bertkit_request_seconds", "Seconds from request to answer.")
SERVED_INPUTS = Counter("bertkit_inputs", "Inputs given to the model.")
SERVED_TOKENS = Counter("bertkit_tokens", "Tokens given to the model.")
SERVED_BATCH = Histogram("bertkit_batch_inputs", "Inputs of a batch.", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256))
SERVED_WAITING = Gauge("bertkit_waiting_inputs", "Inputs that wait for the model.")


# --- Requests ---------------------------------------------------------------------------------------------------------


async def read_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        HTTPException: It is too large, or not JSON by its Content-Type; other sites cannot make a browser send JSON.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise HTTPException(415, f"the Content-Type must be {JSON}; send the inputs as JSON")
    parts, size = [], 0
    async for part in request.stream():  # a client that still sends may not read the answer
        size += len(part)
        if size <= LONGEST_BODY:
            parts.append(part)
    if size > LONGEST_BODY:
        raise HTTPException(413, f"the request has more than {LONGEST_BODY:,} bytes; send several requests")
    return b"".join(parts)


def read_request(body: bytes) -> tuple[list[Input | UsageError], bool]:
    """Return the inputs of a request, each as it is or the error in it, and whether they are a list.

    Raises:
        HTTPException: The request is not JSON, or has too many inputs.
    """
    try:
        found = msgspec.json.decode(body)
        inputs = found if isinstance(found, list) else [found]
        if len(inputs) > MOST_INPUTS:
            most = f"expected at most {MOST_INPUTS}; send several requests"
            raise HTTPException(422, f"the request has {len(inputs):,} inputs, {most}")
        return [check_input(given) for given in inputs], inputs is found
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise HTTPException(400, f"the request is not JSON ({make_printable(str(error))}); correct it") from None


def check_input(given: Any) -> Input | UsageError:
    """Return an input, or the error in it."""
    if not isinstance(given, str | dict):
        return UsageError(f"got {type(given).__name__}; give a text as a string, or an object")
    endings = [given[key] for key in given if key.startswith("ending")] if isinstance(given, dict) else []
    # A context is read once for each ending, which are in a list or in columns.
    copies = max([1, len(endings), *(len(found) for found in endings if isinstance(found, list))])
    if (count := count_characters(given) * copies) > LONGEST_INPUT:
        return UsageError(f"the input has {count:,} characters, expected at most {LONGEST_INPUT:,}; split it")
    return given


def read_redaction(request: Request, predictor: Predictor) -> Redaction:
    """Return how a request asks for redacted names, by its parameters `redact` and `least`.

    Raises:
        HTTPException: They are wrong, or the model finds no names.
    """
    given = request.query_params
    try:
        asked = given.get("redact"), float(given["least"]) if "least" in given else None
        if any(given):
            predictor.with_redaction(*asked)
    except ValueError as error:
        raise HTTPException(422, str(error).replace("--", "")) from None
    return asked


# --- The application --------------------------------------------------------------------------------------------------


class Application(FastAPI):
    """The answers to all paths.

    A page of another site may point its own name at this address (DNS rebinding); its requests then carry that name as
    Host. It does not know a token, so with one any Host is allowed.

    Args:
        run: The run or checkpoint of the predictor.
        hosts: Names in the Host header that are allowed without a token.
        token: Required as `Authorization: Bearer`, except by / and /health; empty if none is.
        report: Receives one line for each unexpected exception.
    """

    def __init__(
        self,
        predictor: Predictor,
        run: str,
        hosts: Sequence[str] = LOOPBACK,
        token: str = "",
        report: Report = ignore,
    ) -> None:
        name = Path(run).resolve().name if Path(run).is_dir() else run
        super().__init__(title=name, version=bertkit.__version__, openapi_url=None, lifespan=self.run_model)
        self.predictor, self.token, self.report = predictor, token, report
        self.batcher = Batcher(self.answer_batch, limit_batch(predictor.settings.model), MOST_WAITING)
        SERVED_WAITING.set_function(lambda: self.batcher.waiting)
        page = HTMLResponse(render_page(predictor, name, run, asks_token=bool(token)))
        kept = {"dependencies": [Depends(self.check_token)] if token else []}
        about = describe_predict(predictor)
        self.post("/predict", openapi_extra=about, summary="Predict an input or a list", **kept)(self.predict)
        self.get("/health", summary="Tell how many inputs wait")(self.tell_health)
        self.get("/metrics", summary="Return counts for Prometheus", **kept)(
            lambda: Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
        )
        self.get("/openapi.json", include_in_schema=False, **kept)(self.openapi)
        self.get("/", include_in_schema=False)(lambda: page)
        self.get("/card", include_in_schema=False, **kept)(lambda: HTMLResponse(render_card(name, run)))
        self.exception_handler(HTTPException)(refuse)
        self.exception_handler(Exception)(self.fail)
        if not token:
            self.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and count those to /predict by their status."""
        began, status = time.perf_counter(), 500

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await super().__call__(scope, receive, note)
        finally:
            if scope.get("path") == "/predict":
                SERVED_REQUESTS.labels(status).inc()
                SERVED_SECONDS.observe(time.perf_counter() - began)

    @asynccontextmanager
    async def run_model(self, app: FastAPI) -> AsyncIterator[None]:
        """Run the model's thread as long as the application."""
        self.batcher.thread.start()
        yield
        await asyncio.to_thread(self.batcher.close)

    async def check_token(
        self, given: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
    ) -> None:
        """Refuse a request without the token; the comparison takes constant time."""
        if given is None or not hmac.compare_digest(given.credentials.encode(), self.token.encode()):
            message = "the token is missing or wrong; send it as Authorization: Bearer TOKEN"
            raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})

    async def predict(self, request: Request) -> Response:
        """Answer an input or a list of inputs."""
        try:
            async with asyncio.timeout(DEADLINE):
                redact = read_redaction(request, self.predictor)
                inputs, is_list = read_request(await read_body(request))
                results = await self.answer([(redact, given) for given in inputs], request)
        except asyncio.QueueFull:
            waiting = f"{self.batcher.waiting:,} inputs are waiting and the request has {len(inputs):,}"
            message = f"{waiting}, at most {MOST_WAITING:,} may wait; try again in a second"
            raise HTTPException(503, message, {"Retry-After": "1"}) from None
        except TimeoutError:
            raise HTTPException(504, f"no answer within {DEADLINE:g} seconds; send less at a time") from None
        except (ClientDisconnect, asyncio.CancelledError):
            raise HTTPException(499, "the connection was closed; send the request again") from None
        except UsageError as error:  # the fault of the model, not of an input
            raise HTTPException(500, str(error)) from None
        status = 422 if not is_list and "error" in results[0] else 200
        return Response(msgspec.json.encode(results if is_list else results[0]), status, media_type=JSON)

    async def answer(self, inputs: Sequence[Asked], request: Request) -> list[Result]:
        """Return the results of the inputs; this is cancelled if the client closes its connection."""
        answer = asyncio.ensure_future(self.batcher.answer(inputs))
        leaving = asyncio.ensure_future(request.receive())  # the next message can only be that the client has left
        leaving.add_done_callback(lambda _: answer.cancel())
        try:
            return await answer
        finally:
            leaving.cancel()

    def answer_batch(self, inputs: list[Asked]) -> list[Result]:
        """Return the results of a batch, and count it."""
        answers: dict[Redaction, Iterator[Result]] = {}
        for redaction in {form for form, _ in inputs}:
            predictor = self.predictor if redaction == (None, None) else self.predictor.with_redaction(*redaction)
            given = [value for form, value in inputs if form == redaction]
            answers[redaction] = predictor.stream(given, note=lambda lengths: SERVED_TOKENS.inc(int(lengths.sum())))
        results = [next(answers[form]) for form, _ in inputs]
        SERVED_INPUTS.inc(len(inputs))
        SERVED_BATCH.observe(len(inputs))
        return results

    async def tell_health(self) -> dict[str, Any]:
        """Tell that the server answers, and how many inputs wait."""
        return {"status": "ok", "waiting": self.batcher.waiting}

    async def fail(self, request: Request, error: Exception) -> Response:
        """Answer a request that has raised an exception, whose message may quote an input."""
        self.report(f"internal error: {type(error).__name__}")
        return await refuse(request, HTTPException(500, "an internal error; the server's output has its name"))


async def refuse(request: Request, error: HTTPException) -> Response:
    """Answer a request with an object whose only key is `error`."""
    hint = "; GET /openapi.json lists the paths" if error.status_code in (404, 405) else ""
    return Response(msgspec.json.encode({"error": error.detail + hint}), error.status_code, error.headers, JSON)


def describe_predict(predictor: Predictor) -> dict[str, Any]:
    """Return the part of the OpenAPI document about /predict, with the schemas of the model's head."""
    given, output, sample = predictor.input_schema, predictor.output_schema, predictor.sample
    if len(sample) == 1:
        given = {"anyOf": [given, STRING]}
    truncated = {"const": True, "description": "The input was truncated."}
    common = {"id": {"description": "As in the input."}, "truncated": truncated}
    result = output | {"properties": common | output["properties"]}
    failed = make_object({"id": {}, "error": STRING}, optional=("id",))
    inputs = make_array(given) | {"maxItems": MOST_INPUTS}
    results = {"anyOf": [result, make_array({"anyOf": [result, failed]})]}
    examples = {"input": {"value": sample}, "list": {"value": [sample, sample]}}
    words = "The result of an input, or a list of results, in which an invalid input has an error in its place."
    body = {"required": True, "content": {JSON: {"schema": {"anyOf": [given, inputs]}, "examples": examples}}}
    answers = {
        "200": {"description": words, "content": {JSON: {"schema": results}}},
        "default": {"description": "Why there is no result.", "content": {JSON: {"schema": failed}}},
    }
    form = {"name": "redact", "in": "query", "schema": {"enum": list(REDACTIONS)}, "description": "Redact names."}
    least = {"name": "least", "in": "query", "schema": PROBABILITY, "description": "Redact words from here on."}
    parameters = {"parameters": [form, least]} if "redacted" in output["properties"] else {}
    return {"requestBody": body, "responses": answers, **parameters}


# --- The page ---------------------------------------------------------------------------------------------------------


def render_page(predictor: Predictor, name: str, run: str, *, asks_token: bool) -> str:
    """Return the page's HTML; a page that asks for a token shows neither the model's name nor its card.

    The card has no images, and HTML in it is shown as text.

    Args:
        run: The run or checkpoint, whose card is shown.
    """
    examples, properties = list_examples(predictor), predictor.input_schema["properties"]
    sample = examples[0]
    return load_template("serve.html.jinja", package="bertkit.inference").render(
        name="bertkit" if asks_token else name,
        version=bertkit.__version__,
        fields={field: kind for field, kind in properties.items() if field in sample or kind["type"] == "string"},
        sample=sample,
        examples=examples,
        asks_token=asks_token,
        redacts="redacted" in predictor.output_schema["properties"],
        about=[] if asks_token else list_about(predictor, run),
        has_card=not asks_token and read_card(run) is not None,
    )


def list_examples(predictor: Predictor) -> list[dict[str, Any]]:
    """Return inputs to try; Chinese ones if over a quarter of the vocabulary are Chinese characters."""
    tokens = get_cached_tokenizer(predictor.settings.tokenizer).backend.get_vocab()
    is_chinese = 4 * sum(bool(HAN.fullmatch(token)) for token in tokens) > len(tokens)
    inputs = CHINESE_INPUTS if is_chinese else EXAMPLE_INPUTS
    others = [one for one in inputs.get(predictor.settings.head, ()) if one.keys() == predictor.sample.keys()]
    return others if is_chinese and others else [predictor.sample, *others]


def list_about(predictor: Predictor, run: str) -> list[tuple[str, str]]:
    """Return what a person should know of a model, as names and texts: score, data, labels, limits, date."""
    found, folder = {}, Path(run)
    if all((folder / name).is_file() for name in (METRICS_FILE, RECIPE_FILE, ENVIRONMENT)):
        metrics = {key: x for key, x in read_metrics(folder / METRICS_FILE).items() if isinstance(x, int | float)}
        table, metric = predictor.trained_as.table, predictor.trained_as.metric
        if rows := list_shown(table, metric, metrics):
            found["Score"] = describe_verdict(find_main(rows, metric), metrics)
        found["Data"] = Path(read_recipe(folder / RECIPE_FILE)["data"].get("dir", "")).name
        found["Trained"] = read_record(folder / ENVIRONMENT, dict).get("date", "").partition("T")[0]
    if "label" in predictor.output_schema["properties"] or "labels" in predictor.output_schema["properties"]:
        found["Labels"] = list_some(predictor.settings.labels, MOST_LABELS)
    for name, (key, words) in ABOUT_DECIDED.items():
        if isinstance(value := predictor.settings.decided.get(key), int | float):
            found[name] = words.format(value)
    is_whole = "long" in predictor.settings.lengths or predictor.settings.head == "BertForQuestionAnswering"
    most = f"at most {predictor.settings.max_length:,} tokens of a text"
    found["Reads"] = most if is_whole else f"{most}; longer ones are {predictor.task.long}"
    return [(name, text) for name, text in found.items() if text]


def read_card(run: str) -> str | None:
    """Return the HTML of a run's card, without images, and with HTML in it as text; None if it has none."""
    with suppress(UsageError):  # no connection to the Hub
        if path := find_file(run, CARD):
            text = CARD_HEADER.sub("", path.read_text(encoding="utf-8", errors="replace"))
            return MarkdownIt("commonmark", {"html": False}).enable("table").disable("image").render(text)
    return None


def render_card(name: str, run: str) -> str:
    """Return the page of a run's card."""
    return load_template("card.html.jinja", package="bertkit.inference").render(name=name, card=read_card(run) or "")


# --- The server -------------------------------------------------------------------------------------------------------


def serve(
    run: str,
    host: str = "127.0.0.1",
    port: int = 8080,
    token: str = "",
    precision: str = "auto",
    report: Report = ignore,
) -> None:
    """Serve a model until a signal ends it; requests that have begun are answered before.

    Args:
        run: As for `Predictor`, and `precision`.
        host: A name or an address of this machine.
        port: 0 takes a free one.
        token: Required of every client; needed unless the host is this machine only.
        report: Receives the address, and one line for each unexpected exception.
    """
    limit_kernels()
    with bind(host, port, token) as listener:
        port = listener.getsockname()[1]
        # In a thread that ends: next to a second thread with OpenMP workers, those of the model's thread sleep between
        # operations, and a text takes up to half as long again.
        with ThreadPoolExecutor(1) as loading:
            predictor = loading.submit(Predictor, run, precision=precision).result()
            loading.submit(add_export, predictor, FEW_TOKENS, report).result()
            loading.submit(predictor, [predictor.sample]).result()  # a model that has diverged says so now
        shown = f"[{host}]" if ":" in host else host
        app = Application(predictor, run, (*LOOPBACK, shown), token, report)
        report(f"{app.title} answers at http://{shown}:{port}; end it with Ctrl-C")
        uvicorn.Server(uvicorn.Config(app, **UVICORN)).run(sockets=[listener])
