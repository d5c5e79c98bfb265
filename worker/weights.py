"""Tensors of a checkpoint by name, from the safetensors files of a folder, and how they get into the model's weights."""

import json
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

log = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"
MAX_NAMES_SHOWN = 5
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TensorSource(Protocol):
    """A checkpoint, whatever its format: Hugging Face names, torch shapes."""

    def names(self) -> Iterable[str]:
        """Every tensor the checkpoint holds."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""

    def read(self, name: str) -> Tensor:
        """The tensor; may share memory with the file."""


class SafetensorsFolder:
    """The *.safetensors files of a folder; with an index, its entries and nothing else."""

    def __init__(self, folder: Path):
        """Open every file. Raises ValueError naming the file that is missing, incomplete or no safetensors file."""
        self.folder = folder
        if (folder / "adapter_config.json").exists():
            raise ValueError(f"{folder} holds adapters (adapter_config.json): merge the adapters into the model first")
        index = folder / INDEX_NAME
        file_names = _read_index(index) if index.exists() else None
        self.files = {name: open_safetensors(folder / name) for name in _file_names(folder, file_names)}
        self.file_of = file_names if file_names is not None else self._names_of_files()
        for name, file_name in self.file_of.items():
            if name not in self.files[file_name].keys():
                raise ValueError(f"{folder / file_name} does not hold {name}, which {INDEX_NAME} places there")

    def _names_of_files(self) -> dict[str, str]:
        file_of: dict[str, str] = {}
        for file_name, file in self.files.items():
            for name in file.keys():
                if name in file_of:
                    raise ValueError(
                        f"{self.folder}: both {file_of[name]} and {file_name} hold {name}, and there is no {INDEX_NAME} to choose"
                    )
                file_of[name] = file_name
        return file_of

    def names(self) -> Iterable[str]:
        """See TensorSource."""
        return self.file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorSource."""
        return tuple(self.files[self.file_of[name]].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """See TensorSource."""
        tensor = self.files[self.file_of[name]].get_tensor(name)
        if tensor.dtype not in FLOATS:  # what is quantised needs scales that lie elsewhere
            raise ValueError(f"{self.folder / self.file_of[name]}: {name} holds {tensor.dtype}, which is not supported")
        return tensor


def _file_names(folder: Path, index: dict[str, str] | None) -> list[str]:
    names = sorted({*index.values()} if index is not None else {path.name for path in folder.glob("*.safetensors")})
    if not names:
        raise ValueError(f"{folder} holds no *.safetensors file")
    return names


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        assert_names = all(isinstance(file_name, str) and Path(file_name).name == file_name for file_name in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid index ({error}): damaged or edited") from None
    if not assert_names:
        raise ValueError(f"{path} must name files of its own folder")
    return weight_map


def open_safetensors(path: Path) -> safe_open:
    """Open a file. Raises ValueError with the file's name and the probable reason when it is no whole safetensors file."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist, though {INDEX_NAME} names it: the download is probably incomplete")
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise ValueError(f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull` or download it again")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = _size_complaint(path) or f"not a safetensors file ({error})"
        raise ValueError(f"{path}: {reason}") from None


def _size_complaint(path: Path) -> str | None:
    """What the file's size says about its header: 8 bytes of length, JSON with the offsets of the data, then the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if header_size > size - 8:
            return f"its header does not fit its {size} bytes: cut short, or not a safetensors file"
        try:
            header = json.loads(file.read(header_size))
            end = 8 + header_size + max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
    if size == end:
        return None
    what = "cut short, an interrupted download or a full disk" if size < end else "something was appended to it"
    return f"holds {size} bytes where its header asks for {end}: {what}"


def check_fit(source: TensorSource, slices: dict[str, Tensor], ignored: Iterable[str] = ()) -> None:
    """Raise ValueError naming tensors that are missing, unexpected or misshapen. `ignored` may be present.

    The slices may lie on the meta device: so a wrong configuration is found out before memory is asked for.
    """
    check_names(source.names(), slices.keys(), ignored)
    for name, target in slices.items():
        if source.shape(name) != tuple(target.shape):
            raise ValueError(f"{name} has shape {list(source.shape(name))} where the configuration asks for {list(target.shape)}")


def copy_weights(source: TensorSource, slices: dict[str, Tensor]) -> None:
    """Copy every tensor into its slice, converted to the slice's type; after `check_fit`."""
    for name, target in tqdm(slices.items(), desc="loading weights", unit="tensor", disable=not sys.stderr.isatty()):
        target.copy_(source.read(name))


def check_names(present: Iterable[str], expected: Iterable[str], ignored: Iterable[str]) -> None:
    """Raise ValueError for tensors that are missing or that the model has no place for; rotary tables are recomputed."""
    present = {name for name in present if not name.endswith("rotary_emb.inv_freq")}
    if missing := set(expected) - present:
        raise ValueError(f"the checkpoint lacks {_listed(missing)}")
    if unexpected := present - set(expected) - set(ignored):
        hint = ": merge the adapters into the model first" if any("lora_" in name for name in unexpected) else ""
        raise ValueError(f"the model has no place for {_listed(unexpected)}{hint}")


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:MAX_NAMES_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
