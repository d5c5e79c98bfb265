"""The OpenAI-compatible HTTP door: a thin skin over the engine client, like the ZMQ door."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from uuid import uuid4

import msgspec
import zmq
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from frontend.admission import Admission, Admitted
from frontend.engine import EngineClient
from frontend.http_bodies import Body, chat_request, completion_requests, read_chat, read_completion
from frontend.http_replies import DONE, KEEP_ALIVE, Replies, error_body, event, total_usage, usage_body
from frontend.request import Delta, Failure, join_deltas
from protocol.messages import Generate, Usage

MAX_BODY_BYTES = 8 << 20
KEEP_ALIVE_SECONDS = 15.0
RETRY_SECONDS = 1  # what a client that is refused for load should wait
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
VERSION = "0.1.0"


class Refusal(Exception):
    """A request that ends with an error before any output."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code, self.message = code, message


class Answers:
    """What comes for the prompts of one HTTP request, until it is read.

    Deltas of a choice that is not read are joined, so a slow reader holds its own output and no more. Closing aborts what is open.
    """

    def __init__(self, engine: EngineClient):
        self.engine = engine
        self.handles: list[range] = []
        self.num_prompts: list[int] = []  # tokens of each
        self.news: dict[int, list[Delta]] = {}  # by the choice's index in the answer
        self.usages: list[Usage] = []
        self.failure: Failure | None = None
        self.arrived = asyncio.Event()

    def submit(self, request: Admitted, streams: bool) -> None:
        """Hand one prompt to the engine; its choices come after those of the prompts before."""
        first = sum(map(len, self.handles))

        def listen(news: Delta | Failure) -> None:
            if isinstance(news, Failure):
                self.failure = news
            else:
                self.news.setdefault(first + news.index, []).append(news)
                self.usages += [] if news.usage is None else [news.usage]
            self.arrived.set()

        self.handles.append(self.engine.submit(request, listen, streams))
        self.num_prompts.append(len(request.prompt_ids))

    async def read(self, timeout_s: float | None = None) -> AsyncIterator[list[tuple[int, Delta]]]:
        """What has come, joined by choice, until the last usage; an empty list after so long without anything. Raises Refusal."""
        while True:
            try:
                await asyncio.wait_for(self.arrived.wait(), timeout_s)
            except TimeoutError:
                yield []
                continue
            self.arrived.clear()
            news, self.news = self.news, {}
            if news:
                yield [(index, join_deltas(deltas)) for index, deltas in sorted(news.items())]
            if self.failure is not None:
                raise Refusal(self.failure.code, self.failure.message)
            if len(self.usages) == len(self.handles) and not self.news:
                return

    def close(self) -> None:
        """Abort what has not ended. Harmless when everything has."""
        self.engine.abort(itertools.chain.from_iterable(self.handles))


