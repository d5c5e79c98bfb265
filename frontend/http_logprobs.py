"""Log-probabilities in the two shapes of OpenAI's routes, and in vLLM's for prompts. No sockets here."""

import codecs

from frontend.token_bytes import token_text
from frontend.tokenizer import ModelTokenizer
from protocol.logprobs import TokenLogprob

LEAST = -9999.0  # stands for minus infinity, which JSON lacks


class ChoiceLogprobs:
    """The scores of one choice, part by part: a completion's parts go on counting characters where the last one ended.

    A skipped special token is named by its text and has no bytes, so that the bytes of all tokens, joined, are the text.
    """

    def __init__(self, tokenizer: ModelTokenizer | None, skips_special: bool):
        self.tokenizer, self.skips_special = tokenizer, skips_special
        self.num_chars = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def completion(self, scored: list[tuple[int, TokenLogprob | None]], num_top: int) -> dict[str, object]:
        """The shape of /v1/completions; None is a score that does not exist, the first prompt token's."""
        offsets = []
        for token, _ in scored:
            offsets.append(self.num_chars)
            self.num_chars += len(self.decoder.decode(self._shown_bytes(token)))
        return {
            "tokens": [self.name(token) for token, _ in scored],
            "token_logprobs": [None if score is None else finite(score.logprob) for _, score in scored],
            "top_logprobs": [None if score is None else self._by_name(token, score, num_top) for token, score in scored],
            "text_offset": offsets,
        }

    def chat(self, scores: list[TokenLogprob]) -> dict[str, object]:
        """The shape of /v1/chat/completions."""
        content = [
            self._entry(score.token_id, score.logprob) | {"top_logprobs": [self._entry(*best) for best in score.top]} for score in scores
        ]
        return {"content": content, "refusal": None}

    def prompt(self, scores: list[TokenLogprob | None], num_top: int) -> list[dict[str, object] | None]:
        """vLLM's `prompt_logprobs`: for each token the best ids and its own, by id."""
        return [None if score is None else self._by_id(score, num_top) for score in scores]

    def name(self, token: int) -> str:
        """A token as text; distinct for bytes that are no characters."""
        if self.tokenizer is None:
            return f"token_id:{token}"
        return token_text(self.tokenizer.token_bytes[token])

    def _shown_bytes(self, token: int) -> bytes:
        if self.tokenizer is None or (self.skips_special and token not in self.tokenizer.visible_ids):
            return b""
        return self.tokenizer.token_bytes[token]

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        return {"token": self.name(token), "logprob": finite(logprob), "bytes": list(self._shown_bytes(token))}

    def _by_name(self, token: int, score: TokenLogprob, num_top: int) -> dict[str, float]:
        """The best ones, then the token itself if it is none of them; of two with one name the better counts."""
        named: dict[str, float] = {}
        for other, logprob in [*score.top[:num_top], (token, score.logprob)]:
            named.setdefault(self.name(other), finite(logprob))
        return named

    def _by_id(self, score: TokenLogprob, num_top: int) -> dict[str, object]:
        ranked = [(rank, *best) for rank, best in enumerate(score.top[:num_top], start=1)]
        return {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": self.name(token)}
            for rank, token, logprob in [(score.rank, score.token_id, score.logprob), *ranked]
        }


def finite(logprob: float) -> float:
    """As JSON can hold it; NaN, of a model gone wrong, too."""
    return logprob if logprob > LEAST else LEAST
