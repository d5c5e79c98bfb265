"""Kernels run on the GPU where there is one, and interpreted on the CPU elsewhere."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of real shapes without a GPU."""
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernel tests run."""
    return torch.device("cuda" if HAS_GPU else "cpu")
