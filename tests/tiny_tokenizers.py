"""Small tokenizers, trained in a second on the standard library's own text."""

import functools
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MORE_TEXT = ["Größe, naïve, Ελλάδα, 日本語の文字, 你好世界, ไทย, 👩‍👩‍👧 🇫🇷 🎉", "1999 2024 1234567 100 000 12 12 123"] * 50
SPECIAL = ["<s>", "</s>", "<|im_end|>"]


def corpus() -> list[str]:
    folder = Path(string.__file__).parent
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("argparse.py", "textwrap.py", "this.py", "heapq.py")]
    return [line for text in texts for line in text.splitlines()] + MORE_TEXT


@functools.cache
def byte_level() -> Tokenizer:
    """Like GPT-2: every byte has an id, spaces belong to the word that follows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """Like Llama 2: words begin with ▁, characters without an id of their own are spelled in bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=list("▁" + string.ascii_letters),
        limit_alphabet=80,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    plain_bytes = Tokenizer.from_str(tokenizer.to_str().replace('"special":true', '"special":false'))
    plain_bytes.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", *SPECIAL)])
    return plain_bytes
