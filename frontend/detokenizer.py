"""Text from token ids, as they come."""

import itertools

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # how decoders show bytes that are no character, or not yet

# Visible prompt ids that the first output ids are decoded with. One would do for a space, but up to three may have to be left out
# at either end, where a character is cut.
NUM_PRIMED = 8
MAX_CUT = 3
# Output ids held back while the text ends in REPLACEMENT; a character needs four at most, the rest is garbage.
MAX_HELD = 8
# And in a run of ids that are bytes: byte-fallback decoders show all of it as REPLACEMENT when any of it is no character. A family
# of emoji takes 25; in scripts that a vocabulary lacks, text comes word by word.
MAX_RUN = 64
# The start of an incomplete character is among the last three bytes, so among the last three ids.
NUM_KEPT = 4


class Detokenizer:
    """The text of an output that follows a prompt, id by id.

    Ids are decoded in a short window that begins at an earlier id, so that spaces between words and characters cut into several
    ids survive. The window holds visible ids only: special and unknown ones decode to nothing.

    Invariant: `shown` is the part of decode(window) that has been emitted, or that the prompt owns; it only grows between two
    moves of the window. So the deltas, joined, are decode(prompt + output)[len(decode(prompt)):] with specials skipped, save where
    the prompt ends within a run of byte_ids, or one is longer than MAX_RUN, and a later id shows that the run is no text.
    """

    def __init__(self, tokenizer: Tokenizer, visible: frozenset[int], byte_ids: frozenset[int], prompt_ids: list[int]):
        self.tokenizer = tokenizer
        self.visible = visible
        self.byte_ids = byte_ids  # of a byte-fallback decoder, else none
        # num_clean: ids before the first one whose text may be incomplete.
        self.window, self.num_clean = self._whole_characters(self._last_visible(prompt_ids))
        self.shown = self._prompt_part()

    def feed(self, token: int) -> str:
        """The text that this id completes; "" while the last character, or run of bytes, is incomplete."""
        if token not in self.visible:
            return ""
        self.window.append(token)
        num_held, is_byte = len(self.window) - self.num_clean, token in self.byte_ids
        if is_byte and num_held < MAX_RUN:
            return ""
        text = self._decode(self.window)
        if not text.endswith(REPLACEMENT):
            delta = self._new_part(text)
            self._move_window(self.num_clean)
            return delta
        if num_held < (MAX_RUN + MAX_CUT if is_byte else MAX_HELD):
            return ""
        delta = self._new_part(text[:-1])
        self._move_window(len(self.window) - NUM_KEPT)
        self.shown = self.shown[:-1]
        return delta

    def flush(self) -> str:
        """The held-back rest, at the output's end."""
        text = self._decode(self.window)
        delta = self._new_part(text)
        self.shown, self.num_clean = text, len(self.window)
        return delta

    def _new_part(self, text: str) -> str:
        if text.startswith(self.shown):
            return text[len(self.shown) :]
        # The prompt may end inside a character that the output completes.
        whole = self.shown.rstrip(REPLACEMENT)
        if whole != self.shown and text.startswith(whole):
            return text[len(whole) :]
        return self._decode(self.window[self.num_clean :])

    def _move_window(self, start: int) -> None:
        self.window = self.window[start:]
        self.num_clean = len(self.window)
        self.shown = self._decode(self.window)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _whole_characters(self, ids: list[int]) -> tuple[list[int], int]:
        """The ids from the first whole character on, and how many of them end with the last whole one."""
        for start, cut in itertools.product(range(MAX_CUT + 1), repeat=2):
            num_whole = max(0, len(ids) - start - cut)
            text = self._decode(ids[start : start + num_whole])
            if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                return ids[start:], num_whole
        return ids, len(ids)

    def _prompt_part(self) -> str:
        whole, everything = self._decode(self.window[: self.num_clean]), self._decode(self.window)
        # Byte-fallback decoders show a whole run of bytes as REPLACEMENT while its last character is incomplete.
        return everything if everything.startswith(whole) else whole + REPLACEMENT

    def _last_visible(self, ids: list[int]) -> list[int]:
        found = []
        for token in reversed(ids):
            if len(found) == NUM_PRIMED:
                break
            if token in self.visible:
                found.append(token)
        return found[::-1]
