"""LiteLLM's two ways to such an engine, openai/ and hosted_vllm/: python litellm_client.py URL KEY"""

import asyncio

import litellm
from common import LENGTH, MESSAGES, MODEL, PROMPT, TOO_LONG, arguments, failure, outcome, report

WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def whole(answer: object) -> dict[str, object]:
    """A completion or a chat completion."""
    (choice,) = answer.choices
    text = choice.message.content if hasattr(choice, "message") else choice.text
    return outcome(text, choice.finish_reason, answer.usage.prompt_tokens, answer.usage.completion_tokens)


def joined(chunks: list) -> dict[str, object]:
    """A stream's chunks, one of which has the usage."""
    choices = [choice for chunk in chunks for choice in chunk.choices]
    texts = [choice.delta.content if hasattr(choice, "delta") else choice.text for choice in choices]
    texts = list(filter(None, texts))
    (reason,) = {choice.finish_reason for choice in choices} - {None}
    (usage,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    return outcome("".join(texts), reason, usage.prompt_tokens, usage.completion_tokens, len(texts))


def answers(settings: dict[str, object]) -> dict[str, object]:
    """Completions and chats, whole and streamed."""
    hosted = settings | {"model": "hosted_vllm/" + MODEL}
    return {
        "chat": whole(litellm.completion(messages=MESSAGES, **settings)),
        "chat_stream": joined(list(litellm.completion(messages=MESSAGES, **settings, **WITH_USAGE))),
        "hosted_chat": whole(litellm.completion(messages=MESSAGES, **hosted)),
        "hosted_chat_stream": joined(list(litellm.completion(messages=MESSAGES, **hosted, **WITH_USAGE))),
        "completion": whole(litellm.text_completion(prompt=PROMPT, **settings)),
        "completion_stream": joined(list(litellm.text_completion(prompt=PROMPT, **settings, **WITH_USAGE))),
    }


async def many(settings: dict[str, object]) -> list[dict[str, object]]:
    """Six streamed chats at once."""

    async def one() -> dict[str, object]:
        stream = await litellm.acompletion(messages=MESSAGES, **settings, **WITH_USAGE)
        return joined([chunk async for chunk in stream])

    return await asyncio.gather(*(one() for _ in range(6)))


def errors(settings: dict[str, object]) -> dict[str, object]:
    """What a user does wrong."""
    complete, chat = litellm.text_completion, litellm.completion
    too_long = [{"role": "user", "content": TOO_LONG}]
    return {
        "unknown_model": failure(lambda: chat(messages=MESSAGES, **settings | {"model": "openai/other"})),
        "bad_value": failure(lambda: chat(messages=MESSAGES, **settings | {"temperature": -1})),
        "bad_value_in_a_stream": failure(lambda: list(chat(messages=MESSAGES, stream=True, **settings | {"temperature": -1}))),
        "too_long": failure(lambda: complete(prompt=TOO_LONG, **settings)),
        "too_long_chat": failure(lambda: chat(messages=too_long, **settings)),
        "wrong_key": failure(lambda: chat(messages=MESSAGES, **settings | {"api_key": "wrong"})),
        "hosted_wrong_key": failure(lambda: chat(messages=MESSAGES, **settings | {"model": "hosted_vllm/" + MODEL, "api_key": "wrong"})),
    }


def main() -> None:
    """Run all and print what came."""
    litellm.suppress_debug_info = True
    url, key = arguments()
    settings = {"api_base": url + "/v1", "api_key": key, "model": "openai/" + MODEL, "temperature": 0, "max_tokens": LENGTH}
    report("litellm", answers(settings) | {"many": asyncio.run(many(settings))} | errors(settings))


if __name__ == "__main__":
    main()
