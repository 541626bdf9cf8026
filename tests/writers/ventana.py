"""Ventana BIF and TIFF files that the tests write themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.writers import slides, tiffbytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

TILE = (32, 48)
SCAN = (
    'Mode="brightfield" Magnification="20" ScanRes="0.465000" ScanWhitePoint="235" '
    'BuildVersion="3.3.1.1" UnitNumber="1234" Empty="" Barcode1D="" Barcode2D="A 1"'
)


@dataclass
class Area:
    """A scanned area: tiles (columns, rows), its first tile, its place, and its overlaps.

    `overlap_x[row][gap]` and `overlap_y[column][gap]` are (overlap, confidence).
    """

    tiles: tuple[int, int]
    first: tuple[int, int] = (0, 0)
    place: tuple[float, float] = (0, 0)
    overlap: tuple[float, float] = (0, 0)
    by_gap: dict[int, float] = field(default_factory=dict)
    confidence: int = 99
    scanned: int = 1
    to_and_fro: bool = False

    def number(self, column: int, row: int) -> int:
        """Return a tile's number: from the lower left one to and fro upwards."""
        across, down = self.tiles
        up = down - 1 - row
        return up * across + (across - 1 - column if up % 2 else column) + 1

    def joints(self) -> Iterator[str]:
        """Return the XML of each pair of neighbours."""
        across, down = self.tiles
        for row in range(down):
            for column in range(1, across):
                x = self.by_gap.get(column, self.overlap[0])
                pair = self.number(column - 1, row), self.number(column, row)
                if self.to_and_fro and (down - 1 - row) % 2:
                    yield self.joint("LEFT", pair[::-1], x, 0)
                else:
                    yield self.joint("RIGHT", pair, x, 0)
        for row in range(1, down):
            for column in range(across):
                pair = self.number(column, row), self.number(column, row - 1)
                yield self.joint("UP", pair, 0, self.overlap[1])

    def joint(self, direction: str, tiles: tuple[int, int], x: float, y: float) -> str:
        return (
            f'<TileJointInfo FlagJoined="1" Confidence="{self.confidence}" '
            f'Direction="{direction}" Tile1="{tiles[0]}" Tile2="{tiles[1]}" '
            f'OverlapX="{x}" OverlapY="{y}"/>'
        )


def stitching(areas: Sequence[Area], tile: tuple[int, int] = TILE) -> str:
    """Return the XML of level 0."""
    infos = "".join(
        f'<ImageInfo AOIScanned="{area.scanned}" AOIIndex="{index}" NumRows="{area.tiles[1]}" '
        f'NumCols="{area.tiles[0]}" Width="{tile[1]}" Height="{tile[0]}" '
        f'Pos-X="{area.place[0]}" Pos-Y="{area.place[1]}">{"".join(area.joints())}</ImageInfo>'
        for index, area in enumerate(areas)
    )
    origins = "".join(
        f'<AOI{index} OriginX="{area.first[0] * tile[1]}" OriginY="{area.first[1] * tile[0]}"/>'
        for index, area in enumerate(areas)
    )
    return (
        f'<?xml version="1.0"?><EncodeInfo Ver="2"><SlideStitchInfo>{infos}</SlideStitchInfo>'
        f"<AoiOrigin>{origins}</AoiOrigin></EncodeInfo>"
    )


def scan_xml(attributes: str = SCAN) -> str:
    """Return the XML of the first page."""
    return f'<?xml version="1.0"?><Metadata><iScan {attributes}><AOI0/></iScan></Metadata>'


def write(
    path: Path,
    levels: Sequence[NDArray[Any]],
    encoded: str | bytes | None,
    *,
    scan: str | bytes | None = None,
    descriptions: Sequence[str] = (
        "level=0 mag=20 quality=95",
        "level=1 mag=10 quality=95",
        "level=2 mag=5 quality=95",
    ),
    missing: Sequence[int] = (),
    tile: tuple[int, int] = TILE,
    layers: Sequence[Sequence[NDArray[Any]]] = (),
) -> Path:
    """Write stored levels, the label image and a thumbnail.

    `layers` are further focal planes, each of as many levels.
    """
    first = scan_xml() if scan is None else scan
    pages = [
        tiffbytes.page(
            slides.picture(40, 60),
            tiffbytes.deflate,
            compression=8,
            tile=None,
            description="Label Image",
            more=_packet(first),
        ),
        tiffbytes.page(
            slides.picture(20, 30),
            tiffbytes.deflate,
            compression=8,
            tile=None,
            description="Thumbnail",
        ),
    ]
    for index, (pixels, text) in enumerate(zip(levels, descriptions, strict=False)):
        more = _packet(encoded) if index == 0 and encoded is not None else {}
        more[306] = (tiffbytes.ASCII, "2011:08:04 10:11:12")
        if layers:
            more[32997] = (tiffbytes.LONG, 1 + len(layers))
        stored = tiffbytes.page(
            pixels,
            tiffbytes.deflate,
            compression=8,
            tile=tile,
            description=text,
            missing=missing if index == 0 else (),
            more=more,
        )
        for layer in layers:
            parts = tiffbytes.tiles(layer[index], tile)
            stored.segments = [*stored.segments, *map(tiffbytes.deflate, parts)]
        pages.append(stored)
    return tiffbytes.write(path, pages)


def _packet(xml: str | bytes) -> dict[int, tuple[int, Any]]:
    return {700: (tiffbytes.BYTE, xml.encode() if isinstance(xml, str) else xml)}
