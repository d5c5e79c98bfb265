"""Log-probabilities of one choice, gathered until its client gets them."""

from protocol.logprobs import SCORE_BYTES, TokenLogprob, read_score


class TokenScores:
    """The scores of a choice: of the tokens since the last `take`, and of the prompt, which the first choice hands out once."""

    def __init__(self, num_top: int | None, num_prompt_top: int | None, prompt_ids: list[int]):
        self.num_top, self.num_prompt_top = num_top, num_prompt_top  # None: not asked for
        self.prompt_ids = prompt_ids
        # Packed until they are handed out: as objects they take 16 times the 168 bytes.
        self.new: list[tuple[int, bytes]] = []
        self.prompt = bytearray()

    def add(self, token: int, data: bytes) -> None:
        """The next token's."""
        self.new.append((token, data))

    def add_prompt(self, data: bytes) -> None:
        """The next prompt tokens'."""
        self.prompt += data

    def take(self, has_tokens: bool) -> tuple[list[TokenLogprob] | None, list[TokenLogprob | None] | None]:
        """The new tokens' scores, and with the first tokens the prompt's; None where they were not asked for."""
        new, self.new = self.new, []
        prompt = None
        if has_tokens and self.num_prompt_top is not None:
            prompt, self.num_prompt_top = self._read_prompt(), None
        if self.num_top is None:
            return None, prompt
        return [read_score(token, data, self.num_top) for token, data in new], prompt

    def _read_prompt(self) -> list[TokenLogprob | None]:
        """None first, since nothing precedes the first token."""
        parts = [bytes(self.prompt[start : start + SCORE_BYTES]) for start in range(0, len(self.prompt), SCORE_BYTES)]
        self.prompt.clear()
        return [None, *(read_score(token, data, self.num_prompt_top) for token, data in zip(self.prompt_ids[1:], parts))]
