"""API keys of the HTTP door. The configuration holds their hashes only, so that no run directory has a key."""

import hashlib
import logging
import os
import stat
from pathlib import Path

log = logging.getLogger(__name__)


def hash_of_key(key: bytes) -> str:
    """SHA-256, in hex."""
    return hashlib.sha256(key).hexdigest()


def api_key_hashes(keys: list[str], file: str | None) -> list[str]:
    """The hashes of the keys and of those in the file, each once. Raises ValueError, which shows no key."""
    for key in keys:
        _check(key, "--api-key")
    keys = keys + ([] if file is None else _read_keys(file))
    return list(dict.fromkeys(hash_of_key(key.encode()) for key in keys))


def _read_keys(file: str) -> list[str]:
    """One key a line; blank lines and those that begin with # are passed over."""
    try:
        with open(Path(file).expanduser(), encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            lines = [line.strip() for line in opened]
    except UnicodeDecodeError:
        raise ValueError(f"--api-key-file {file} is no UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"--api-key-file {file}: {error.strerror}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"--api-key-file {file} holds no key")
    for key in keys:
        _check(key, f"--api-key-file {file}")
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("--api-key-file %s can be read by other users: its mode is %o", file, stat.S_IMODE(mode))
    return keys


def _check(key: str, place: str) -> None:
    if not key.strip() or not key.isprintable() or key != key.strip():
        raise ValueError(f"{place} must give printable text without blanks around it")