class HttpDoor:
    """The handlers of the routes."""

    def __init__(self, engine: EngineClient, admission: Admission, model: str):
        self.engine, self.admission, self.model = engine, admission, model

    # ---- completions ----------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        body = read_completion(await _read_body(request))
        return await self._answer(request, body, completion_requests(body), is_chat=False)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        body = read_chat(await _read_body(request))
        return await self._answer(request, body, [chat_request(body)], is_chat=True)

    async def _answer(self, request: Request, body: Body, wanted: list[Generate], is_chat: bool) -> Response:
        if body.model is not None:
            self._check_model(body.model)
        admitted = [await self._admit(generate) for generate in wanted]
        request_id = request.headers.get("x-request-id") or uuid4().hex
        replies = Replies(is_chat, request_id, self.model, bool(body.return_token_ids))
        answers = Answers(self.engine)
        try:
            for one in admitted:
                answers.submit(one, bool(body.stream))
        except zmq.Again:
            answers.close()
            raise Refusal(503, "the scheduler is far behind") from None
        headers = {"X-Request-Id": request_id}
        if body.stream:
            events = self._events(answers, replies, body)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers | STREAM_HEADERS)
        return _json(await self._whole(request, answers, replies), headers=headers)

    async def _admit(self, generate: Generate) -> Admitted:
        prompt_ids = generate.prompt_ids
        if self.admission.needs_text(generate):
            prompt_ids = await self.admission.prompt_ids_of_text(generate)
        return self.admission.admit(prompt_ids, generate.sampling, generate.cache_salt, generate.priority)

    async def _whole(self, request: Request, answers: Answers, replies: Replies) -> dict[str, object]:
        """Everything at once; a client that leaves ends it."""
        collecting = asyncio.ensure_future(_collect(answers))
        leaving = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise ClientDisconnect
            return replies.whole(await collecting, total_usage(answers.usages))
        finally:
            collecting.cancel()
            leaving.cancel()
            answers.close()

    async def _events(self, answers: Answers, replies: Replies, body: Body) -> AsyncIterator[bytes]:
        """The stream; a failed one carries an error before its end, so that no client takes it for whole."""
        options = body.stream_options
        is_counted = bool(options and options.continuous_usage_stats)
        counted = Usage(sum(answers.num_prompts), 0)
        try:
            async with aclosing(answers.read(KEEP_ALIVE_SECONDS)) as parts:
                async for part in parts:
                    if not part:
                        yield KEEP_ALIVE
                    for index, delta in part:
                        counted = msgspec.structs.replace(counted, completion_tokens=counted.completion_tokens + len(delta.token_ids))
                        usage = {"usage": usage_body(counted)} if is_counted else {}
                        yield event(replies.chunk(index, delta) | usage)
            if options and options.include_usage:
                yield event(replies.usage_chunk(total_usage(answers.usages)))
        except Refusal as refusal:
            yield event(error_body(refusal.code, refusal.message))
        finally:
            answers.close()
        yield DONE

    # ---- the rest -------------------------------------------------------------------------------------------------

    def _check_model(self, name: str) -> None:
        if name != self.model:
            raise Refusal(404, f"the model {name[:200]!r} does not exist; this engine serves {self.model!r}")

    def _model_body(self) -> dict[str, object]:
        limits = self.admission.limits
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "stepahead", "max_model_len": limits.max_model_len}

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        return _json({"object": "list", "data": [self._model_body()]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/{name}"""
        self._check_model(request.path_params["name"])
        return _json(self._model_body())

    async def health(self, request: Request) -> Response:
        """GET /health: this process answers."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: the scheduler answers too."""
        try:
            await self.engine.stats()
        except TimeoutError as error:
            raise Refusal(503, str(error)) from None
        return _json({"status": "ready"})

    async def version(self, request: Request) -> Response:
        """GET /version"""
        return _json({"version": VERSION})


async def _collect(answers: Answers) -> list[Delta]:
    """Every choice of a request that is not streamed: each comes once, when it ends."""
    by_choice: dict[int, Delta] = {}
    async with aclosing(answers.read()) as parts:
        async for part in parts:
            by_choice.update(part)
    return [by_choice[index] for index in sorted(by_choice)]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request) -> bytes:
    """The body, as far as it may go. Raises Refusal beyond."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise Refusal(413, f"the body may have at most {MAX_BODY_BYTES} bytes")
    return bytes(data)


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def _error(code: int, message: str) -> Response:
    headers = {"Retry-After": str(RETRY_SECONDS)} if code in (429, 503) else None
    return _json(error_body(code, message), code, headers)


def _guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Turns what a client did wrong, and what the engine refuses, into errors of OpenAI's shape."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except Refusal as refusal:
            return _error(refusal.code, refusal.message)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except (ValueError, msgspec.DecodeError) as error:
            return _error(400, str(error))

    return guarded


def make_app(engine: EngineClient, admission: Admission, model: str) -> Starlette:
    """The routes over an engine client."""
    door = HttpDoor(engine, admission, model)
    routes = [
        ("/v1/completions", door.completions, "POST"), ("/v1/chat/completions", door.chat_completions, "POST"),
        ("/v1/models", door.models, "GET"), ("/v1/models/{name:path}", door.one_model, "GET"), ("/health", door.health, "GET"),
        ("/ready", door.ready, "GET"), ("/version", door.version, "GET"), ("/ping", door.health, "GET"),
    ]  # fmt: skip

    async def http_error(request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")

    async def fault(request: Request, error: Exception) -> Response:
        return _error(500, "the engine has failed at this request; its log has the reason")

    handlers = {HTTPException: http_error, Exception: fault}
    return Starlette(routes=[Route(path, _guarded(call), methods=[m]) for path, call, m in routes], exception_handlers=handlers)
