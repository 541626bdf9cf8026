"""The command `wsigpu`: `info`, `doctor`, `bench` and `convert`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `napari_wsigpu.cli.command.main`.

    The probes of the doctor are modules of this package too, and need nothing of this.
    """
    from napari_wsigpu.cli import command

    return command.main(arguments)
