"""Which lane holds what on the GPU: device_tile.cuh with ldmatrix and mma.sync emulated, against the host's tile."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_the_lanes_of_a_warp_hold_the_host_s_tile(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX", "c++").split()
    if shutil.which(compiler[0]) is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "tile_lanes"
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-pthread", f"-I{HERE.parents[1] / 'csrc'}"]
    subprocess.run([*compiler, *flags, str(HERE / "tile_lanes.cpp"), "-o", str(program)], check=True, timeout=300)
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert result.stdout == "0\n"
