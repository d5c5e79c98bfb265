"""Chat templates: the model's own Jinja text, run in a sandbox.

The names that a template may use are those that Hugging Face's templates are written for.
"""

import json
from datetime import datetime

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What a template does with a conversation it was not written for, besides raising an error of Jinja's own.
RENDER_ERRORS = (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError)


class ChatTemplate:
    """A compiled template. Raises ValueError on a text that is no template."""

    def __init__(self, source: str, special_tokens: dict[str, str]):
        self.special_tokens = special_tokens  # bos_token, eos_token, …
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self.template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is damaged: {error}") from None

    def render(self, messages: list[dict[str, str]]) -> str:
        """The conversation as the model reads it, up to where the assistant begins.

        Raises ValueError with the template's reason.
        """
        try:
            return self.template.render(messages=messages, add_generation_prompt=True, **self.special_tokens)
        except RENDER_ERRORS as error:
            raise ValueError(f"the chat template refused the messages: {error}") from None


class _Generation(Extension):
    """{% generation %} marks the assistant's words for training; here it only holds what it encloses."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(value: object, **options: object) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, **({"ensure_ascii": False} | options))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
