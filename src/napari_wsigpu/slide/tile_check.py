"""`TileCheck`: the result of decoding every tile of a slide."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileCheck:
    """The result of decoding every tile of a slide.

    Attributes
    ----------
    tiles : int
        Number of tiles that were checked.
    damaged : tuple of (str, str)
        Name of each tile that can't be decoded, and the reason.
    doubtful : tuple of (str, tuple of str)
        Name of each tile that was decoded with warnings, and their codes: ``"bad-huffman-code"``,
        ``"extraneous-bytes"``, ``"restart-lost"`` or ``"other"``. Only libjpeg on the CPU warns.
    """

    tiles: int
    damaged: tuple[tuple[str, str], ...]
    doubtful: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def sound(self) -> int:
        """Number of tiles that were decoded without a warning."""
        return self.tiles - len(self.damaged) - len(self.doubtful)
