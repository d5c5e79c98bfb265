"""Deltas, joined, are what one decode of everything gives."""

import os
import random
from collections.abc import Callable, Iterator

import pytest

from frontend.detokenizer import MAX_HELD, MAX_RUN, NUM_PRIMED
from frontend.tokenizer import ModelTokenizer
from tests import tiny_tokenizers

TEXTS = ["The quick brown fox. ", "naïve Größe ", "日本語の文字", "你好", "ไทย", "👩‍👩‍👧🇫🇷", "\n\n  indented", " ", "Ελλάδα", "\u0301\u0302"]
KINDS = {"byte_level": tiny_tokenizers.byte_level, "metaspace": tiny_tokenizers.metaspace}
SEQUENCES, MANY_SEQUENCES = 600, 8400  # of each of 12 ways: 100,800 in the soak
Draw = Callable[[random.Random], list[int]]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request) -> ModelTokenizer:
    return ModelTokenizer(KINDS[request.param]())


def deltas_of(tokenizer: ModelTokenizer, prompt: list[int], output: list[int], skips_special: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt, skips_special)
    return [*(detokenizer.feed(token) for token in output), detokenizer.flush()]


def text_ids(tokenizer: ModelTokenizer, rng: random.Random) -> list[int]:
    return tokenizer.encode("".join(rng.choices(TEXTS, k=rng.randint(1, 8))))


