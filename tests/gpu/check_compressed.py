"""Decode mutated zstd frames by our own kernel, for compute-sanitizer.

Usage: ``compute-sanitizer --tool memcheck python -m tests.gpu.check_compressed [COUNT]``. Ends with
status 1 if a frame is accepted and differs from what libzstd decodes.
"""

import random
import sys

import imagecodecs

from napari_wsigpu.gpu.compressed.compressed_engine import ZSTD
from napari_wsigpu.slide import runtime
from tests.gpu import test_compressed as tests


def mutated(stream: bytes, chance: random.Random) -> bytes:
    """Change, remove or add bytes of a frame after its descriptor."""
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


def compared(engine: object, total: int, seed: int = 1) -> tuple[int, int]:
    """Decode mutated frames; return how many are accepted, and how many of these differ."""
    chance, accepted, wrong = random.Random(seed), 0, 0
    for number in range(-(-total // 100)):
        text = [tests.CONTENTS["tissue"], *tests.DAMAGED][number % 4]
        whole = imagecodecs.zstd_encode(text, level=(1, 3, 9, 19)[number // 4 % 4])
        frames = [mutated(whole, chance) for _ in range(100)]
        flags, found = tests.decoded(engine, ZSTD, frames, len(text))
        for frame, flag, pixels in zip(frames, flags, found, strict=True):
            accepted += not flag
            wrong += not flag and pixels != tests.by_libzstd(frame, len(text))
    return accepted, wrong


def main() -> int:
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    accepted, wrong = compared(runtime.default().devices.worker(0).compressed, total)
    print(total, "mutated frames,", accepted, "accepted,", wrong, "differ")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
