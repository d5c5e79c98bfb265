"""A frontend process with a scheduler that the test plays: real sockets, real processes, no model."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import zmq

from protocol.config import EngineConfig, save_config
from protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    AddRequest,
    Finished,
    FrontendHello,
    GetStats,
    SchedulerReady,
    Snapshot,
    Stats,
    TokenBatch,
    decode_from_frontend,
    pack,
    unpack,
)
from protocol.metrics import STEP_TOKENS
from protocol.places import listen_http, with_listener
from protocol.transport import RoutedEndpoint, bind, open_socket
from tests import tiny_tokenizers

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 1000
MAX_MODEL_LEN = 200
STEP_SECONDS = 0.002


class ScriptedScheduler(threading.Thread):
    """Answers each request with tokens prompt[-1] + 1, + 2, … (modulo the vocabulary), one per step, until told or its limit.

    `script(prompt_ids)` may give the output ids instead. The test may set `paused`.
    """

    def __init__(self, config: EngineConfig, script=None):
        super().__init__(daemon=True)
        self.config = config
        self.script = script
        self.context = zmq.Context()
        self.endpoint = RoutedEndpoint(open_socket(self.context, zmq.ROUTER), decode_from_frontend)
        bind(self.endpoint.socket, config.address("frontends"))
        self.running: dict[int, list] = {}  # handle -> [request, ids still to send]
        self.added: list[AddRequest] = []
        self.aborted: list[int] = []
        self.paused = False
        self.stopping = False
        self.tokenizer_size = None
        self.frontend = None

    def run(self) -> None:
        while not self.stopping:
            self.endpoint.socket.poll(STEP_SECONDS * 1000)
            for identity, message in self.endpoint.drain():
                self.frontend = identity
                self.handle(message)
            if self.running and not self.paused:
                self.step()
        self.context.destroy(linger=0)

    def send(self, message: object) -> None:
        self.endpoint.send_to(self.frontend, message)

    def handle(self, message: object) -> None:
        match message:
            case FrontendHello():
                self.tokenizer_size = message.tokenizer_size
                self.send(SchedulerReady(PROTOCOL_VERSION, self.config.epoch, MAX_MODEL_LEN, VOCAB_SIZE))
            case AddRequest():
                self.added.append(message)
                for choice in range(1 + len(message.more_seeds)):
                    self.running[message.handle + choice] = [message, self.output_of(message)[choice:]]  # so that they differ
            case AbortRequests(handles):
                self.aborted += handles
                for handle in handles:
                    self.running.pop(handle, None)
            case GetStats():
                self.send(Snapshot(Stats(len(self.running), *[0] * 13), [0] * (len(STEP_TOKENS) + 1), 0, []))

    def output_of(self, request: AddRequest) -> list[int]:
        prompt = unpack(request.prompt).tolist()
        if self.script is not None:
            return self.script(prompt)[: request.max_tokens]
        return [(prompt[-1] + 1 + index) % VOCAB_SIZE for index in range(request.max_tokens)]

    def step(self) -> None:
        handles, tokens, finished = [], [], []
        for handle, (request, rest) in self.running.items():
            token = rest.pop(0)
            handles.append(handle)
            tokens.append(token)
            if token in request.end_ids:
                finished.append(Finished(handle, "stop"))
            elif not rest:
                finished.append(Finished(handle, "length"))
        for last in finished:
            del self.running[last.handle]
        self.send(TokenBatch(np.asarray(handles, "<i8").tobytes(), pack(tokens), finished))


class RunningFrontend:
    """A frontend process of a checksum configuration (no tokenizer), or of a model folder."""

    def __init__(self, folder: Path, model: str = "checksum", script=None, **options):
        executor = "checksum" if model == "checksum" else "transformer"
        self.config = EngineConfig(
            model=model,
            served_model_name="scripted",
            run_dir=str(folder / "run"),
            client_address=f"ipc://{folder / 'engine.sock'}",
            epoch=7,
            executor=executor,
            **{"port": None} | options,
        )
        Path(self.config.run_dir).mkdir(mode=0o700)
        listener = listen_http(self.config)
        if listener is not None:
            self.config = with_listener(self.config, listener)
        inherited = [] if listener is None else [listener.fileno()]
        self.scheduler = ScriptedScheduler(self.config, script)
        self.scheduler.start()
        ours, theirs = socket.socketpair()
        self.lifeline = ours
        self.process = subprocess.Popen(
            [sys.executable, "-m", "frontend.main", str(save_config(self.config)), str(theirs.fileno()), "0"],
            cwd=ROOT,
            pass_fds=[theirs.fileno(), *inherited],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        theirs.close()
        if listener is not None:
            listener.close()
        ours.settimeout(30)
        self.first_line = ours.recv(4096)

    def __enter__(self) -> "RunningFrontend":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        return self.config.client_address

    def stop(self) -> int:
        """Cut the lifeline; returns the exit code."""
        self.lifeline.close()
        code = self.process.wait(10)
        self.scheduler.stopping = True
        self.scheduler.join(5)
        return code


def wait_until(condition, seconds: float = 5.0) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def text_frontend(folder: Path, files: dict[str, str], **options) -> RunningFrontend:
    """A frontend with a tokenizer, and more files of a model, whose scheduler answers a prompt with the ids of the same text again."""
    for name, text in files.items():
        (folder / name).write_text(text)
    tiny_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return RunningFrontend(folder, model=str(folder), script=list, **options)