def draws(tokenizer: ModelTokenizer) -> Iterator[Draw]:
    """Ways to draw ids: texts, texts among specials and ids that do not exist, any ids, and mostly bytes that are no text."""
    specials = [*tokenizer.special_ids.values(), tokenizer.size, tokenizer.size + 7]
    every = [*range(tokenizer.size), *specials]
    bytes_ = sorted(tokenizer.token_bytes.fallback_ids) or [tokenizer.backend.token_to_id(letter) for letter in "ÃäÅŃðŁĺĢ¤ĸ"]

    def mixed(rng: random.Random) -> list[int]:
        ids = text_ids(tokenizer, rng)
        for _ in range(rng.randint(1, 4)):
            ids.insert(rng.randint(0, len(ids)), rng.choice(specials))
        return ids

    yield lambda rng: text_ids(tokenizer, rng)
    yield mixed
    yield lambda rng: rng.choices([*every, *bytes_ * (len(every) // len(bytes_))], k=rng.randint(1, 40))


def check_sequences(tokenizer: ModelTokenizer, count: int) -> int:
    """So many of each way and kind, with a prompt and without, specials shown and not; returns how many."""
    rng, total = random.Random(5), 0
    for draw in draws(tokenizer):
        for skips_special in (True, False):
            for _ in range(count):
                prompt = text_ids(tokenizer, rng) + tokenizer.encode("an end", False) if rng.random() < 0.5 else []
                output = draw(rng)
                whole = tokenizer.decode(prompt + output, skips_special)
                deltas = deltas_of(tokenizer, prompt, output, skips_special)
                assert "".join(deltas) == whole[len(tokenizer.decode(prompt, skips_special)) :], (prompt, output)
                total += 1
    return total


def test_deltas_of_random_ids_join_to_the_full_decode(tokenizer):
    """Invalid UTF-8, special and unknown ids included."""
    check_sequences(tokenizer, SEQUENCES)


@pytest.mark.soak
def test_deltas_of_a_hundred_thousand_sequences_join_to_the_full_decode():
    total = sum(check_sequences(ModelTokenizer(make()), MANY_SEQUENCES) for make in KINDS.values())
    print(f"\n{total} sequences")
    assert total >= 100_000


def rest_of_decode(tokenizer: ModelTokenizer, prompt: list[int], output: list[int]) -> str:
    """What the output adds; a character that the prompt began, with three ids at most, is the output's."""
    whole = tokenizer.decode(prompt + output)
    starts = [tokenizer.decode(prompt[: len(prompt) - cut]) for cut in range(4)]
    return whole[max(len(os.path.commonprefix([whole, start])) for start in starts) :]


def test_deltas_of_text_join_wherever_the_prompt_is_cut_and_show_whole_characters(tokenizer):
    rng = random.Random(1)
    for _ in range(1500):
        ids = text_ids(tokenizer, rng) + text_ids(tokenizer, rng)
        cut = rng.randint(0, len(ids))
        prompt, output = ids[:cut], ids[cut:]
        deltas = deltas_of(tokenizer, prompt, output)
        assert "".join(deltas) == rest_of_decode(tokenizer, prompt, output), (prompt, output)
        assert not any("\ufffd" in delta for delta in deltas[:-1])  # a partial character is never shown


def test_deltas_of_random_bytes_join_after_random_prompts():
    tokenizer = ModelTokenizer(tiny_tokenizers.byte_level())
    rng = random.Random(2)
    *_, draw = draws(tokenizer)
    for _ in range(2000):
        prompt, output = draw(rng), draw(rng)
        while tokenizer.decode(prompt).endswith("\ufffd"):
            prompt.pop()
        assert "".join(deltas_of(tokenizer, prompt, output)) == rest_of_decode(tokenizer, prompt, output), (prompt, output)


def test_random_bytes_after_a_prompt_that_ends_in_bytes_never_raise_and_keep_what_is_text():
    """The prompt's own bytes may turn out to be no text: nobody can say then what the output adds."""
    tokenizer = ModelTokenizer(tiny_tokenizers.metaspace())
    rng = random.Random(3)
    *_, draw = draws(tokenizer)
    for _ in range(1000):
        prompt, output = draw(rng), draw(rng)
        whole = tokenizer.decode(prompt + output)
        text = "".join(deltas_of(tokenizer, prompt, output))
        if "\ufffd" not in whole:
            assert text == rest_of_decode(tokenizer, prompt, output)
        else:
            last = whole.rsplit("\ufffd", 1)[1]
            assert text.endswith(last) or last.endswith(text)


def test_endless_garbage_costs_no_more_per_token_as_it_grows(tokenizer):
    lead_byte = tokenizer.backend.token_to_id("ä") or tokenizer.backend.token_to_id("<0xE4>")
    detokenizer = tokenizer.detokenizer([])
    for _ in range(1000):
        detokenizer.feed(lead_byte)
        assert len(detokenizer.window) <= MAX_HELD + MAX_RUN + NUM_PRIMED
    special = tokenizer.special_ids["</s>"]
    for _ in range(1000):
        assert detokenizer.feed(special) == ""
        assert len(detokenizer.window) <= MAX_HELD + MAX_RUN + NUM_PRIMED


def test_a_long_run_of_bytes_is_shown_in_parts_and_a_short_one_with_the_next_word():
    tokenizer = ModelTokenizer(tiny_tokenizers.metaspace())
    spelled = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "龘".encode()]
    deltas = deltas_of(tokenizer, [], spelled * 100)
    assert "".join(deltas) == "龘" * 100 and len([delta for delta in deltas if delta]) > 3
    (word,) = tokenizer.encode("the")[:1]
    assert deltas_of(tokenizer, [], [*spelled, word])[2:4] == ["", "龘" + tokenizer.decode([*spelled, word])[1:]]


def test_a_prompt_that_ends_inside_a_character_is_not_repeated(tokenizer):
    text = "Hello world 龍"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids[:-1]).endswith("\ufffd"), "the last character must be cut"
    assert "".join(deltas_of(tokenizer, ids[:-1], ids[-1:])) == text[-1]


def test_spaces_between_words_survive_token_by_token(tokenizer):
    ids = tokenizer.encode("one two three")
    assert "".join(deltas_of(tokenizer, ids[:1], ids[1:])) == rest_of_decode(tokenizer, ids[:1], ids[1:])


def test_special_tokens_leave_no_blanks():
    tokenizer = ModelTokenizer(tiny_tokenizers.metaspace())
    end = tokenizer.special_ids["</s>"]
    ids = tokenizer.encode("a word")
    assert "".join(deltas_of(tokenizer, [end], [end, end, *ids, end, end])) == "a word"
