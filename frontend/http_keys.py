"""Who may use the HTTP door: an API key is asked for everywhere, save where a load balancer looks."""

import hmac

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from frontend.http_replies import error_body
from protocol.api_keys import hash_of_key

OPEN_PATHS = ("/health", "/ready")


class KeyGate:
    """Lets requests with a known key through, with its hash in the scope's `key_hash`; with no keys configured, all."""

    def __init__(self, app: ASGIApp, hashes: list[str]):
        self.app, self.hashes = app, hashes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        scope["key_hash"] = ""
        if self.hashes and scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            found = self._find(key.strip()) if scheme.lower() == b"bearer" else None
            if found is None:
                body = msgspec.json.encode(error_body(401, "a valid API key is needed: send it as Authorization: Bearer KEY"))
                await Response(body, 401, {"WWW-Authenticate": "Bearer"}, "application/json")(scope, receive, send)
                return
            scope["key_hash"] = found
        await self.app(scope, receive, send)

    def _find(self, key: bytes) -> str | None:
        """Compares with every hash in constant time, so that the time tells nothing of the keys."""
        given = hash_of_key(key)
        matches = [known for known in self.hashes if hmac.compare_digest(given, known)]
        return matches[0] if matches else None
