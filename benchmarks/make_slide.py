"""Write a large Aperio SVS in seconds: a few hundred encoded tiles of tissue, shuffled.

Usage: ``python -m benchmarks.make_slide OUT WIDTH HEIGHT [--tile 256 --codec jpeg]``
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import cast, get_args

from benchmarks.synthetic import Codec, make_slide


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write a large Aperio SVS for benchmarks.")
    parser.add_argument("out", type=Path)
    parser.add_argument("width", type=int)
    parser.add_argument("height", type=int)
    parser.add_argument("--tile", type=int, default=256)
    parser.add_argument("--codec", choices=get_args(Codec), default="jpeg")
    args = parser.parse_args()
    make_slide(args.out, args.width, args.height, args.tile, cast("Codec", args.codec))


if __name__ == "__main__":
    main()
