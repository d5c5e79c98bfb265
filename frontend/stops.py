"""Stop strings in a stream of text."""


class StopStrings:
    """Cuts a text right before the stop string that is complete first; the result does not depend on how the text is split.

    Of several that end at the same character the longest counts. Only a suffix that may still become a stop string is held back.
    """

    def __init__(self, stops: list[str], are_shown: bool = False):
        self.stops = stops
        self.are_shown = are_shown  # the one that ends the text belongs to it
        self.held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop string was found; after that, feed no more."""
        text = self.held + text
        matches = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if matches:
            self.held = ""
            end, start = min(matches)
            return text[: end if self.are_shown else start], True
        safe = len(text) - self._num_held(text)
        self.held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """The held-back rest, at the text's end."""
        held, self.held = self.held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        longest = min(len(text), max(map(len, self.stops), default=1) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops if len(stop) > size):
                return size
        return 0
