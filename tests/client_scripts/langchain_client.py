"""Chains' models on the engine, ChatOpenAI and OpenAI of langchain-openai: python langchain_client.py URL KEY"""

import asyncio

from common import LENGTH, MESSAGES, MODEL, PROMPT, TOO_LONG, arguments, failure, outcome, report
from langchain_openai import ChatOpenAI, OpenAI


def whole(message: object, parts: int = 1) -> dict[str, object]:
    """An AIMessage, or the sum of a stream's chunks."""
    usage = message.usage_metadata
    reason = message.response_metadata.get("finish_reason")
    return outcome(message.content, reason, usage["input_tokens"], usage["output_tokens"], parts)


def added(chunks: list) -> dict[str, object]:
    """A stream's chunks, added as a chain adds them."""
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return whole(total, sum(bool(chunk.content) for chunk in chunks))


def answers(chat: ChatOpenAI, completion: OpenAI) -> dict[str, object]:
    """Chats and completions, whole, streamed and in a batch."""
    result = completion.generate([PROMPT])
    ((generation,),) = result.generations
    usage = result.llm_output["token_usage"]
    texts = list(filter(None, completion.stream(PROMPT)))
    return {
        "chat": whole(chat.invoke(MESSAGES)),
        "chat_stream": added(list(chat.stream(MESSAGES))),
        "many": [whole(message) for message in chat.batch([MESSAGES] * 6)],
        "completion": outcome(
            generation.text, generation.generation_info["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]
        ),
        "completion_stream": {"text": "".join(texts), "parts": len(texts)},
    }


async def asynchronous(chat: ChatOpenAI) -> dict[str, object]:
    """The same without blocking."""
    return {
        "chat_async": whole(await chat.ainvoke(MESSAGES)),
        "chat_stream_async": added([chunk async for chunk in chat.astream(MESSAGES)]),
    }


def errors(settings: dict[str, object]) -> dict[str, object]:
    """What a user does wrong."""
    too_long = [{"role": "user", "content": TOO_LONG}]
    return {
        "unknown_model": failure(lambda: ChatOpenAI(**settings | {"model": "other"}).invoke(MESSAGES)),
        "bad_value": failure(lambda: ChatOpenAI(**settings | {"temperature": -1}).invoke(MESSAGES)),
        "bad_value_in_a_stream": failure(lambda: list(ChatOpenAI(**settings | {"temperature": -1}).stream(MESSAGES))),
        "too_long": failure(lambda: OpenAI(**settings).invoke(TOO_LONG)),
        "too_long_chat": failure(lambda: ChatOpenAI(**settings).invoke(too_long)),
        "wrong_key": failure(lambda: ChatOpenAI(**settings | {"api_key": "wrong"}).invoke(MESSAGES)),
    }


def main() -> None:
    """Run all and print what came."""
    url, key = arguments()
    settings = {"base_url": url + "/v1", "api_key": key, "model": MODEL, "temperature": 0, "max_tokens": LENGTH}
    chat = ChatOpenAI(**settings, stream_usage=True)
    report("langchain-openai", answers(chat, OpenAI(**settings)) | asyncio.run(asynchronous(chat)) | errors(settings))


if __name__ == "__main__":
    main()
