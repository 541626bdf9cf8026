"""Where the samples of a form lie: resolutions, bands, precincts, code blocks, packets."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.gpu.jpeg2000.tables import BAND, BLOCK, COMPONENT, PACKET, PRECINCT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.jpeg2000.header import Header

# Of tables for one form.
MOST_BLOCKS, MOST_PACKETS = 1 << 16, 1 << 18


class Lift(NamedTuple):
    """Lines of a level of planes that are alike, which are made of their two halves.

    Attributes
    ----------
    plane, planes, plane_size : int
        First coefficient of the first plane in a tile's; how many there are; how far apart.
    pitch : int
        Coefficients from row to row.
    lines, length : int
        How many lines, and their length.
    low : int
        How many of a line's samples are of the low half, which comes first.
    first : int
        Where in the line they begin: 0 or 1.
    down : bool
        Whether lines are columns.
    reversible : bool
        5/3 instead of 9/7.
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
    """Tables of a form, for kernels.

    Attributes
    ----------
    edges : tuple of int
        (height, width, left, upper) of the picture that is decoded.
    blocks, bands, precincts, packets, components : ndarray
        See `gpu.jpeg2000.tables`.
    used : ndarray of int32
        Code blocks that the picture needs.
    lifts : list of Lift
        The inverse wavelet, in order.
    nodes : int
        Of one of a tile's two sets of tag trees.
    coefficients : int
        Of a tile.
    groups, planes : int
        Most of any code block.
    """

    edges: tuple[int, int, int, int]
    blocks: NDArray[np.void]
    bands: NDArray[np.void]
    precincts: NDArray[np.void]
    packets: NDArray[np.void]
    components: NDArray[np.void]
    used: NDArray[np.int32]
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
        return _Rect(*(_shift_up(edge, bits) for edge in self))

    def band(self, level: int, right: int, lower: int) -> _Rect:
        """Return a band: `level` of the wavelet, and whether it is of high frequency each way."""
        half = 1 << level - 1 if level else 0
        x, y = right * half, lower * half
        edges = (self.left - x, self.upper - y, self.right - x, self.lower - y)
        return _Rect(*(_shift_up(edge, level) for edge in edges))


def plan(header: Header, reduce: int = 0) -> Geometry | str:
    """Return the tables of a form, or why it can't be decoded here.

    Parameters
    ----------
    header : Header
        The main header.
    reduce : int
        How many of the finest levels of the wavelet to leave out.
    """
    return _Planner(header, reduce).plan()


