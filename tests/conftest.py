"""Skips tests that need a GPU where there is none."""

import pytest


def pytest_collection_modifyitems(items):
    needing = [item for item in items if item.get_closest_marker("cuda")]
    if needing:
        import torch

        if not torch.cuda.is_available():
            for item in needing:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
