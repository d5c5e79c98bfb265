"""Stop strings against a reader that looks at every character."""

import random

from frontend.stops import StopStrings


def cut_slowly(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first; the longest of several."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def stream(text: str, stops: list[str], rng: random.Random) -> tuple[str, bool]:
    matcher, shown = StopStrings(stops), ""
    while text:
        size = rng.randint(1, 4)
        part, stopped = matcher.feed(text[:size])
        shown += part
        if stopped:
            return shown, True
        text = text[size:]
    return shown + matcher.flush(), False


def test_every_split_of_a_text_gives_the_same_result():
    rng = random.Random(1)
    for _ in range(20_000):
        text = "".join(rng.choices("abc", k=rng.randint(0, 15)))
        stops = ["".join(rng.choices("abc", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 4))]
        assert stream(text, stops, rng) == cut_slowly(text, stops), (text, stops)


def test_no_part_of_the_match_is_shown_and_a_half_match_is():
    matcher = StopStrings(["STOP"])
    shown = [matcher.feed(part) for part in ("one ST", "O two S", "T", "OP three")]
    assert shown == [("one ", False), ("STO two ", False), ("", False), ("", True)]
    assert matcher.flush() == ""


def test_only_what_may_become_a_stop_string_is_held_back():
    matcher = StopStrings(["a very long stop sentence that never comes"])
    for part in ("<think>", "plain", " words"):
        assert matcher.feed(part) == (part, False)
    assert matcher.feed("x a ver") == ("x ", False)
    assert matcher.feed("b") == ("a verb", False)


def test_without_stop_strings_text_passes():
    assert StopStrings([]).feed("text") == ("text", False)