class _Planner:
    def __init__(self, header: Header, reduce: int) -> None:
        self._header, self._reduce = header, reduce
        self._blocks: list[tuple[float, ...]] = []
        self._bands: list[tuple[int, ...]] = []
        self._precincts: list[tuple[int, int]] = []
        # Of each precinct: y, x, component, resolution, and its number.
        self._places: list[tuple[int, int, int, int, int]] = []
        self._nodes = self._coefficients = 0

    def plan(self) -> Geometry | str:
        header, reduce = self._header, self._reduce
        if any(coding.levels < reduce for coding in header.coding):
            return f"it has fewer than {reduce} levels"
        lifts: list[tuple[int, Lift]] = []
        components = np.zeros(len(header.components), COMPONENT)
        for number, component in enumerate(header.components):
            whole = _Rect(
                _up(header.left, component.across),
                _up(header.upper, component.down),
                _up(header.right, component.across),
                _up(header.lower, component.down),
            )
            kept = whole.scaled(reduce)
            if not kept.width or not kept.height:
                return "a component has no samples"
            plane, pitch = self._coefficients, kept.width
            self._coefficients += kept.width * kept.height
            half = 1 << component.bits - 1
            lowest = -half if component.signed else 0
            components[number] = (
                *(plane, pitch, kept.width, kept.height, kept.left, kept.upper),
                *(component.across, component.down, 0 if component.signed else half),
                *(lowest, lowest + 2 * half - 1, header.coding[number].reversible, 0),
            )
            if not self._add_component(number, whole, plane, pitch):
                return "it has too many code blocks or precincts"
            lifts += self._lifts(number, whole, plane, pitch)
        if len(self._precincts) * header.layers > MOST_PACKETS:
            return "it has too many packets"
        blocks = np.array(self._blocks, BLOCK)
        groups = ((blocks["width"] + 7) // 8) * ((blocks["height"] + 3) // 4)
        edges = _Rect(*header[:4]).scaled(reduce)
        return Geometry(
            edges=(edges.height, edges.width, edges.left, edges.upper),
            blocks=blocks,
            bands=np.array(self._bands, BAND),
            precincts=np.array(self._precincts, PRECINCT),
            packets=self._packets(),
            components=components,
            used=np.flatnonzero(blocks["used"]).astype(np.int32),
            lifts=_together(lifts),
            nodes=self._nodes,
            coefficients=self._coefficients,
            groups=int(groups.max()),
            planes=int(blocks["planes"].max()),
        )

    def _add_component(self, number: int, whole: _Rect, plane: int, pitch: int) -> bool:
        coding = self._header.coding[number]
        for resolution in range(coding.levels + 1):
            area = whole.scaled(coding.levels - resolution)
            if not area.width or not area.height:
                continue
            wide, high = coding.precincts[resolution]
            columns = range(area.left >> wide, _shift_up(area.right, wide))
            rows = range(area.upper >> high, _shift_up(area.lower, high))
            if len(columns) * len(rows) > MOST_PACKETS:
                return False
            for row in rows:
                for column in columns:
                    self._add_precinct(number, resolution, whole, (column, row), plane, pitch)
                if max(len(self._blocks), self._nodes) > MOST_BLOCKS:
                    return False
        return True

    def _add_precinct(
        self,
        number: int,
        resolution: int,
        whole: _Rect,
        place: tuple[int, int],
        plane: int,
        pitch: int,
    ) -> None:
        header, coding = self._header, self._header.coding[number]
        component, finer = header.components[number], coding.levels - resolution
        wide, high = coding.precincts[resolution]
        x = max(header.left, (place[0] << wide + finer) * component.across)
        y = max(header.upper, (place[1] << high + finer) * component.down)
        self._places.append((y, x, number, resolution, len(self._precincts)))
        lower = resolution > 0
        begin = len(self._bands)
        kinds = [(1, 0), (0, 1), (1, 1)] if lower else [(0, 0)]
        level = finer + 1 if lower else finer
        wide, high = wide - lower, high - lower
        for right, down in kinds:
            band = whole.band(level, right, down)
            part = _Rect(
                max(band.left, place[0] << wide),
                max(band.upper, place[1] << high),
                min(band.right, place[0] + 1 << wide),
                min(band.lower, place[1] + 1 << high),
            )
            low = whole.scaled(level)
            # Within the plane, a band lies beside the low one of its level.
            corner = plane + right * low.width + down * low.height * pitch
            self._add_band(number, resolution, band, part, corner, pitch, (right, down, level))
        self._precincts.append((begin, len(self._bands) - begin))

    def _add_band(
        self,
        number: int,
        resolution: int,
        band: _Rect,
        part: _Rect,
        corner: int,
        pitch: int,
        kind: tuple[int, int, int],
    ) -> None:
        if not part.width or not part.height:
            return
        header, coding = self._header, self._header.coding[number]
        precinct, lower = coding.precincts[resolution], resolution > 0
        wide = min(coding.block[0], precinct[0] - lower)
        high = min(coding.block[1], precinct[1] - lower)
        columns = range(part.left >> wide, _shift_up(part.right, wide))
        rows = range(part.upper >> high, _shift_up(part.lower, high))
        across, down = len(columns), len(rows)
        nodes = across * down
        while across > 1 or down > 1:
            across, down = (across + 1) // 2, (down + 1) // 2
            nodes += across * down
        self._bands.append((len(self._blocks), len(columns), len(rows), self._nodes, nodes))
        self._nodes += nodes
        planes, scale = self._quantum(number, resolution, kind)
        used = resolution <= coding.levels - self._reduce
        orientation = 2 if kind[0] and kind[1] else int(kind[0] > 0)
        for row in rows:
            top, bottom = max(part.upper, row << high), min(part.lower, row + 1 << high)
            for column in columns:
                left, right = max(part.left, column << wide), min(part.right, column + 1 << wide)
                target = corner + (top - band.upper) * pitch + left - band.left
                self._blocks.append(
                    (
                        *(target, pitch, right - left, bottom - top, planes, orientation),
                        *(coding.style, header.shifts[number], coding.reversible, scale, used),
                    )
                )

    def _quantum(
        self, number: int, resolution: int, kind: tuple[int, int, int]
    ) -> tuple[int, float]:
        """Return how many planes a band's coefficients have at most, and half their step."""
        header, quanta = self._header, self._header.quanta[number]
        index = 0 if not resolution else 3 * resolution - 3 + kind[0] + 2 * kind[1]
        if quanta.style == 1:
            exponent, mantissa = quanta.steps[0]
            exponent -= max(0, resolution - 1)
        else:
            exponent, mantissa = quanta.steps[index]
        planes = max(0, quanta.guard + exponent - 1) + header.shifts[number]
        bits = header.components[number].bits
        # What a band's filter gains is in the wavelet's factors.
        step = (1 + mantissa / 2048) * 2.0 ** (bits - exponent)
        return planes, step / 2

    def _lifts(self, number: int, whole: _Rect, plane: int, pitch: int) -> list[tuple[int, Lift]]:
        coding = self._header.coding[number]
        found = []
        for finer in range(coding.levels - 1, self._reduce - 1, -1):
            area, low = whole.scaled(finer), whole.scaled(finer + 1)
            if not area.width or not area.height:
                continue
            for down in (False, True):
                sizes = area.height, area.width, low.width, area.left & 1
                if down:
                    sizes = area.width, area.height, low.height, area.upper & 1
                lift = Lift(plane, 1, 0, pitch, *sizes, down, coding.reversible)
                found.append((finer, lift))
        return found

    def _packets(self) -> NDArray[np.void]:
        """Return which precinct and layer each packet is of, in their order."""
        layers = range(self._header.layers)
        orders = (
            lambda y, x, c, r, p, layer: (layer, r, c, p),
            lambda y, x, c, r, p, layer: (r, layer, c, p),
            lambda y, x, c, r, p, layer: (r, y, x, c, p, layer),
            lambda y, x, c, r, p, layer: (y, x, c, r, p, layer),
            lambda y, x, c, r, p, layer: (c, y, x, r, p, layer),
        )
        order = orders[self._header.progression]
        packets = [(*place, layer) for place in self._places for layer in layers]
        packets.sort(key=lambda packet: order(*packet))
        return np.array([packet[4:] for packet in packets], PACKET)


def _together(lifts: list[tuple[int, Lift]]) -> list[Lift]:
    """Let planes that are alike be lifted at once; each lift is given with its level."""
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
