"""Log-probabilities of one choice, packed as they came until a client gets them: as objects they take 16 times the 168 bytes."""

from typing import Self

import msgspec

from protocol.logprobs import SCORE_BYTES, TokenLogprob, read_score


class PackedScores(msgspec.Struct, frozen=True):
    """The scores of consecutive tokens."""

    token_ids: list[int]
    data: bytes  # SCORE_BYTES of each
    num_top: int

    def read(self) -> list[TokenLogprob]:
        """One score for each token, in order."""
        parts = [self.data[start : start + SCORE_BYTES] for start in range(0, len(self.data), SCORE_BYTES)]
        return [read_score(token, part, self.num_top) for token, part in zip(self.token_ids, parts, strict=True)]

    def read_prompt(self) -> list[TokenLogprob | None]:
        """Those of a prompt: None first, since nothing precedes the first token."""
        return [None, *self.read()]

    @classmethod
    def join(cls, parts: list[Self]) -> Self:
        """All parts as one."""
        return cls([token for part in parts for token in part.token_ids], b"".join(part.data for part in parts), parts[0].num_top)


class TokenScores:
    """The scores of a choice: of the tokens since the last `take`, and of the prompt, which the first choice hands out once."""

    def __init__(self, num_top: int | None, num_prompt_top: int | None, prompt_ids: list[int]):
        self.num_top, self.num_prompt_top = num_top, num_prompt_top  # None: not asked for
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.data, self.prompt_data = bytearray(), bytearray()

    def add(self, token: int, data: bytes) -> None:
        """The next token's."""
        self.token_ids.append(token)
        self.data += data

    def add_prompt(self, data: bytes) -> None:
        """The next prompt tokens'."""
        self.prompt_data += data

    def take(self, has_tokens: bool) -> tuple[PackedScores | None, PackedScores | None]:
        """The new tokens' scores, and with the first tokens the prompt's; None where they were not asked for."""
        prompt = None
        if has_tokens and self.num_prompt_top is not None:
            num_scored = len(self.prompt_data) // SCORE_BYTES
            prompt = PackedScores(self.prompt_ids[1 : 1 + num_scored], bytes(self.prompt_data), self.num_prompt_top)
            self.num_prompt_top, self.prompt_data = None, bytearray()
        if self.num_top is None:
            return None, prompt
        scores = PackedScores(self.token_ids, bytes(self.data), self.num_top)
        self.token_ids, self.data = [], bytearray()
        return scores, prompt
