"""A frontend process: python -m frontend.main CONFIG_FILE LIFELINE_FD INDEX"""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import zmq

from frontend.admission import Admission, Limits
from frontend.engine import EngineClient
from frontend.http_door import make_app
from frontend.http_server import HttpServer
from frontend.request import Failure
from frontend.sampling_defaults import load_defaults
from frontend.tokenizer import load_tokenizer
from frontend.zmq_door import ZmqDoor, open_door
from protocol.address import door_address
from protocol.config import EngineConfig
from protocol.lifeline import DRAIN, FAULT, Lifeline, Ready, remove_leftovers, run_child
from protocol.messages import PROTOCOL_VERSION, FrontendHello, SchedulerReady, decode_to_frontend
from protocol.transport import Endpoint, bind, check_handshake, open_socket

TOKENIZER_THREADS = 2
GOODBYE_MS = 300  # for the last messages to leave at shutdown
REPORT_SECONDS = 1.0
CLOSING = Failure(503, "the engine is shutting down")
FAILED = Failure(500, "the engine has failed; its log has the reason")


def main(config: EngineConfig, lifeline: Lifeline, index: int) -> None:
    """Serve clients until the lifeline says otherwise."""
    context = zmq.Context()
    try:
        door_socket = open_door(context)
        bind(door_socket, door_address(config.client_address, index))  # first, since it fails when the address cannot be had
        tokenizer, end_ids = load_tokenizer(config)
        defaults = load_defaults(config)
        endpoint = Endpoint(open_socket(context, zmq.DEALER), decode_to_frontend)
        endpoint.socket.connect(config.address("frontends"))
        limits = _greet_scheduler(endpoint, lifeline, config.epoch, 0 if tokenizer is None else tokenizer.size)
        if limits is not None:
            engine = EngineClient(endpoint, tokenizer, config.stream_interval)
            with ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer") as threads:
                takes_priority = config.scheduling_policy == "priority"
                admission = Admission(tokenizer, end_ids, limits, threads, config.seed, takes_priority, defaults)
                frontend = Frontend(config, engine, admission, door_socket)
                asyncio.run(frontend.serve(lifeline))
    finally:
        context.destroy(linger=GOODBYE_MS)
    remove_leftovers(config)


def _greet_scheduler(endpoint: Endpoint, lifeline: Lifeline, epoch: int, tokenizer_size: int) -> Limits | None:
    """The handshake; None when this process is to stop before the workers are ready."""
    endpoint.send(FrontendHello(PROTOCOL_VERSION, epoch, tokenizer_size))
    poller = zmq.Poller()
    poller.register(endpoint.socket, zmq.POLLIN)
    poller.register(lifeline.fileno(), zmq.POLLIN)
    poller.poll()
    if lifeline.is_cut():
        return None
    ready = endpoint.receive()
    if not isinstance(ready, SchedulerReady):
        raise ValueError(f"the scheduler began with {type(ready).__name__}, not with SchedulerReady")
    check_handshake(ready.version, ready.epoch, PROTOCOL_VERSION, epoch, "the scheduler")
    return Limits(ready.max_model_len, ready.vocab_size)


class Frontend:
    """Both doors over one engine client, from readiness to the end."""

    def __init__(self, config: EngineConfig, engine: EngineClient, admission: Admission, door_socket: zmq.Socket):
        self.config, self.engine = config, engine
        self.zmq_door = ZmqDoor(door_socket, engine, admission, config.served_model_name)
        self.last_word = CLOSING  # to requests that are open at the end
        self.http: HttpServer | None = None
        if config.http_fd is not None:
            self.http = HttpServer(make_app(engine, admission, config), socket.socket(fileno=config.http_fd), engine.metrics)

    async def serve(self, lifeline: Lifeline) -> None:
        """Until the lifeline is cut, or the open requests have ended once it asks for that."""
        loop = asyncio.get_running_loop()
        stop: asyncio.Future[None] = loop.create_future()
        loop.add_reader(lifeline.fileno(), self._on_lifeline, lifeline, stop)
        # Anything that escapes a callback or a task is a fault of ours, and ends this process.
        loop.set_exception_handler(lambda _loop, context: _settle(stop, context.get("exception") or RuntimeError(context["message"])))
        self.engine.pump.start()
        self.zmq_door.start()
        if self.http is not None:
            self.http.start()
        if self.config.frontend_workers > 1:
            self._report()
        lifeline.send(Ready())
        try:
            await stop
        finally:
            loop.remove_reader(lifeline.fileno())
            await self._close()

    def _on_lifeline(self, lifeline: Lifeline, stop: asyncio.Future[None]) -> None:
        order = lifeline.order()
        if order == DRAIN:
            self.engine.closing = CLOSING
            self._end_when_drained(stop, self.config.shutdown_timeout)
            return
        if order == FAULT:
            self.last_word = FAILED
        _settle(stop, None)

    def _end_when_drained(self, stop: asyncio.Future[None], seconds_left: float, pause: float = 0.02) -> None:
        if seconds_left <= 0 or not (self.engine.open or self.zmq_door.clients):
            _settle(stop, None)
        else:
            asyncio.get_running_loop().call_later(pause, self._end_when_drained, stop, seconds_left - pause)

    async def _close(self) -> None:
        self.engine.end_all(self.last_word)
        self.engine.pump.stop()
        self.zmq_door.close(self.last_word)
        self.zmq_door.outbox.retry()
        if self.http is not None:
            await self.http.stop()

    def _report(self) -> None:
        self.engine.send_report()
        asyncio.get_running_loop().call_later(REPORT_SECONDS, self._report)


def _settle(stop: asyncio.Future[None], error: BaseException | None) -> None:
    if stop.done():
        return
    if error is None:
        stop.set_result(None)
    else:
        stop.set_exception(error)


if __name__ == "__main__":
    run_child(main)
