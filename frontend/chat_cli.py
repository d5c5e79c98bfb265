"""A chat in a terminal: python -m frontend.client --chat, without a prompt. Also reads turns from a pipe, one a line."""

import signal
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

from frontend.client_stream import EngineError
from protocol.messages import Output

PROMPT = "> "
HELP = "/reset forgets what was said, /quit or Ctrl-D ends, Ctrl-C stops an answer"

ChatMessages = list[dict[str, str]]


class Display(Protocol):
    """Where answers go."""

    def output(self, output: Output) -> None:
        """Show a part of an answer."""

    def error(self, code: int, message: str) -> None:
        """Show why there is no answer, or no more of it."""

    def end_line(self) -> None:
        """Have what follows begin on a line of its own."""


class Chat:
    """A conversation. Whatever happens to one answer, it goes on, with what was shown of that answer.

    `generate(client, messages)` asks the engine. A turn that was not answered at all is taken back.
    """

    def __init__(self, generate: Callable[..., Generator[Output]], display: Display, system: str | None):
        self.generate = generate
        self.display = display
        self.beginning = [] if system is None else [{"role": "system", "content": system}]
        self.messages: ChatMessages = self.beginning
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self, connect: Callable[[], AbstractContextManager]) -> None:
        """Talk until /quit or the end of standard input. Raises EngineError when there is no engine."""
        sys.stdin.reconfigure(errors="replace")
        with connect() as client:
            model = client.info().model
        if self.is_terminal:
            if find_spec("readline"):
                import_module("readline")  # from now on input() edits lines
            print(f"{model}: {HELP}", file=sys.stderr)
        is_over = False
        while not is_over:
            with connect() as client:  # a new one after Ctrl-C, which may have cut a message of the old one in two
                is_over = self._talk(client)

    def _talk(self, client: object) -> bool:
        """Take turns until the end (True), or until Ctrl-C stops an answer."""
        while (line := self._read_line()) is not None:
            try:
                self._take_turn(client, line)
            except KeyboardInterrupt:
                if not self.is_terminal:
                    raise
                self.display.end_line()
                return False
        return True

    def _read_line(self) -> str | None:
        """What the user says next, once it is no command; None at the end."""
        while True:
            try:
                signal.signal(signal.SIGINT, _interrupt_once)
                line = input(PROMPT if self.is_terminal else "").strip()
            except EOFError:
                self.display.end_line()
                return None
            except KeyboardInterrupt:
                if not self.is_terminal:
                    raise
                print(file=sys.stderr)
                continue
            if line == "/quit":
                return None
            if line == "/reset":
                self.messages = self.beginning
            elif line.startswith("/") and line.count("/") == 1 and " " not in line:
                print(f"no such command: {HELP}", file=sys.stderr)
            elif line:
                return line

    def _take_turn(self, client: object, line: str) -> None:
        asked = [*self.messages, {"role": "user", "content": line}]
        answer = ""
        try:
            with closing(self.generate(client, asked)) as outputs:  # closing is what cancels
                for output in outputs:
                    answer += output.text
                    self.display.output(output)
            if output.finish_reason == "error":
                self.display.error(500, "the engine could not go on with this answer")
        except EngineError as error:
            self._show_error(error.code, error.message)
        except ValueError as error:
            self._show_error(400, str(error))
        finally:
            if answer:
                self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _show_error(self, code: int, message: str) -> None:
        self.display.end_line()
        self.display.error(code, message)


def _interrupt_once(*_: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the next line is read: impatience ends no chat
    raise KeyboardInterrupt
