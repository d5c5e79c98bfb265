"""The OpenAI-compatible HTTP door: a thin skin over the engine client, like the ZMQ door."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from uuid import uuid4

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from frontend.admission import Admission, Admitted
from frontend.engine import EngineClient, Unavailable
from frontend.http_answers import Answers, Refusal
from frontend.http_bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    chat_messages,
    chat_request,
    completion_requests,
    read_body,
)
from frontend.http_keys import KeyGate
from frontend.http_replies import DONE, KEEP_ALIVE, Prompt, Replies, error_body, event, usage_body
from frontend.metrics import add_up
from frontend.metrics_page import render
from protocol.config import EngineConfig
from protocol.messages import Generate, Snapshot, Usage

MAX_BODY_BYTES = 8 << 20
MAX_REQUEST_ID = 128  # characters of X-Request-Id
REFUSED_SECONDS = 0.1  # a request that the scheduler refuses is refused by then, and gets a status instead of a stream
# What OpenAI's clients go by, which would repeat both by themselves: a request that broke the engine would break it again.
RETRY_HEADERS = {503: {"Retry-After": "1", "Retry-After-Ms": "1000", "X-Should-Retry": "true"}, 500: {"X-Should-Retry": "false"}}
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
VERSION = "0.1.0"


class HttpDoor:
    """The handlers of the routes."""

    def __init__(self, engine: EngineClient, admission: Admission, config: EngineConfig):
        self.engine, self.admission, self.config = engine, admission, config
        self.model = config.served_model_name
        self.tokenizer = engine.tokenizer

    # ---- completions ----------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        body = await self._read(request, CompletionBody)
        return await self._answer(request, body, completion_requests(body))

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        body = await self._read(request, ChatBody)
        return await self._answer(request, body, [chat_request(body)])

    async def _answer(self, request: Request, body: Body, wanted: list[Generate]) -> Response:
        answers = Answers(self.engine, time.monotonic())
        request_id = _request_id(request)
        admitted = [await self._admit(generate, request.scope["key_hash"]) for generate in wanted]
        prompts = [Prompt(one.prompt_ids, self._prompt_text(body, generate)) for one, generate in zip(admitted, wanted)]
        replies = Replies(body, prompts, request_id, self.model, self.tokenizer)
        try:
            for one in admitted:
                answers.submit(one, bool(body.stream))
        except Unavailable as error:
            answers.close()
            raise Refusal(503, str(error)) from None
        headers = {"X-Request-Id": request_id}
        if body.stream:
            return EventStream(answers, self._events(answers, replies, body), headers | STREAM_HEADERS)
        return _json(await self._whole(request, answers, replies), headers=headers)

    async def _admit(self, generate: Generate, key_hash: str) -> Admitted:
        prompt_ids = generate.prompt_ids
        if self.admission.needs_text(generate):
            prompt_ids = await self.admission.prompt_ids_of_text(generate)
        return self.admission.admit(prompt_ids, generate.sampling, generate.cache_salt, generate.priority, bytes.fromhex(key_hash))

    def _prompt_text(self, body: Body, generate: Generate) -> str:
        if not (isinstance(body, CompletionBody) and body.echo):
            return ""
        if generate.prompt is not None or self.tokenizer is None:
            return generate.prompt or ""
        return self.tokenizer.decode(generate.prompt_ids, body.skip_special_tokens is not False)

    async def _whole(self, request: Request, answers: Answers, replies: Replies) -> dict[str, object]:
        """Everything at once; a client that leaves ends it."""
        collecting = asyncio.ensure_future(answers.collect())
        leaving = asyncio.ensure_future(_disconnected(request.receive))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise ClientDisconnect
            return replies.whole(await collecting, answers.usages)
        finally:
            collecting.cancel()
            leaving.cancel()
            answers.close()

    async def _events(self, answers: Answers, replies: Replies, body: Body) -> AsyncIterator[bytes]:
        """The stream; a failed one carries an error before its end, so that no client takes it for whole."""
        options = body.stream_options
        is_counted = bool(options and options.continuous_usage_stats)
        num_prompt, num_new = sum(len(prompt.token_ids) for prompt in replies.prompts), 0
        try:
            async with aclosing(answers.read(self.config.sse_keep_alive_interval)) as parts:
                async for part in parts:
                    if not part:
                        yield KEEP_ALIVE
                    for index, delta in part:
                        num_new += len(delta.token_ids)
                        usage = {"usage": usage_body(replies.usage([Usage(num_prompt, num_new)]))} if is_counted else {}
                        for chunk in replies.chunks(index, delta):
                            yield event(chunk | usage)
            if options and options.include_usage:
                yield event(replies.usage_chunk(answers.usages))
        except Refusal as refusal:
            yield event(error_body(refusal.code, refusal.message))
        finally:
            answers.close()
        yield DONE

    # ---- tokens ---------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        body = await self._read(request, TokenizeBody)
        messages = None if body.messages is None else chat_messages(body.messages)
        generate = Generate(0, prompt=body.prompt, messages=messages, add_special_tokens=body.add_special_tokens is not False)
        self.admission.needs_text(generate)
        tokens = await self.admission.prompt_ids_of_text(generate)
        strings = [self.tokenizer.backend.id_to_token(token) for token in tokens] if body.return_token_strs else None
        limit = self.admission.limits.max_model_len
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        body = await self._read(request, DetokenizeBody)
        return _json({"prompt": self.admission.text_of(body.tokens)})

    # ---- the rest -------------------------------------------------------------------------------------------------

    async def _read(self, request: Request, kind: type) -> Body:
        """The body of a request to the served model. Raises Refusal, ValueError or a DecodeError."""
        body = read_body(await _read_bytes(request), kind, self.config.ignore_unknown_fields)
        if body.model is not None:
            self._check_model(body.model)
        return body

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
        """GET /health: this process lives, and it would not without the others. Costs no GPU."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: the scheduler answers, and requests are taken."""
        if self.engine.closing is not None:
            raise Refusal(self.engine.closing.code, self.engine.closing.message)
        await self._snapshot()
        return _json({"status": "ready"})

    async def version(self, request: Request) -> Response:
        """GET /version"""
        return _json({"version": VERSION})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics"""
        snapshot = await self._snapshot()
        report = add_up([self.engine.metrics.report(), *snapshot.reports])
        page, content_type = render(self.config, snapshot, report, request.headers.get("accept", ""))
        return Response(page, headers={"Content-Type": content_type})

    async def _snapshot(self) -> Snapshot:
        try:
            return await self.engine.snapshot()
        except TimeoutError as error:
            raise Refusal(503, str(error)) from None


class EventStream(Response):
    """A streamed answer, once it is known not to be refused. Its client's leaving closes the answers, and so ends the events.

    Starlette's own begins a group of tasks for each answer, which takes 0.3 ms of a first token's time.
    """

    def __init__(self, answers: Answers, events: AsyncIterator[bytes], headers: dict[str, str]):
        self.answers, self.events, self.status_code = answers, events, 200
        self.raw_headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        leaving = asyncio.ensure_future(_disconnected(receive))
        leaving.add_done_callback(lambda _: self.answers.close())
        try:
            await self.answers.heard(REFUSED_SECONDS)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with aclosing(self.events) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Refusal as refusal:
            await _error(refusal.code, refusal.message)(scope, receive, send)
        finally:
            leaving.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_bytes(request: Request) -> bytes:
    """The body, as far as it may go. Raises Refusal beyond."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise Refusal(413, f"the body may have at most {MAX_BODY_BYTES} bytes")
    return bytes(data)


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id") or uuid4().hex
    if len(given) > MAX_REQUEST_ID or not given.isprintable():
        raise ValueError(f"X-Request-Id must be printable and have at most {MAX_REQUEST_ID} characters, got {len(given)}")
    return given


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def _error(code: int, message: str) -> Response:
    return _json(error_body(code, message), code, RETRY_HEADERS.get(code))


