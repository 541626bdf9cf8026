"""Decoding of tiles on the CPU, and code that the decoders on all devices share."""
