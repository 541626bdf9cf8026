"""GPU decoding of tiles whose bytes are compressed: deflate, LZW, PackBits and zstd."""