def _guarded(handler: Callable[[Request], Awaitable[Response]], engine: EngineClient) -> Callable[[Request], Awaitable[Response]]:
    """Turns what a client did wrong, and what the engine refuses, into errors of OpenAI's shape."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except Refusal as refusal:
            return _error(refusal.code, refusal.message)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            engine.metrics.rejected["invalid"] += 1
            return _error(400, "the body is nested too deeply" if isinstance(error, RecursionError) else str(error))

    return guarded


def make_app(engine: EngineClient, admission: Admission, config: EngineConfig) -> ASGIApp:
    """The routes over an engine client, behind the keys."""
    door = HttpDoor(engine, admission, config)
    routes = [
        ("/v1/completions", door.completions, "POST"), ("/v1/chat/completions", door.chat_completions, "POST"),
        ("/v1/models", door.models, "GET"), ("/v1/models/{name:path}", door.one_model, "GET"), ("/health", door.health, "GET"),
        ("/ready", door.ready, "GET"), ("/version", door.version, "GET"), ("/ping", door.health, "GET"),
        ("/metrics", door.metrics, "GET"), ("/tokenize", door.tokenize, "POST"), ("/detokenize", door.detokenize, "POST"),
    ]  # fmt: skip

    async def http_error(request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")

    async def fault(request: Request, error: Exception) -> Response:
        return _error(500, "the engine has failed at this request; its log has the reason")

    handlers = {HTTPException: http_error, Exception: fault}
    app = Starlette(routes=[Route(path, _guarded(call, engine), methods=[m]) for path, call, m in routes], exception_handlers=handlers)
    return KeyGate(app, config.api_key_hashes)
