"""A client of the ZMQ door that sends and receives frames as they are."""

import time

import zmq

from protocol.messages import Generate, KeepAlive, Output, decode_to_client, encode
from protocol.sampling import SamplingParams

VERSION = b"\x01"


class RawClient:
    """A DEALER socket that sends what it is told."""

    def __init__(self, address: str, high_water_mark: int = 0):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 500
        self.socket.rcvhwm = self.socket.sndhwm = high_water_mark
        self.socket.connect(address)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.context.destroy(linger=500)

    def send(self, message) -> None:
        self.socket.send_multipart([VERSION, encode(message)])

    def receive(self, seconds: float = 5.0):
        """The next message that is no keep-alive."""
        deadline = time.monotonic() + seconds
        while self.socket.poll(max(0, deadline - time.monotonic()) * 1000):
            version, payload = self.socket.recv_multipart()
            assert version == VERSION
            message = decode_to_client(payload)
            if not isinstance(message, KeepAlive):
                return message
        return None

    def outputs(self, request_id: int) -> list:
        """All messages of a request; others in between are a fault."""
        messages = []
        while not messages or (isinstance(messages[-1], Output) and messages[-1].usage is None):
            messages.append(self.receive())
            assert messages[-1] is not None and messages[-1].request_id == request_id, messages[-2:]
        return messages

    def serves(self) -> bool:
        """Whether a good request is answered as it should be."""
        self.send(Generate(999_999, prompt_ids=[1], sampling=SamplingParams(max_tokens=2), stream=False))
        reply = self.receive()
        return isinstance(reply, Output) and reply.token_ids == [2, 3]
