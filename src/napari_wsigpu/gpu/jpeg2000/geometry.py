"""Geometry of JPEG 2000 code streams (T.800, annex B), as tables for the kernels.

Resolutions, subbands, precincts, code blocks and packets follow from a main header alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.gpu.jpeg2000.jpeg2000_tables import BAND, BLOCK, COMPONENT, PACKET, PRECINCT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.jpeg2000.jpeg2000_header import Header

# Limits of the tables of one form.
MOST_BLOCKS, MOST_PACKETS = 1 << 16, 1 << 18


class Lift(NamedTuple):
    """One-dimensional inverse wavelet transforms of the lines of one resolution (T.800, F.3.6).

    Each line is stored as its low-pass half followed by its high-pass half.

    Attributes
    ----------
    plane, planes, plane_size : int
        Offset of the first plane's coefficients within a tile; number of planes (components) that
        are transformed alike; distance between them.
    pitch : int
        Coefficients from one row to the next.
    lines, length : int
        Number of lines, and samples in each.
    low : int
        Number of samples in the low-pass half.
    first : int
        Position of the first low-pass sample in the line: 0 or 1.
    down : bool
        Whether lines are columns rather than rows.
    reversible : bool
        Whether the wavelet is 5/3 rather than 9/7.
    """

    plane: int
    planes: int
    plane_size: int
    pitch: int
    lines: int
    length: int
    low: int
    first: int
    down: bool
    reversible: bool


class Geometry(NamedTuple):
    """Tables that describe the code streams of one form.

    Attributes
    ----------
    edges : tuple of int
        (height, width, left, upper) of the image.
    blocks, bands, precincts, packets, components : ndarray
        Rows of the types in `gpu.jpeg2000.jpeg2000_tables`.
    lifts : list of Lift
        Steps of the inverse wavelet, in order.
    nodes : int
        Nodes in each of a tile's two sets of tag trees (inclusion and zero bit planes).
    coefficients : int
        Coefficients of a tile.
    groups, planes : int
        Largest number of groups of 8 by 4 samples, and of bit planes, in a code block.
    """

    edges: tuple[int, int, int, int]
    blocks: NDArray[np.void]
    bands: NDArray[np.void]
    precincts: NDArray[np.void]
    packets: NDArray[np.void]
    components: NDArray[np.void]
    lifts: list[Lift]
    nodes: int
    coefficients: int
    groups: int
    planes: int


def _up(value: int, by: int) -> int:
    return -(-value // by)


def _shift_up(value: int, bits: int) -> int:
    return -(-value >> bits)


class _Rect(NamedTuple):
    """Edges of a rectangle; `right` and `lower` are exclusive."""

    left: int
    upper: int
    right: int
    lower: int

    @property
    def width(self) -> int:
        return max(0, self.right - self.left)

    @property
    def height(self) -> int:
        return max(0, self.lower - self.upper)

    def scaled(self, bits: int) -> _Rect:
        """Return the rectangle at a resolution that is 2**bits times lower (T.800, B-14)."""
        return _Rect(*(_shift_up(edge, bits) for edge in self))

    def band(self, level: int, right: int, lower: int) -> _Rect:
        """Return a subband's rectangle (T.800, B-15). `right`, `lower`: 1 for high-pass, else 0."""
        half = 1 << level - 1 if level else 0
        x, y = right * half, lower * half
        edges = (self.left - x, self.upper - y, self.right - x, self.lower - y)
        return _Rect(*(_shift_up(edge, level) for edge in edges))


class _Plane(NamedTuple):
    """A component in a tile: its number and rectangle, offset of its coefficients, row length."""

    number: int
    whole: _Rect
    offset: int
    pitch: int


def plan(header: Header) -> Geometry | str:
    """Return the tables for a main header, or the reason why it cannot be decoded here."""
    return _Planner(header).plan()


