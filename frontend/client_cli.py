"""The command line of the client: python -m frontend.client "prompt", or --chat without one."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial

import msgspec

from frontend.chat_cli import Chat, ChatMessages, Display
from frontend.client_stream import EngineError
from protocol.messages import Output
from protocol.sampling import SamplingParams

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

SAMPLING_FIELDS = SamplingParams.__struct_fields__


def run(make_client: Callable[..., object], arguments: list[str] | None = None) -> int:
    """Answer one prompt on stdout, or chat; returns the exit code. Errors are one line on stderr."""
    options = _options(arguments)
    display = _JsonDisplay() if options.json else _TextDisplay()
    sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal's encoding lacks is no reason to lose the rest
    try:
        connect = partial(make_client, options.address, options.timeout, options.connect_timeout)
        if options.prompt is None:
            Chat(partial(_ask, options), display, options.system).run(connect)
            return EXIT_OK
        with connect() as client:
            return _answer(client, options, display)
    except EngineError as error:
        display.error(error.code, error.message)
        return EXIT_ERROR
    except BrokenPipeError:  # who reads has enough, `head` for one; the request is cancelled
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered would fail again at exit
        return EXIT_ERROR
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _answer(client, options: argparse.Namespace, display: Display) -> int:
    messages = [{"role": "user", "content": options.prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    source = _ask(options, client, messages) if options.chat else _ask(options, client, prompt=options.prompt)
    # Closed whatever happens, Ctrl-C included: that is what cancels the request.
    with closing(source) as outputs:
        for output in outputs:
            display.output(output)
    return EXIT_ERROR if output.finish_reason == "error" else EXIT_OK


def _ask(options: argparse.Namespace, client, messages: ChatMessages | None = None, prompt: str | None = None) -> Generator[Output]:
    given = vars(options)
    sampling = {name: given[name] for name in SAMPLING_FIELDS if given.get(name) is not None}
    return client.generate(prompt, messages=messages, stream=not options.no_stream, **sampling)


class _TextDisplay:
    def __init__(self) -> None:
        self.is_within_line = False

    def output(self, output: Output) -> None:
        self.is_within_line = output.finish_reason is None
        print(output.text, end="" if self.is_within_line else "\n", flush=True)

    def error(self, _code: int, message: str) -> None:
        print(f"error: {message}", file=sys.stderr)

    def end_line(self) -> None:
        if self.is_within_line:
            print(flush=True)
        self.is_within_line = False


class _JsonDisplay:
    def output(self, output: Output) -> None:
        self._print({"type": "output", **msgspec.structs.asdict(output)})

    def error(self, code: int, message: str) -> None:
        self._print({"type": "error", "code": code, "message": message})
        print(f"error: {message}", file=sys.stderr)

    def end_line(self) -> None:
        pass  # every event is a line

    def _print(self, event: dict[str, object]) -> None:
        print(msgspec.json.encode(event).decode(), flush=True)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.prompt is None and not options.chat:
        parser.error("a prompt is missing; --chat needs none")
    if options.prompt is None and sys.stdin is None:
        parser.error("a chat needs standard input")
    if options.system is not None and not options.chat:
        parser.error("--system has no effect without --chat")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m frontend.client", description="Send one prompt to a running engine, or chat with it.")
    parser.add_argument("prompt", nargs="?")
    parser.add_argument("--chat", action="store_true", help="the prompt is the user's turn of a chat; without one, chat line by line")
    parser.add_argument("--system", metavar="TEXT", help="the chat's system message")
    parser.add_argument("--json", action="store_true", help="one JSON object per event")
    parser.add_argument("--no-stream", action="store_true", help="the whole answer at once")
    parser.add_argument("--address", help="ipc:// address of the engine (default: this user's)")
    parser.add_argument("--timeout", type=float, help="seconds to wait for each reply (default: no limit)")
    parser.add_argument("--connect-timeout", type=float, default=5, help="seconds to wait for an engine that serves (default: 5)")
    parser.add_argument("--max-tokens", type=int, help="default: as many as the context has room for")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: 1)")
    parser.add_argument("--top-k", type=int, help="0 or -1: off (default)")
    parser.add_argument("--top-p", type=float, help="1: off (default)")
    parser.add_argument("--min-p", type=float, help="0: off (default)")
    parser.add_argument("--seed", type=int, help="default: a random one")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    parser.add_argument("--stop-token-ids", type=int, nargs="+", metavar="ID", help="end at one of these tokens")
    _add_controls(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end of sequence")
    return parser


def _add_controls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--min-tokens", type=int, help="do not end before so many")
    parser.add_argument("--repetition-penalty", type=float, help="of tokens in the prompt or the output; 1: off (default)")
    parser.add_argument("--presence-penalty", type=float, help="of tokens in the output, once; 0: off (default)")
    parser.add_argument("--frequency-penalty", type=float, help="of tokens in the output, each time; 0: off (default)")
    parser.add_argument("--logit-bias", type=json.loads, metavar="JSON", help='added to logits by token id: {"17": -100}')
    parser.add_argument("--bad-words", action="append", metavar="TEXT", help="not in the output; may be given several times")
    parser.add_argument("--allowed-token-ids", type=int, nargs="+", metavar="ID", help="only these tokens")
