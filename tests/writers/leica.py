"""Leica SCN files that the tests write themselves."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

from tests.writers import tiffbytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

NAMESPACE = "http://www.leica-microsystems.com/scn/2010/10/01"
SPACING = 500


@dataclass
class Scan:
    """One image: its pictures of each level, one a channel, and its place in nanometres."""

    levels: Sequence[Sequence[NDArray[Any]]]
    left: int
    top: int
    spacing: float = SPACING
    illumination: str = "brightfield"
    objective: str = "20"
    channels: Sequence[dict[str, str]] = ()
    planes: int = 1
    more: str = ""
    view: tuple[int, int] | None = None
    tile: tuple[int, int] = field(default=(32, 48))

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in nanometres."""
        if self.view is not None:
            return self.view
        height, width = self.levels[0][0].shape[:2]
        return int(width * self.spacing), int(height * self.spacing)


def scan(
    pixels: NDArray[Any], left: int, top: int, steps: Sequence[int] = (2,), **more: Any
) -> Scan:
    """Return a brightfield scan whose lower levels hold every `step`-th pixel of the one above."""
    levels = [pixels]
    for step in steps:
        levels.append(levels[-1][::step, ::step])
    return Scan([[level] for level in levels], left, top, **more)


def element(item: Scan, ifds: Sequence[tuple[int, int, int, int, int, int]]) -> str:
    """Return the XML of one image; `ifds` are (r, c, z, page, width, height)."""
    dimensions = "".join(
        f'<dimension sizeX="{width}" sizeY="{height}" r="{r}" c="{c}" z="{z}" ifd="{page}"/>'
        for r, c, z, page, width, height in ifds
    )
    channels = "".join(
        "<channel " + " ".join(f"{key}={quoteattr(text)}" for key, text in channel.items()) + "/>"
        for channel in item.channels
    )
    width, height = item.size
    return f"""<image name="image" uuid="u">
      <creationDate>2012-05-04T11:22:33.000Z</creationDate>
      <device model="Leica SCN400;Leica SCN" version="1.5.1.10804 2012/05/10"/>
      <pixels sizeX="1" sizeY="1">{dimensions}</pixels>
      <view sizeX="{width}" sizeY="{height}" offsetX="{item.left}" offsetY="{item.top}"
        spacingZ="1200"/>
      <scanSettings>
        <objectiveSettings><objective>{item.objective}</objective></objectiveSettings>
        <illuminationSettings><numericalAperture>0.4</numericalAperture>
          <illuminationSource>{item.illumination}</illuminationSource></illuminationSettings>
        <channelSettings>{channels}</channelSettings>
      </scanSettings>{item.more}</image>"""


def write(
    path: Path,
    scans: Sequence[Scan],
    size: tuple[int, int],
    *,
    namespace: str = NAMESPACE,
    barcode: str | None = "slide 1",
    edit: Any = lambda xml: xml,
    **options: Any,
) -> Path:
    """Write scans on a slide of `size` nanometres; `edit` changes the XML."""
    pages: list[tiffbytes.Page] = []
    images = []
    for item in scans:
        ifds = []
        for z in range(item.planes):
            for r, channels in enumerate(item.levels):
                for c, pixels in enumerate(channels):
                    height, width = pixels.shape[:2]
                    ifds.append((r, c, z, len(pages), width, height))
                    rate = 1e7 / (item.size[0] / width)
                    more = {
                        282: (tiffbytes.RATIONAL, rate),
                        283: (tiffbytes.RATIONAL, rate),
                        296: (tiffbytes.SHORT, 3),
                    }
                    photometric = 2 if pixels.shape[2] == 3 else 1
                    settings: dict[str, Any] = {"encode": tiffbytes.deflate, "compression": 8}
                    settings |= {"photometric": photometric} | options
                    shown = pixels // (z + 1)
                    pages.append(tiffbytes.page(shown, tile=item.tile, more=more, **settings))
        images.append(element(item, ifds))
    code = "" if barcode is None else base64.b64encode(barcode.encode()).decode()
    xml = (
        f'<?xml version="1.0"?><scn xmlns="{namespace}"><collection name="c" uuid="u" '
        f'sizeX="{size[0]}" sizeY="{size[1]}">'
        + (f"<barcode>{code}</barcode>" if code else "")
        + "".join(images)
        + "</collection></scn>"
    )
    pages[0].tags[270] = (tiffbytes.ASCII, edit(xml))
    return tiffbytes.write(path, pages, bigtiff=True)
