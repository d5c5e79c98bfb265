"""The command line of the client: python -m frontend.client "prompt"."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import closing

import msgspec

from frontend.client_stream import EngineError
from protocol.messages import Output
from protocol.sampling import SamplingParams

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

SAMPLING_FIELDS = SamplingParams.__struct_fields__


def run(make_client: Callable[..., object], arguments: list[str] | None = None) -> int:
    """Answer one prompt on stdout; returns the exit code. Errors are one line on stderr."""
    options = _parser().parse_args(arguments)
    show = _show_json if options.json else _show_text
    sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal's encoding lacks is no reason to lose the rest
    try:
        with make_client(options.address, options.timeout, options.connect_timeout) as client:
            return _answer(client, options, show)
    except EngineError as error:
        return _fail(options, error.code, error.message)
    except BrokenPipeError:  # who reads has enough, `head` for one; the request is cancelled
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered would fail again at exit
        return EXIT_ERROR
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _answer(client, options: argparse.Namespace, show: Callable[[Output], None]) -> int:
    given = vars(options)
    sampling = {name: given[name] for name in SAMPLING_FIELDS if given.get(name) is not None}
    if options.chat:
        source = {"messages": [{"role": "user", "content": options.prompt}]}
    else:
        source = {"prompt": options.prompt}
    # Closed whatever happens, Ctrl-C included: that is what cancels the request.
    with closing(client.generate(**source, stream=not options.no_stream, **sampling)) as outputs:
        for output in outputs:
            show(output)
    return EXIT_ERROR if output.finish_reason == "error" else EXIT_OK


def _show_text(output: Output) -> None:
    end = "" if output.finish_reason is None else "\n"
    print(output.text, end=end, flush=True)


def _show_json(output: Output) -> None:
    _print_json({"type": "output", **msgspec.structs.asdict(output)})


def _fail(options: argparse.Namespace, code: int, message: str) -> int:
    if options.json:
        _print_json({"type": "error", "code": code, "message": message})
    print(f"error: {message}", file=sys.stderr)
    return EXIT_ERROR


def _print_json(event: dict[str, object]) -> None:
    print(msgspec.json.encode(event).decode(), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m frontend.client", description="Send one prompt to a running engine.")
    parser.add_argument("prompt")
    parser.add_argument("--chat", action="store_true", help="the prompt is the user's turn of a chat")
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
