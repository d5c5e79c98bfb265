"""API keys at the HTTP door: who has none gets nothing but the health of the engine, and no key's prefixes serve another."""

import hashlib
import os

import httpx
import pytest

from protocol.api_keys import hash_of_key
from tests.engine_process import EngineProcess
from tests.test_checksum_engine import FLAGS

KEYS = ("first-key-of-many", "second key, with a blank", "third-ключ")
ROUTES = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/checksum"),
    ("GET", "/metrics"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version"), ("GET", "/ping"),
    ("GET", "/"), ("GET", "/docs"), ("PUT", "/v1/completions"), ("OPTIONS", "/v1/models"), ("DELETE", "/health/"),
    ("GET", "/health%2f..%2fmetrics"), ("GET", "//health"), ("GET", "/Health"),
]  # fmt: skip


def bearer(key: str, scheme: str = "Bearer") -> dict[str, bytes]:
    return {"Authorization": f"{scheme} {key}".encode()}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    """One key on the command line, the others in a file."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# keys of two users\n{KEYS[1]}\n\n{KEYS[2]}\n")
    with EngineProcess(*FLAGS, "--api-key", KEYS[0], "--api-key-file", str(file)) as engine:
        with httpx.Client(base_url=engine.url, timeout=30) as http:
            yield http


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "headers",
    [{}, bearer("wrong"), bearer(KEYS[0], "Basic"), {"Authorization": "Bearer"}, bearer(KEYS[0][:-1]), bearer(KEYS[0] + "x")],
)
def test_without_a_key_every_route_is_a_401_in_openais_shape(http, method, path, headers):
    response = http.request(method, path, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (401, 401, "authentication_error")
    assert response.headers["www-authenticate"] == "Bearer" and "API key" in error["message"]
    assert not any(key in response.text for key in KEYS)


def test_health_and_readiness_are_open(http):
    assert [http.get(path).status_code for path in ("/health", "/ready")] == [200, 200]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_every_configured_key_opens_every_route(http, key, scheme):
    headers = bearer(key, scheme)
    assert http.get("/v1/models", headers=headers).status_code == 200
    answer = http.post("/v1/completions", json={"prompt": [1], "max_tokens": 2}, headers=headers)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2


def test_a_prompt_cached_under_one_key_is_not_cached_for_another(http):
    def cached_tokens(key: str, **more: str) -> int:
        answer = http.post("/v1/completions", json={"prompt": [7] * 64, "max_tokens": 1} | more, headers=bearer(key)).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached_tokens(KEYS[0]), cached_tokens(KEYS[1])] == [0, 0]
    assert cached_tokens(KEYS[0]) == cached_tokens(KEYS[1]) == 48  # whole blocks, and the last token is computed
    assert cached_tokens(KEYS[0], cache_salt="another") == 0


def test_keys_come_from_the_environment_too():
    with EngineProcess(*FLAGS, environment={**os.environ, "STEPAHEAD_API_KEY": KEYS[0]}) as engine:
        assert httpx.get(f"{engine.url}/v1/models").status_code == 401
        assert httpx.get(f"{engine.url}/v1/models", headers=bearer(KEYS[0])).status_code == 200


def test_no_process_shows_a_key(tmp_path):
    """Neither on a child's command line nor in the file that children read."""
    file = tmp_path / "keys"
    file.write_text(KEYS[0])
    with EngineProcess(*FLAGS, "--api-key-file", str(file)) as engine:
        texts = [open(f"/proc/{pid}/cmdline").read() for pid in engine.pids]
        texts += [path.read_text() for path in engine.run_dir.iterdir() if path.is_file()]
    assert len(texts) >= 5 and not any(KEYS[0] in text for text in texts)


def test_keys_are_kept_as_hashes():
    assert hash_of_key(b"abc") == hashlib.sha256(b"abc").hexdigest()


@pytest.mark.parametrize(("content", "reason"), [(b"", "no key"), (b"# only a comment\n", "no key"), (b"\xff\xfe", "UTF-8"), (None, "")])
def test_a_key_file_without_keys_ends_the_start(tmp_path, content, reason):
    """Else an engine that was meant to be closed would be open."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    engine = EngineProcess(*FLAGS, "--api-key-file", str(file))
    try:
        assert engine.process.wait(30) == 2
        assert "--api-key-file" in engine.reason() and reason in engine.reason()
    finally:
        engine.kill_all()
