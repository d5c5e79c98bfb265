"""A request's sampling controls, as the worker needs them: ids instead of words, packed."""

import numpy as np

from frontend.tokenizer import ModelTokenizer
from protocol.controls import MAX_BAD_WORD_TOKENS, RowControls, bias_by_id
from protocol.messages import pack
from protocol.sampling import RowSampling, SamplingParams


def resolve_controls(
    params: SamplingParams, sampling: RowSampling, end_ids: frozenset[int], tokenizer: ModelTokenizer | None, vocab_size: int
) -> RowControls | None:
    """The controls of checked parameters; None where there are none. Raises ValueError where they leave no token to choose."""
    biases = bias_by_id(params.logit_bias)
    words = [ids for ids in bad_word_ids(params.bad_words or [], tokenizer) if max(ids) < vocab_size]
    early_ends = sorted(token for token in end_ids if token < vocab_size) if sampling.min_tokens else []
    allowed = sorted(set(params.allowed_token_ids or ()))
    if allowed:
        num_chosen_from = vocab_size if tokenizer is None else min(tokenizer.size, vocab_size)
        banned = {ids[0] for ids in words if len(ids) == 1}.union(early_ends)
        if all(token in banned or token >= num_chosen_from for token in allowed):
            raise ValueError("allowed_token_ids leaves no token to choose: the tokenizer lacks all of them, or other parameters ban them")
    if not (biases or words or early_ends or allowed or sampling.has_penalty):
        return None
    return RowControls(
        bias_ids=pack(list(biases)),
        bias_values=np.array(list(biases.values()), dtype="<f4").tobytes(),
        allowed_ids=pack(allowed),
        bad_words=[pack(ids) for ids in words],
        end_ids=pack(early_ends),
        needs_tokens=sampling.has_penalty or bool(words),
    )


def bad_word_ids(words: list[str], tokenizer: ModelTokenizer | None) -> list[tuple[int, ...]]:
    """The tokens of each word as it is given, and as it is spelled after a space. Raises ValueError for what has none, or too many."""
    if not words:
        return []
    if tokenizer is None:
        raise ValueError("this model has no tokenizer, which bad_words need; use logit_bias")
    forms = [form for word in words for form in (word, " " + word.lstrip(" "))]
    spelled = tokenizer.encode_words(forms)
    for form, ids in zip(forms, spelled, strict=True):
        if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
            raise ValueError(f"bad_words must hold strings of 1 to {MAX_BAD_WORD_TOKENS} tokens, {form[:40]!r} has {len(ids)}")
    return list(dict.fromkeys(map(tuple, spelled)))