class _Planner:
    def __init__(self, header: Header) -> None:
        self._header = header
        self._blocks: list[tuple[float, ...]] = []
        self._bands: list[tuple[int, ...]] = []
        self._precincts: list[tuple[int, int]] = []
        # For each precinct: y and x on the reference grid, component, resolution, and its number.
        self._positions: list[tuple[int, int, int, int, int]] = []
        self._nodes = self._coefficients = 0

    def plan(self) -> Geometry | str:
        header = self._header
        lifts: list[tuple[int, Lift]] = []
        components = np.zeros(len(header.components), COMPONENT)
        for number, component in enumerate(header.components):
            whole = _Rect(
                _up(header.left, component.across),
                _up(header.upper, component.down),
                _up(header.right, component.across),
                _up(header.lower, component.down),
            )
            if not whole.width or not whole.height:
                return "a component has no samples"
            plane = _Plane(number, whole, self._coefficients, whole.width)
            self._coefficients += whole.width * whole.height
            half = 1 << component.bits - 1
            lowest = -half if component.signed else 0
            components[number] = (
                *(plane.offset, plane.pitch, whole.width, whole.height, whole.left, whole.upper),
                *(component.across, component.down, 0 if component.signed else half),
                *(lowest, lowest + 2 * half - 1, header.coding[number].reversible, 0),
            )
            if not self._add_component(plane):
                return "it has too many code blocks or precincts"
            lifts += self._lifts(plane)
        if len(self._precincts) * header.layers > MOST_PACKETS:
            return "it has too many packets"
        blocks = np.array(self._blocks, BLOCK)
        groups = ((blocks["width"] + 7) // 8) * ((blocks["height"] + 3) // 4)
        left, upper, right, lower = header[:4]
        return Geometry(
            edges=(lower - upper, right - left, left, upper),
            blocks=blocks,
            bands=np.array(self._bands, BAND),
            precincts=np.array(self._precincts, PRECINCT),
            packets=self._packets(),
            components=components,
            lifts=_merge_lifts(lifts),
            nodes=self._nodes,
            coefficients=self._coefficients,
            groups=int(groups.max()),
            planes=int(blocks["planes"].max()),
        )

    def _add_component(self, plane: _Plane) -> bool:
        coding = self._header.coding[plane.number]
        for resolution in range(coding.levels + 1):
            area = plane.whole.scaled(coding.levels - resolution)
            if not area.width or not area.height:
                continue
            wide, high = coding.precincts[resolution]
            columns = range(area.left >> wide, _shift_up(area.right, wide))
            rows = range(area.upper >> high, _shift_up(area.lower, high))
            if len(columns) * len(rows) > MOST_PACKETS:
                return False
            for row in rows:
                for column in columns:
                    self._add_precinct(plane, resolution, column, row)
                if max(len(self._blocks), self._nodes) > MOST_BLOCKS:
                    return False
        return True

    def _add_precinct(self, plane: _Plane, resolution: int, column: int, row: int) -> None:
        number, whole, offset, pitch = plane
        header, coding = self._header, self._header.coding[number]
        component, finer = header.components[number], coding.levels - resolution
        wide, high = coding.precincts[resolution]
        # Position of the precinct on the reference grid, for progressions by position (B.12.1.3).
        x = max(header.left, (column << wide + finer) * component.across)
        y = max(header.upper, (row << high + finer) * component.down)
        self._positions.append((y, x, number, resolution, len(self._precincts)))
        halved = resolution > 0
        first = len(self._bands)
        kinds = [(1, 0), (0, 1), (1, 1)] if halved else [(0, 0)]
        level = finer + 1 if halved else finer
        # Subbands have half the resolution of the precinct that they belong to (B.6, B.7).
        wide, high = wide - halved, high - halved
        for right, down in kinds:
            band = whole.band(level, right, down)
            part = _Rect(
                max(band.left, column << wide),
                max(band.upper, row << high),
                min(band.right, column + 1 << wide),
                min(band.lower, row + 1 << high),
            )
            low = whole.scaled(level)
            # In the plane, a subband follows the low-pass band of its level, to the right, below,
            # or both.
            corner = offset + right * low.width + down * low.height * pitch
            # Move from the band's first coefficient to where its (0, 0) would be.
            corner -= band.upper * pitch + band.left
            self._add_band(plane, resolution, part, corner, (right, down))
        self._precincts.append((first, len(self._bands) - first))

    def _add_band(
        self, plane: _Plane, resolution: int, part: _Rect, corner: int, kind: tuple[int, int]
    ) -> None:
        """Add the code blocks of a precinct in a subband; `kind` is `(right, lower)` of `band`."""
        if not part.width or not part.height:
            return
        number, _, _, pitch = plane
        header, coding = self._header, self._header.coding[number]
        precinct, halved = coding.precincts[resolution], resolution > 0
        # B.7, equations B-17 and B-18.
        wide = min(coding.block[0], precinct[0] - halved)
        high = min(coding.block[1], precinct[1] - halved)
        columns = range(part.left >> wide, _shift_up(part.right, wide))
        rows = range(part.upper >> high, _shift_up(part.lower, high))
        across, down = len(columns), len(rows)
        nodes = across * down
        # All levels of a tag tree (B.10.2): each halves the one below it.
        while across > 1 or down > 1:
            across, down = (across + 1) // 2, (down + 1) // 2
            nodes += across * down
        self._bands.append((len(self._blocks), len(columns), len(rows), self._nodes, nodes))
        self._nodes += nodes
        planes, scale = self._quantum(number, resolution, kind)
        orientation = 2 if kind[0] and kind[1] else int(kind[0] > 0)
        for row in rows:
            top, bottom = max(part.upper, row << high), min(part.lower, row + 1 << high)
            for column in columns:
                left, right = max(part.left, column << wide), min(part.right, column + 1 << wide)
                target = corner + top * pitch + left
                self._blocks.append(
                    (
                        *(target, pitch, right - left, bottom - top, planes, orientation),
                        *(coding.style, header.shifts[number], coding.reversible, scale, 0),
                    )
                )

    def _quantum(self, number: int, resolution: int, kind: tuple[int, int]) -> tuple[int, float]:
        """Return the maximum number of bit planes of a subband, and half a quantization step."""
        header, quanta = self._header, self._header.quanta[number]
        # Order of the steps in QCD and QCC: LL, then HL, LH and HH of each resolution.
        index = 0 if not resolution else 3 * resolution - 3 + kind[0] + 2 * kind[1]
        if quanta.style == 1:
            # Derived from the step of LL (E-5).
            exponent, mantissa = quanta.steps[0]
            exponent -= max(0, resolution - 1)
        else:
            exponent, mantissa = quanta.steps[index]
        # Mb (E-2), and the up-shift of the region of interest (H.1).
        planes = max(0, quanta.guard + exponent - 1) + header.shifts[number]
        bits = header.components[number].bits
        # E-3 without the gain of the subband, which LOW and HIGH in wavelet.cu include.
        step = (1 + mantissa / 2048) * 2.0 ** (bits - exponent)
        return planes, step / 2

    def _lifts(self, plane: _Plane) -> list[tuple[int, Lift]]:
        number, whole, offset, pitch = plane
        coding = self._header.coding[number]
        found = []
        for finer in range(coding.levels - 1, -1, -1):
            area, low = whole.scaled(finer), whole.scaled(finer + 1)
            if not area.width or not area.height:
                continue
            for down in (False, True):
                sizes = area.height, area.width, low.width, area.left & 1
                if down:
                    sizes = area.width, area.height, low.height, area.upper & 1
                lift = Lift(offset, 1, 0, pitch, *sizes, down, coding.reversible)
                found.append((finer, lift))
        return found

    def _packets(self) -> NDArray[np.void]:
        """Return the precinct and layer of each packet, in the order of B.12.1."""
        layers = range(self._header.layers)
        # LRCP, RLCP, RPCL, PCRL, CPRL; p is the number of the precinct.
        orders = (
            lambda y, x, c, r, p, layer: (layer, r, c, p),
            lambda y, x, c, r, p, layer: (r, layer, c, p),
            lambda y, x, c, r, p, layer: (r, y, x, c, p, layer),
            lambda y, x, c, r, p, layer: (y, x, c, r, p, layer),
            lambda y, x, c, r, p, layer: (c, y, x, r, p, layer),
        )
        order = orders[self._header.progression]
        packets = [(*position, layer) for position in self._positions for layer in layers]
        packets.sort(key=lambda packet: order(*packet))
        return np.array([packet[4:] for packet in packets], PACKET)


def _merge_lifts(lifts: list[tuple[int, Lift]]) -> list[Lift]:
    """Merge equal lifts of equally spaced planes; each lift is given with its level."""
    found: list[Lift] = []
    by_kind: dict[tuple[int, ...], list[Lift]] = {}
    for level, lift in lifts:
        by_kind.setdefault((level, *lift[3:]), []).append(lift)
    for group in by_kind.values():
        planes = [lift.plane for lift in group]
        size = planes[1] - planes[0] if len(planes) > 1 else 0
        if all(plane == planes[0] + k * size for k, plane in enumerate(planes)):
            found.append(group[0]._replace(planes=len(group), plane_size=size))
        else:
            found += group
    return found
