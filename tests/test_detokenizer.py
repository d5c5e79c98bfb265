"""Deltas, joined, are what one decode of everything gives."""

import os
import random

import pytest

from frontend.detokenizer import MAX_HELD, Detokenizer
from frontend.tokenizer import ModelTokenizer
from tests import tiny_tokenizers

TEXTS = ["The quick brown fox. ", "naïve Größe ", "日本語の文字", "你好", "ไทย", "👩‍👩‍👧🇫🇷", "\n\n  indented", " ", "Ελλάδα", "\u0301\u0302"]
KINDS = {"byte_level": tiny_tokenizers.byte_level, "metaspace": tiny_tokenizers.metaspace}


def deltas_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


def rest_of_decode(backend, prompt: list[int], output: list[int]) -> str:
    """What the output adds; a character that the prompt began, with three ids at most, is the output's."""
    whole = backend.decode(prompt + output)
    starts = [backend.decode(prompt[: len(prompt) - cut]) for cut in range(4)]
    return whole[max(len(os.path.commonprefix([whole, start])) for start in starts) :]


def random_text_ids(backend, rng: random.Random) -> list[int]:
    return backend.encode("".join(rng.choices(TEXTS, k=rng.randint(1, 8))), add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_of_text_join_to_the_full_decode(kind):
    tokenizer = ModelTokenizer(KINDS[kind]())
    rng = random.Random(1)
    for _ in range(1500):
        ids = random_text_ids(tokenizer.backend, rng) + random_text_ids(tokenizer.backend, rng)
        cut = rng.randint(0, len(ids))
        prompt, output = ids[:cut], ids[cut:]
        deltas = deltas_of(tokenizer.detokenizer(prompt), output)
        assert "".join(deltas) == rest_of_decode(tokenizer.backend, prompt, output), (prompt, output)
        assert not any("\ufffd" in delta for delta in deltas[:-1])  # a partial character is never shown


def test_deltas_of_random_bytes_join_to_the_full_decode():
    tokenizer = ModelTokenizer(tiny_tokenizers.byte_level())
    rng = random.Random(2)
    byte_ids = [tokenizer.backend.token_to_id(letter) for letter in "ÃäÅŃðŁĺĢ¤ĸ"]
    ids = [*range(tokenizer.size + 20), *byte_ids * 40]  # unknown and special ids too
    for _ in range(4000):
        prompt, output = rng.choices(ids, k=rng.randint(0, 12)), rng.choices(ids, k=rng.randint(1, 40))
        while tokenizer.backend.decode(prompt).endswith("\ufffd"):
            prompt.pop()
        deltas = deltas_of(tokenizer.detokenizer(prompt), output)
        assert "".join(deltas) == rest_of_decode(tokenizer.backend, prompt, output), (prompt, output)


def test_random_ids_of_a_byte_fallback_tokenizer_never_raise_and_keep_what_is_text():
    tokenizer = ModelTokenizer(tiny_tokenizers.metaspace())
    rng = random.Random(3)
    for _ in range(3000):
        prompt, output = (rng.choices(range(tokenizer.size + 20), k=rng.randint(1, 30)) for _ in range(2))
        whole = tokenizer.backend.decode(prompt + output)
        text = "".join(deltas_of(tokenizer.detokenizer(prompt), output))
        if "\ufffd" not in whole:
            assert text == rest_of_decode(tokenizer.backend, prompt, output)
        else:
            last = whole.rsplit("\ufffd", 1)[1]
            assert text.endswith(last) or last.endswith(text)


def test_endless_garbage_costs_no_more_per_token_as_it_grows():
    tokenizer = ModelTokenizer(tiny_tokenizers.byte_level())
    lead_byte = tokenizer.backend.token_to_id("ä")
    detokenizer = tokenizer.detokenizer([])
    for _ in range(1000):
        detokenizer.feed(lead_byte)
        assert len(detokenizer.window) <= 2 * MAX_HELD
    special = tokenizer.special_ids["</s>"]
    for _ in range(1000):
        assert detokenizer.feed(special) == ""
        assert len(detokenizer.window) <= 2 * MAX_HELD


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_ends_inside_a_character_is_not_repeated(kind):
    tokenizer = ModelTokenizer(KINDS[kind]())
    text = "Hello world 龍"
    ids = tokenizer.encode(text)
    assert tokenizer.backend.decode(ids[:-1]).endswith("\ufffd"), "the last character must be cut"
    detokenizer = tokenizer.detokenizer(ids[:-1])
    assert detokenizer.feed(ids[-1]) == text[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_spaces_between_words_survive_token_by_token(kind):
    tokenizer = ModelTokenizer(KINDS[kind]())
    ids = tokenizer.encode("one two three")
    detokenizer = tokenizer.detokenizer(ids[:1])
    assert "".join(detokenizer.feed(token) for token in ids[1:]) == rest_of_decode(tokenizer.backend, ids[:1], ids[1:])


def test_special_tokens_leave_no_blanks():
    tokenizer = ModelTokenizer(tiny_tokenizers.metaspace())
    end = tokenizer.special_ids["</s>"]
    ids = tokenizer.encode("a word")
    assert "".join(deltas_of(tokenizer.detokenizer([end]), [end, end, *ids, end, end])) == "a word"
