"""The frontend process: python -m frontend.main CONFIG_FILE LIFELINE_FD"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import zmq

from frontend.admission import Admission, Limits
from frontend.engine import EngineClient
from frontend.http_door import make_app
from frontend.http_server import HttpServer, listen
from frontend.tokenizer import load_tokenizer
from frontend.zmq_door import ZmqDoor, open_door
from protocol.config import EngineConfig
from protocol.lifeline import Lifeline, Ready, remove_leftovers, run_child
from protocol.messages import PROTOCOL_VERSION, FrontendHello, SchedulerReady, decode_to_frontend
from protocol.transport import Endpoint, bind, check_handshake, open_socket

TOKENIZER_THREADS = 2
GOODBYE_MS = 300  # for the last messages to leave at shutdown


def main(config: EngineConfig, lifeline: Lifeline) -> None:
    """Serve clients until the lifeline is cut."""
    context = zmq.Context()
    try:
        door_socket = open_door(context)
        bind(door_socket, config.client_address)  # first, since it fails when the address cannot be had
        http_socket = None if config.port is None else listen(config.host, config.port)
        tokenizer, end_ids = load_tokenizer(config)
        endpoint = Endpoint(open_socket(context, zmq.DEALER), decode_to_frontend)
        endpoint.socket.connect(config.address("frontends"))
        limits = _greet_scheduler(endpoint, lifeline, config.epoch, 0 if tokenizer is None else tokenizer.size)
        if limits is not None:
            engine = EngineClient(endpoint, tokenizer)
            with ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer") as threads:
                takes_priority = config.scheduling_policy == "priority"
                admission = Admission(tokenizer, end_ids, limits, threads, config.seed, takes_priority)
                zmq_door = ZmqDoor(door_socket, engine, admission, config.served_model_name)
                server = None if http_socket is None else HttpServer(make_app(engine, admission, config.served_model_name), http_socket)
                asyncio.run(_serve(zmq_door, server, lifeline))
    finally:
        context.destroy(linger=GOODBYE_MS)
    remove_leftovers(config)


def _greet_scheduler(endpoint: Endpoint, lifeline: Lifeline, epoch: int, tokenizer_size: int) -> Limits | None:
    """The handshake; None when the lifeline is cut before the workers are ready."""
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


async def _serve(door: ZmqDoor, server: HttpServer | None, lifeline: Lifeline) -> None:
    loop = asyncio.get_running_loop()
    stop = loop.create_future()
    loop.add_reader(lifeline.fileno(), _settle, stop, None)
    # Anything that escapes a callback or a task is a fault of ours, and ends this process.
    loop.set_exception_handler(lambda _loop, context: _settle(stop, context.get("exception") or RuntimeError(context["message"])))
    door.engine.pump.start()
    door.start()
    if server is not None:
        server.start()
    lifeline.send(Ready())
    try:
        await stop
    finally:
        loop.remove_reader(lifeline.fileno())
        door.engine.pump.stop()
        door.close("the engine is shutting down")
        door.outbox.retry()
        if server is not None:
            await server.stop()


def _settle(stop: asyncio.Future, error: BaseException | None) -> None:
    if stop.done():
        return
    if error is None:
        stop.set_result(None)
    else:
        stop.set_exception(error)


if __name__ == "__main__":
    run_child(main)
