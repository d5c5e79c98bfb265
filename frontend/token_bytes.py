"""What single tokens add to a text, as bytes: log-probabilities name tokens that are parts of characters."""

import json
import re

from tokenizers import Tokenizer, pre_tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # how byte-fallback vocabularies spell a byte


class TokenBytes:
    """Joined over a text's tokens, the bytes are the text; each token's are its own, whatever its neighbours are."""

    def __init__(self, backend: Tokenizer):
        self.backend = backend
        # Whether a token is in the vocabulary as text of its own: what was added to it is, in every kind of tokenizer.
        self.added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": None}
        kinds = {step["type"] for step in decoder.get("decoders", [decoder])}
        self.byte_of = _byte_level() if "ByteLevel" in kinds else None
        self.has_bytes = "ByteFallback" in kinds
        byte_pieces = [index for piece, index in backend.get_vocab().items() if BYTE_TOKEN.fullmatch(piece)] if self.has_bytes else []
        self.fallback_ids = frozenset(byte_pieces)
        self.is_spelled_out = self.byte_of is not None or self.has_bytes or "Metaspace" in kinds

    def __getitem__(self, token: int) -> bytes:
        """Empty for an id that the tokenizer lacks."""
        if token in self.added and not BYTE_TOKEN.fullmatch(self.added[token]):
            return self.added[token].encode()
        piece = self.backend.id_to_token(token)
        if piece is None:
            return b""
        if self.byte_of is not None:
            return bytes(self.byte_of[char] for char in piece)
        if not self.is_spelled_out:
            return self.backend.decode([token], skip_special_tokens=False).encode()
        if self.has_bytes and (found := BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        return piece.replace("▁", " ").encode()


def token_text(data: bytes) -> str:
    """A token's bytes as a name: its text, or "bytes:\\xf0\\x9f" where they are no whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _byte_level() -> dict[str, int]:
    """GPT-2's alphabet of bytes: printable Latin-1 stands for itself, the other bytes for characters from 256 on, in order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {char: ord(char) for char in alphabet if ord(char) < 256}
    others = sorted(set(range(256)).difference(own.values()))
    return own | dict(zip(alphabet[len(own) :], others, strict=True))
