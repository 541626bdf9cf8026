"""Parsers that describe slide files as `SlideLayout`s, without decoding pixels."""
