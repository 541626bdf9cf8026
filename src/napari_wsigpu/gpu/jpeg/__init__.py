"""JPEG tiles, and all code streams that nvImageCodec decodes."""
