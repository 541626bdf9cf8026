"""The program `wsigpu` with its commands `info`, `doctor`, `check`, `bench` and `convert`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `napari_wsigpu.cli.command.main`."""
    # The doctor's probe processes import this package too and must start quickly, so the commands
    # are imported only here.
    from napari_wsigpu.cli import command

    return command.main(arguments)
