"""GPU decoding of tiles whose bytes are compressed: deflate and LZW."""
