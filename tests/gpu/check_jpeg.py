"""Decode mutated JPEG tiles by our own kernels, for compute-sanitizer.

Usage: ``compute-sanitizer --tool memcheck python -m tests.gpu.check_jpeg [COUNT]``. Ends with
status 1 if a tile differs from the CPU's.
"""

import os
import sys

os.environ["WSIGPU_JPEG_ENGINE"] = "kernels"

import tempfile
from pathlib import Path

import numpy as np

from tests.gpu import test_jpeg_kernels as tests


def main() -> int:
    rng, wrong, count = np.random.default_rng(1), 0, 0
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as folder:
        while count < total:
            name = ("444", "420")[count // 12 % 2]
            path = Path(folder) / f"{count}.tif"
            tiles = [tests.mutated(each, rng) for each in tests.ENCODED[name] * 20]
            tests.write(path, tiles, (64, 64), rows=60, subsampling=tests.SAMPLINGS[name])
            differ = tests.read_tolerantly(path, "cuda") != tests.read_tolerantly(path, "cpu")
            wrong += int(differ.reshape(60, 64, 4, 64, -1).any(axis=(1, 3, 4)).sum())
            count += len(tiles)
            path.unlink()
    print(count, "mutated tiles,", wrong, "differ")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
