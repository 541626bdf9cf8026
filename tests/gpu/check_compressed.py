"""Decode mutated lossless streams by our own kernels, for compute-sanitizer.

Usage: ``compute-sanitizer --tool memcheck python -m tests.gpu.check_compressed [COUNT]``. Ends with
status 1 if a stream is accepted and differs from what the library of the CPU decodes.
"""

import random
import sys

import imagecodecs

from napari_wsigpu.gpu.compressed.compressed_engine import DEFLATE, LZW, PACKBITS, ZSTD
from napari_wsigpu.slide import runtime
from tests.gpu import test_compressed as tests

BY_LIBRARY = {
    ZSTD: tests.by_libzstd,
    DEFLATE: tests.by_zlib,
    LZW: tests.by_libtiff,
    PACKBITS: tests.by_packbits,
}


def mutated(stream: bytes, chance: random.Random) -> bytes:
    """Change, remove or add bytes of a stream; a frame's descriptor stays."""
    text = bytearray(stream)
    for _ in range(chance.choice((1, 1, 2, 5))):
        place = chance.randrange(5, len(text))
        match chance.randrange(4):
            case 0:
                text[place] ^= 1 << chance.randrange(8)
            case 1:
                text[place] = chance.choice((0, 255, chance.randrange(256)))
            case 2:
                text[place:place] = chance.randbytes(chance.randrange(1, 4))
            case 3 if len(text) > 40:
                del text[place : place + chance.randrange(1, 9)]
    return bytes(text)


def compared(engine: object, algorithm: str, total: int, seed: int = 1) -> tuple[int, int]:
    """Decode mutated streams; return how many are accepted, and how many of these differ."""
    by_library = BY_LIBRARY[algorithm]
    chance, accepted, wrong = random.Random(seed), 0, 0
    for number in range(-(-total // 100)):
        text = [tests.CONTENTS["tissue"], *tests.DAMAGED][number % 4]
        match algorithm:
            case "zstd":
                whole = imagecodecs.zstd_encode(text, level=(1, 3, 9, 19)[number // 4 % 4])
            case "deflate":
                whole = tests.deflated(text, (0, 1, 6, 9)[number // 4 % 4])
            case "LZW":
                whole = imagecodecs.lzw_encode(text)
            case _:
                whole = imagecodecs.packbits_encode(text)
        frames = [mutated(whole, chance) for _ in range(100)]
        flags, found = tests.decoded(engine, algorithm, frames, len(text))
        for frame, flag, pixels in zip(frames, flags, found, strict=True):
            accepted += not flag
            wrong += not flag and pixels != by_library(frame, len(text))
    return accepted, wrong


def main() -> int:
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    engine, damaged = runtime.default().devices.worker(0).compressed, 0
    for algorithm in BY_LIBRARY:
        accepted, wrong = compared(engine, algorithm, total)
        print(total, "mutated streams of", algorithm, accepted, "accepted,", wrong, "differ")
        damaged += wrong
    return damaged > 0


if __name__ == "__main__":
    sys.exit(main())
