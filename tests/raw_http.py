"""A client of the HTTP door over a plain connection: many at once cost little, and each can stop reading or leave when it likes."""

import asyncio
import json
from collections.abc import AsyncIterator
from urllib.parse import urlsplit


class RawHttp:
    """One connection; requests one after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.status, self.headers = 0, {}

    @classmethod
    async def connect(cls, url: str, limit: int = 2**16) -> "RawHttp":
        """`limit` is how many bytes are taken off the network without being asked for."""
        place = urlsplit(url)
        return cls(*await asyncio.open_connection(place.hostname, place.port, limit=limit))

    async def post(self, path: str, body: dict) -> int:
        """Send a request and read the head of its answer; returns the status."""
        content = json.dumps(body).encode()
        self.writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(content), content))
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        self.status = int(first.split()[1])
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return self.status

    async def read(self) -> AsyncIterator[bytes]:
        """The answer's body in the parts in which it comes."""
        if "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
            return
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readuntil(b"\r\n")

    async def json(self) -> dict:
        """The whole answer."""
        return json.loads(b"".join([part async for part in self.read()]))

    async def events(self) -> AsyncIterator[dict | str]:
        """Of a stream: each event's content; comments and the end as they are."""
        rest = b""
        async for part in self.read():
            *frames, rest = (rest + part).split(b"\n\n")
            for frame in frames:
                text = frame.decode()
                is_content = text.startswith("data: ") and text != "data: [DONE]"
                yield json.loads(text[6:]) if is_content else text.removeprefix("data: ")
        assert rest == b""

    def close(self) -> None:
        """Without a word."""
        self.writer.transport.abort()
