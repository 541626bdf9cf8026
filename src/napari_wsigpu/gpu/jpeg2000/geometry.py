"""Geometry of JPEG 2000 code streams (T.800, annex B), as tables for the kernels.

Resolutions, subbands, precincts, code blocks and packets follow from a main header alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.gpu.jpeg2000.jpeg2000_tables import (
    BAND,
    BLOCK,
    COMPONENT,
    LIFT,
    PACKET,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.jpeg2000.jpeg2000_header import Header

# Limits of the tables of one form.
MOST_BLOCKS, MOST_PACKETS = 1 << 16, 1 << 18
FINER = 8  # index in what `_lifts` returns, without offsets


class Geometry(NamedTuple):
    """Tables that describe the code streams of one form.

    Attributes
    ----------
    edges : tuple of int
        (height, width, left, upper) of the image.
    blocks, bands, packets, components, lifts : ndarray
        Rows of the types in `gpu.jpeg2000.jpeg2000_tables`; lifts are in the order of execution.
    nodes : int
        Nodes in each of a tile's two sets of tag trees (inclusion and zero bit planes).
    coefficients, halves : int
        Coefficients of a tile, and elements of its memory for every second resolution.
    groups, planes : int
        Largest number of groups of 8 by 4 samples, and of bit planes, in a code block.
    """

    edges: tuple[int, int, int, int]
    blocks: NDArray[np.void]
    bands: NDArray[np.void]
    packets: NDArray[np.void]
    components: NDArray[np.void]
    lifts: NDArray[np.void]
    nodes: int
    coefficients: int
    halves: int
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
    """A component in a tile: its number and rectangle, offset of its coefficients, row length.

    `half` is the offset of its memory for every second resolution.
    """

    number: int
    whole: _Rect
    offset: int
    pitch: int
    half: int


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
        self._nodes = self._coefficients = self._halves = 0

    def plan(self) -> Geometry | str:
        header = self._header
        lifts: list[tuple[int, ...]] = []
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
            plane = _Plane(number, whole, self._coefficients, whole.width, self._halves)
            self._coefficients += whole.width * whole.height
            self._halves += _up(whole.width, 2) * _up(whole.height, 2)
            half = 1 << component.bits - 1
            lowest = -half if component.signed else 0
            components[number] = (
                *(plane.offset, plane.pitch, whole.width, whole.height, whole.left, whole.upper),
                *(component.across, component.down, 0 if component.signed else half),
                *(
                    lowest,
                    lowest + 2 * half - 1,
                    header.coding[number].reversible,
                    header.coding[number].levels > 0,
                ),
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
            packets=self._packets(),
            components=components,
            lifts=_merged(lifts),
            nodes=self._nodes,
            coefficients=self._coefficients,
            halves=self._halves,
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
        number, whole, offset, pitch, _ = plane
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
        number, pitch = plane.number, plane.pitch
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
        planes, scale = self._quantum(number, resolution, kind)
        sizes = len(columns), len(rows), self._nodes, nodes
        self._bands.append((len(self._blocks), *sizes, planes, coding.style))
        self._nodes += nodes
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

    def _lifts(self, plane: _Plane) -> list[tuple[int, ...]]:
        number, whole, offset, pitch, half = plane
        coding = self._header.coding[number]
        found: list[tuple[int, ...]] = []
        for finer in range(coding.levels - 1, -1, -1):
            area, low = whole.scaled(finer), whole.scaled(finer + 1)
            if area.width and area.height:
                sizes = area.width, area.height, low.width, low.height
                edges = area.left & 1, area.upper & 1
                coarsest = finer == coding.levels - 1
                lift = pitch, _up(pitch, 2), *sizes, *edges, finer, coarsest, coding.reversible
                found.append((offset, half, *lift))
        return found

    def _packets(self) -> NDArray[np.void]:
        """Return the bands and layer of each packet, in the order of B.12.1."""
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
        return np.array([(*self._precincts[p], layer) for *_, p, layer in packets], PACKET)


def _merged(lifts: list[tuple[int, ...]]) -> NDArray[np.void]:
    """Return rows of type `LIFT`, coarsest first; those of equally spaced components become one."""
    rows = []
    by_kind: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for offset, half, *rest in lifts:
        by_kind.setdefault(tuple(rest), []).append((offset, half))
    # Components may have different numbers of resolutions.
    for kind, places in sorted(by_kind.items(), key=lambda item: -item[0][FINER]):
        steps = {(a[0] - b[0], a[1] - b[1]) for a, b in pairwise(reversed(places))} or {(0, 0)}
        if len(steps) == 1:
            rows.append((*places[0], *steps.pop(), len(places), *kind))
        else:
            rows += [(*place, 0, 0, 1, *kind) for place in places]
    return np.array(rows, LIFT)
