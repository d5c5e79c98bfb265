"""Everything that users of the openai package do with completions and chats: python openai_client.py URL KEY"""

import asyncio

from common import LENGTH, MESSAGES, MODEL, PROMPT, TOO_LONG, arguments, failure, outcome, report
from openai import AsyncOpenAI, OpenAI

GREEDY = {"model": MODEL, "max_tokens": LENGTH, "temperature": 0}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def whole(answer: object) -> dict[str, object]:
    """A completion or a chat completion."""
    (choice,) = answer.choices
    text = choice.message.content if hasattr(choice, "message") else choice.text
    return outcome(text, choice.finish_reason, answer.usage.prompt_tokens, answer.usage.completion_tokens)


def joined(chunks: list) -> dict[str, object]:
    """A stream's chunks, the last of which has the usage."""
    *chunks, last = chunks
    choices = [chunk.choices[0] for chunk in chunks]
    texts = [choice.delta.content if hasattr(choice, "delta") else choice.text for choice in choices]
    (reason,) = {choice.finish_reason for choice in choices} - {None}
    texts = list(filter(None, texts))
    return outcome("".join(texts), reason, last.usage.prompt_tokens, last.usage.completion_tokens, len(texts))


def answers(client: OpenAI) -> dict[str, object]:
    """Completions and chats, whole and streamed."""
    complete, chat = client.completions.create, client.chat.completions.create
    with client.chat.completions.stream(messages=MESSAGES, stream_options={"include_usage": True}, **GREEDY) as events:
        helped = events.get_final_completion()
    return {
        "models": [model.id for model in client.models.list()],
        "model": client.models.retrieve(MODEL).id,
        "completion": whole(complete(prompt=PROMPT, **GREEDY)),
        "completion_stream": joined(list(complete(prompt=PROMPT, **GREEDY, **WITH_USAGE))),
        "chat": whole(chat(messages=MESSAGES, **GREEDY)),
        "chat_stream": joined(list(chat(messages=MESSAGES, **GREEDY, **WITH_USAGE))),
        "chat_stream_helper": whole(helped),
    }


def options(client: OpenAI) -> dict[str, object]:
    """Several choices, stop strings, scores, extra fields, and a stream that is left early."""
    seeded = {"model": MODEL, "prompt": "The", "max_tokens": LENGTH, "seed": 7, "n": 2}
    first, again = (client.completions.create(**seeded) for _ in range(2))
    stopped = client.completions.create(prompt=PROMPT, stop=[" 6"], **GREEDY)
    scored = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
    extra = client.completions.create(prompt=PROMPT, extra_body={"min_tokens": 4, "top_k": 1, "return_token_ids": True}, **GREEDY)
    with client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=200, stream=True) as stream:
        next(iter(stream))
    return {
        "seeded": [[choice.text for choice in answer.choices] for answer in (first, again)],
        "stopped": whole(stopped),
        "scores": [[entry.token, entry.logprob, len(entry.top_logprobs)] for entry in scored.choices[0].logprobs.content],
        "extra_ids": extra.choices[0].token_ids,
    }


async def many(url: str, key: str) -> list[dict[str, object]]:
    """Twelve streamed chats at once on the asynchronous client."""

    async def one(client: AsyncOpenAI) -> dict[str, object]:
        stream = await client.chat.completions.create(messages=MESSAGES, **GREEDY, **WITH_USAGE)
        return joined([chunk async for chunk in stream])

    async with AsyncOpenAI(base_url=url + "/v1", api_key=key) as client:
        return await asyncio.gather(*(one(client) for _ in range(12)))


def errors(client: OpenAI, url: str) -> dict[str, object]:
    """What a user does wrong."""
    stranger = OpenAI(base_url=url + "/v1", api_key="wrong")
    complete, chat = client.completions.create, client.chat.completions.create
    return {
        "unknown_model": failure(lambda: complete(prompt=PROMPT, **GREEDY | {"model": "other"})),
        "bad_value": failure(lambda: complete(prompt=PROMPT, **GREEDY | {"temperature": -1})),
        "bad_value_in_a_stream": failure(lambda: list(chat(messages=MESSAGES, stream=True, **GREEDY | {"temperature": -1}))),
        "unknown_field": failure(lambda: complete(prompt=PROMPT, extra_body={"temperatur": 1}, **GREEDY)),
        "far_too_long": failure(lambda: complete(prompt=TOO_LONG * 20, **GREEDY)),
        "too_long": failure(lambda: complete(prompt=TOO_LONG, **GREEDY)),
        "too_long_chat": failure(lambda: chat(messages=[{"role": "user", "content": TOO_LONG}], **GREEDY)),
        "wrong_key": failure(lambda: stranger.completions.create(prompt=PROMPT, **GREEDY)),
    }


def main() -> None:
    """Run all and print what came."""
    url, key = arguments()
    client = OpenAI(base_url=url + "/v1", api_key=key)
    report("openai", answers(client) | options(client) | {"many": asyncio.run(many(url, key))} | errors(client, url))


if __name__ == "__main__":
    main()
