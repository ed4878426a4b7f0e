"""Memory of a CPU process under the allocator that planning asks for."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Every other of many tensors is freed, after a larger one was: by default glibc keeps what lies between the others.
CODE = """
import sys
import torch
from hotspa_plugin.runtime.memory import resident_bytes, return_freed_memory

if sys.argv[1] == "planned":
    return_freed_memory()
torch.ones(5 * 2**20)  # 20 MB, freed at once
before = resident_bytes()
tensors = [torch.ones(2**18) for _ in range(200)]  # 1 MB each
del tensors[::2]
print((resident_bytes() - before) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_what_is_freed_is_given_back_where_memory_is_planned():
    def held_mb(how: str) -> float:
        run = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
        return float(run.stdout)

    assert held_mb("planned") == pytest.approx(100, abs=5)
    assert held_mb("as it is") > 150  # else there is nothing to do, and return_freed_memory can go
