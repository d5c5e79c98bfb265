"""A tokenizer folder as load generators want it, from a GGUF file: they count tokens by themselves.

usage: python -m tests.load_tokenizer FILE.gguf FOLDER
"""

import json
import sys
from pathlib import Path

import msgspec

from frontend.gguf_tokenizer import GgufVocabulary, build_tokenizer
from protocol.gguf_header import read_header


def write_tokenizer(gguf: Path, folder: Path) -> None:
    """tokenizer.json and what transformers asks for beside it."""
    vocabulary = msgspec.convert(read_header(gguf).metadata, GgufVocabulary)
    backend = build_tokenizer(vocabulary)
    backend.save(str(folder / "tokenizer.json"))
    end = backend.id_to_token(vocabulary.eos_token_id)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": vocabulary.chat_template, "eos_token": end, "pad_token": end,
        "model_max_length": 8192,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    write_tokenizer(Path(sys.argv[1]), Path(sys.argv[2]))
