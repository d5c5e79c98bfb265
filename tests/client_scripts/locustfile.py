"""A load for locust: chats, streamed and whole, and completions that their user leaves early."""

import json

from locust import HttpUser, between, task

QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16, "temperature": 0}


class Asker(HttpUser):
    """Waits a little between two requests."""

    wait_time = between(0.0, 0.1)

    @task(3)
    def streamed_chat(self) -> None:
        """A stream must have its end and its usage."""
        body = QUESTION | {"stream": True, "stream_options": {"include_usage": True}}
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True, name="streamed") as response:
            frames = [line[6:] for line in response.iter_lines() if line.startswith(b"data: ")]
            if frames[-1:] != [b"[DONE]"] or json.loads(frames[-2])["usage"]["completion_tokens"] == 0:
                response.failure(f"the stream broke off: {frames[-2:]}")

    @task
    def whole_chat(self) -> None:
        """The same without streaming."""
        with self.client.post("/v1/chat/completions", json=QUESTION, catch_response=True, name="whole") as response:
            if "Paris" not in response.json()["choices"][0]["message"]["content"]:
                response.failure(response.text)

    @task
    def left_completion(self) -> None:
        """A stream of which only the beginning is read."""
        body = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True, name="left") as response:
            next(response.iter_lines())
            response.close()
            response.success()
