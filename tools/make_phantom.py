"""Write a procedural H&E slide in Aperio SVS format, free of any patient data.

Usage: ``python tools/make_phantom.py OUT.svs [--width 6144 --height 4608 --seed 7]``

Haematoxylin, eosin and blood are drawn as optical-density maps and combined by the
Beer-Lambert law.  Tissue is laid out at half resolution, so that a pixel is 1 um, and
nuclei are drawn at full resolution.  The macro picture is not to scale.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple, TypeAlias

import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial import cKDTree

Floats: TypeAlias = NDArray[np.float32]
Mask: TypeAlias = NDArray[np.bool_]
Image: TypeAlias = NDArray[np.uint8]
Random: TypeAlias = np.random.Generator
Shape: TypeAlias = tuple[int, ...]

QUALITY = 78
LEVELS = 4
LIBRARY = "Aperio Image Library v12.0.15\r\n"
GLASS = 247  # a grey that JPEG stores exactly at this quality, so that glass stays even
STAINS = np.array(  # haematoxylin and eosin of Ruifrok & Johnston (as in ImageJ), then blood
    [[0.650, 0.704, 0.286], [0.093, 0.954, 0.283], [0.110, 0.790, 0.600]], np.float32
)
CHARACTERS = "H&EPANTOMnapri-wsguote "
GLYPHS = np.frombuffer(  # seven rows of five bits for each of them
    bytes.fromhex(
        """1111111f111111 0c12140815120d 1f10101e10101f 1e11111e101010 0e11111f111111 11111915131111
        1f040404040404 0e11111111110e 111b1515111111 00001619111111 00000e010f110f 00001e111e1010
        00001619101010 04000c0404040e 0000001f000000 0000111115150a 00000e100e011e 00000f110f010e
        0000111111130d 00000e1111110e 08081c08080906 00000e111f100e 00000000000000"""
    ),
    np.uint8,
).reshape(-1, 7)


def noise(rng: Random, shape: Shape, scale: float) -> Floats:
    """Return unit-variance noise, as smooth as a Gaussian kernel of `scale` pixels makes it."""
    step = max(1, int(scale / 4))
    small = rng.standard_normal([n // step + 3 for n in shape], np.float32)
    small = ndimage.gaussian_filter(small, scale / step, mode="wrap")
    return enlarge(small / small.std(), step, shape)


def enlarge(data: Floats, factor: int, shape: Shape) -> Floats:
    """Return `data` enlarged linearly by `factor` and cropped to `shape`."""
    for axis, size in enumerate(shape):
        at = (np.arange(size, dtype=np.float32) + 0.5) / factor - 0.5
        at = np.clip(at, 0, data.shape[axis] - 1.001)
        low = at.astype(np.intp)
        part = (at - low).astype(np.float32).reshape((-1, 1) if axis == 0 else (1, -1))
        data = data.take(low, axis) * (1 - part) + data.take(low + 1, axis) * part
    return data


def shrink(image: Image, factor: int) -> Image:
    """Return the rounded means of blocks of `factor` x `factor` pixels."""
    height, width = (n // factor for n in image.shape[:2])
    blocks = image[: height * factor, : width * factor].reshape(height, factor, width, factor, 3)
    total = blocks.sum(axis=(1, 3), dtype=np.uint32)
    mean: Image = ((total + factor**2 // 2) // factor**2).astype(np.uint8)
    return mean


def ramp(x: Floats, low: float, high: float) -> Floats:
    """Return a smooth step from 0 where `x` is `low` to 1 where it is `high`."""
    t = np.clip((x - np.float32(low)) / np.float32(high - low), 0, 1)
    smooth: Floats = t * t * (3 - 2 * t)
    return smooth


def distance(mask: Mask) -> Floats:
    """Return the signed distance to the outline of `mask`, positive inside."""
    inside = ndimage.distance_transform_edt(mask) - ndimage.distance_transform_edt(~mask)
    smooth: Floats = ndimage.gaussian_filter(inside.astype(np.float32), 1.5)
    return smooth


def scatter(rng: Random, density: Floats, spacing: float) -> Floats:
    """Return random points (n, 2), at least `spacing` apart, where `density` > 0."""
    chosen = rng.random(density.shape, np.float32) < density * (5 / spacing**2)
    points = np.argwhere(chosen) + rng.random((int(chosen.sum()), 2))
    rng.shuffle(points)
    alive = np.ones(len(points), bool)
    pairs = cKDTree(points).query_pairs(spacing, output_type="ndarray")
    while len(pairs):  # the first of each pair wins, unless it has itself lost
        blocked = np.zeros(len(points), bool)
        blocked[pairs[:, 1]] = True
        alive[pairs[~blocked[pairs[:, 0]], 1]] = False
        pairs = pairs[alive[pairs].all(axis=1)]
    return points[alive].astype(np.float32)


def nearest(rng: Random, seeds: Floats, mask: Mask, scale: float) -> tuple[Floats, ...]:
    """Find the seeds nearest to each pixel of `mask`, in a plane warped by noise.

    Returns
    -------
    tuple
        Warped places (n, 2), distances (n, 3) and indices (n, 3) of the nearest seeds.
    """
    warp = [(4 * noise(rng, mask.shape, n) * n / 14)[mask] for n in (scale, scale)]
    place = np.argwhere(mask) + np.stack(warp, -1)
    return place, *cKDTree(seeds).query(place, k=3)


def ellipses(rng: Random, density: Floats, spacing: float) -> Floats:
    """Return a field that is positive inside ragged ellipses, none touching another."""
    seeds = scatter(rng, density, spacing)
    mask = ndimage.binary_dilation(density > 0, iterations=int(spacing))
    place, near, which = nearest(rng, seeds, mask, 20)
    axes = np.exp(rng.normal(3.35, 0.3, (len(seeds), 2)))[which[:, 0]]
    turn = rng.uniform(0, np.pi, len(seeds))[which[:, 0]]
    y, x = (place - seeds[which[:, 0]]).T
    p, q = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    inside = (1 - np.hypot(p / axes[:, 0], q / axes[:, 1])) * axes.min(axis=1)
    inside += 1.5 * noise(rng, density.shape, 7)[mask]
    out = np.full(density.shape, -1e3, np.float32)
    out[mask] = np.minimum(inside, (near[:, 1] - near[:, 0]) / 2 - 3)
    return out


class Plan(NamedTuple):
    """Anatomy of the slide: maps at half resolution; distances are positive inside."""

    edge: Floats  # > 0 inside the sections
    lobule: Floats  # 0 in dense collagen, 1 among glands
    infiltrate: Floats  # 0 to 1: lymphocytes
    gland: Floats  # distance to the basement membrane
    vessel: Floats  # distance to the wall of a small vessel
    vacuole: Floats  # distance to the membrane of a fat cell
    angle: Floats  # direction of the collagen


def plan(rng: Random, shape: Shape) -> Plan:
    """Lay out two ragged sections with their glands, vessels, fat and collagen."""
    y, x = np.meshgrid(*(np.linspace(-1, 1, n, dtype=np.float32) for n in shape), indexing="ij")
    x = x + 0.05 * noise(rng, shape, 180)
    y = y + 0.10 * noise(rng, shape, 180)
    large = 1 - np.hypot((x + 0.20) / 0.64, (y + 0.03 - 0.35 * x * x) / 0.72)
    small = 0.6 * (1 - np.hypot((x - 0.66) / 0.16, (y - 0.02 + 0.4 * (x - 0.66)) / 0.56))
    edge = np.maximum(large, small)
    for scale, weight in ((60, 0.035), (18, 0.016), (5, 0.007), (2, 0.003)):
        edge += weight * noise(rng, shape, scale)
    inner = ndimage.distance_transform_edt(edge > 0).astype(np.float32)

    zone = noise(rng, shape, 170)
    lobule = ramp(zone, -0.1, 0.7) * ramp(inner, 25, 60)
    fat = (edge > 0) & (zone + 0.12 * noise(rng, shape, 14) < -1.15)
    infiltrate = noise(rng, shape, 75) - 0.3 * np.abs(zone) + 0.25 * noise(rng, shape, 16)
    infiltrate = ramp(infiltrate, 1.0, 1.9) * ramp(inner, 4, 20) * ~fat

    gland = distance(ellipses(rng, ramp(lobule, 0.6, 0.9), 58) > 0)
    vessel = distance(noise(rng, shape, 12) - 2.1 - 4 * (inner < 20) - 4 * lobule - 4 * fat > 0)
    parts, count = ndimage.label(vessel > 0)
    wide = ndimage.maximum(vessel, parts, np.arange(count + 1)) > 5
    vessel = np.minimum(distance(wide[parts] & (parts > 0)), -5 - gland)
    vacuole = np.full(shape, -1e3, np.float32)
    _, near, _ = nearest(rng, scatter(rng, fat.astype(np.float32), 42), fat, 12)
    vacuole[fat] = near[:, 1] - near[:, 0] - 70 / (near[:, 2] - near[:, 0] + 8)
    vacuole = np.minimum(vacuole, 1.5 * distance(fat))

    # Collagen runs along noise, bent around glands, vessels and the outline.
    c, s = 1.2 * noise(rng, shape, 130) + 0.6, 1.2 * noise(rng, shape, 130)
    for depth, span in ((gland, 30), (vessel, 20), (-inner, 15)):
        gy, gx = np.gradient(ndimage.gaussian_filter(depth, 3))
        pull = 4 * np.exp(-np.abs(depth) / span) / (gx * gx + gy * gy + 0.05)
        c, s = c + pull * (gy * gy - gx * gx), s - pull * 2 * gx * gy
    angle = 0.5 * np.arctan2(s, c) + 0.28 * noise(rng, shape, 11) + 0.15 * noise(rng, shape, 4)
    return Plan(edge, lobule, infiltrate, gland, vessel, vacuole, angle.astype(np.float32))


def fibres(rng: Random, angle: Floats, mask: Mask) -> list[Floats]:
    """Smear noise along `angle`; return fine fibrils and broad bundles."""
    grains = [noise(rng, angle.shape, scale) for scale in (0.6, 3.0)]
    sums = [np.zeros(int(mask.sum()), np.float32) for _ in grains]
    field = np.stack([np.sin(angle), np.cos(angle)], -1)
    limit = np.array(angle.shape) - 1
    for sign in (1, -1):
        here = np.argwhere(mask).astype(np.float32)
        course = field[mask] * sign
        for step in range(26):
            y, x = np.clip(here, 0, limit).astype(np.intp).T
            local = field[y, x]
            course = np.where((local * course).sum(axis=1, keepdims=True) < 0, -local, local)
            here += course
            if step < 12:
                sums[0] += grains[0][y, x]
            sums[1] += grains[1][y, x]
    for grain, total in zip(grains, sums, strict=True):
        grain[:] = 0
        grain[mask] = total / total.std()
    return grains


def draw(
    rng: Random,
    canvas: Floats,
    points: Floats,
    turn: Floats,
    size: tuple[float, float],
    depth: float,
    power: float,
    grain: Floats,
) -> None:
    """Draw nuclei, no two alike, onto a map of optical density.

    Parameters
    ----------
    rng
        Source of randomness.
    canvas
        Optical density at full resolution; changed in place.
    points, turn
        Centres in pixels (n, 2) and directions of the long axes (n,).
    size, depth
        Mean half axes in pixels and mean optical density.
    power
        Exponent of the super-ellipse: below 2 the ends are pointed.
    grain
        Texture of the chromatin, of the shape of `canvas`.
    """
    for first in range(0, len(points), 1000):
        spot = points[first : first + 1000, :, None, None]
        angle = turn[first : first + 1000, None, None]
        a, b, dark = (
            (mean * np.exp(rng.normal(0, 0.18, angle.shape))).astype(np.float32)
            for mean in (*size, depth)
        )
        reach = int(1.45 * max(a.max(), b.max())) + 2
        centre = np.rint(spot).astype(int).swapaxes(0, 1)
        y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1][:, None] + centre
        dy, dx = (y - spot[:, 0]).astype(np.float32), (x - spot[:, 1]).astype(np.float32)
        p = (dx * np.cos(angle) + dy * np.sin(angle)) / a
        q = (dy * np.cos(angle) - dx * np.sin(angle)) / b
        p += q * q * rng.normal(0, 0.12, a.shape).astype(np.float32)
        q += p * p * rng.normal(0, 0.22, a.shape).astype(np.float32)  # bent like a bean
        rho = (np.abs(p) ** power + np.abs(q) ** power) ** np.float32(1 / power)
        for k in (3, 4):
            wave = np.cos(k * np.arctan2(q, p) + rng.uniform(0, 6.28, a.shape).astype(np.float32))
            rho *= 1 + rng.normal(0, 0.035, a.shape).astype(np.float32) * wave
        y, x = np.clip(y, 0, canvas.shape[0] - 1), np.clip(x, 0, canvas.shape[1] - 1)
        body = np.clip((1 - rho) * np.sqrt(a * b) / 1.6 + 0.5, 0, 1)
        tone = 0.85 + 0.14 * np.exp(-(((rho - 0.86) / 0.16) ** 2)) + 0.17 * grain[y, x]
        np.maximum.at(canvas, (y, x), dark * body * tone)


def paint(rng: Random, height: int, width: int) -> Image:
    """Return the slide at full resolution."""
    full, shape = (height, width), (height // 2, width // 2)
    edge, lobule, infiltrate, gland, vessel, vacuole, angle = plan(rng, shape)
    fine, broad = fibres(rng, angle, edge > 0)
    slow = noise(rng, shape, 55)
    tall = 14 + 2 * noise(rng, shape, 40)  # height of the epithelium
    apex = tall - ndimage.gaussian_filter(gland, 5) + 0.7 * noise(rng, shape, 5)
    epithelium = ramp(gland, -0.7, 0.7) * ramp(apex, -1.0, 1.0)
    lumen = ramp(-apex, -0.5, 1.0)
    secretion = ramp(noise(rng, shape, 45) + 0.3 * noise(rng, shape, 5), 0.6, 1.5) * lumen
    loose = 0.5 * slow + 0.6 * noise(rng, shape, 9) + 2 * infiltrate
    cleft = 0.85 * ramp(-broad - 0.35 * loose, 1.0, 1.7) * (1 - epithelium)
    matter = (1 - cleft) * (1 - lumen) * ramp(edge, 0.0, 0.012)
    matter *= (1 - ramp(vessel, 0.5, 2.0)) * (1 - ramp(vacuole, 1.0, 3.5))

    speck = noise(rng, shape, 1.2)
    eosin = 0.2 - 0.06 * lobule - 0.025 * slow + 0.04 * broad + 0.05 * fine + 0.02 * speck
    eosin += 0.1 * (1 - ramp(np.abs(gland + 2), 0.5, 2.5))  # basement membrane
    eosin += (0.2 + 0.03 * speck + 0.03 * noise(rng, shape, 6) - eosin) * epithelium
    eosin = eosin * matter + secretion * (0.09 + 0.02 * noise(rng, shape, 2))
    blue = 0.035 + 0.012 * slow + 0.01 * broad + 0.07 * epithelium + 0.08 * infiltrate
    blue *= matter

    nuclei, blood = np.zeros(full, np.float32), np.zeros(full, np.float32)
    grain = noise(rng, full, 1.3)
    stroma = (1 - ramp(gland, -3, -1)) * ramp(-vacuole, 9, 10)
    crowd = stroma * (0.05 + 0.2 * ramp(slow, -0.5, 1.5)) * (1 + lobule)
    around = 0.25 * ramp(-np.abs(gland + 12), -12, 0) * ramp(noise(rng, shape, 60), 0, 1.5)
    basal = 4 * ramp(gland, 2.5, 3.5) * ramp(apex, 3.5, 5.5)
    slopes = (np.gradient(ndimage.gaussian_filter(d, 2)) for d in (gland, vessel, vacuole))
    rings = [np.arctan2(gx, -gy) for gy, gx in slopes]  # along the outlines
    for density, spacing, along, spread, size, depth, power in (
        # Fibroblasts, thin and plump; myoepithelium, endothelium and fat cells.
        (crowd, 8, angle, 0.25, (9.5, 2.4), 0.5, 1.6),
        (crowd * 0.3, 8, angle, 0.25, (7.5, 3.8), 0.4, 2),
        (ramp(-np.abs(gland + 2), -1.5, -1), 11, rings[0], 0.2, (8.5, 2.6), 0.6, 1.7),
        (ramp(-np.abs(vessel + 3.5), -1.5, -1), 11, rings[1], 0.2, (9, 2.6), 0.6, 1.7),
        (ramp(-np.abs(vacuole), -1, 0), 22, rings[2], 0.1, (8, 2.4), 0.6, 1.7),
        # Lymphocytes; epithelium.
        (stroma * (6 * infiltrate + around + 0.007), 5.6, angle, 3, (5.4, 5.0), 0.75, 2),
        (basal, 6.6, rings[0], 0.25, (5.2, 8), 0.52, 2),
    ):
        points = scatter(rng, density * ((edge > 0.01) & (eosin > 0.07)), spacing)
        y, x = points.astype(np.intp).T
        turn = (along[y, x] + rng.normal(0, spread, len(y))).astype(np.float32)
        draw(rng, nuclei, points * 2, turn, size, depth, power, grain)
    red = scatter(rng, 3 * ramp(vessel, 3, 4) * ramp(noise(rng, shape, 30), -1.5, 0), 5.8)
    draw(rng, blood, red * 2, np.zeros(len(red), np.float32), (6.6, 6.1), 0.3, 2, 0.3 * grain)

    blue, eosin = (enlarge(np.clip(stain, 0, 1), 2, full) for stain in (blue, eosin))
    eosin *= 1 - 0.6 * np.clip(nuclei / 0.4, 0, 1)
    blue = np.maximum(blue, nuclei) + 0.15 * np.minimum(blue, nuclei)
    thickness = enlarge(np.exp(0.07 * noise(rng, shape, 250)), 2, full)
    rgb = np.empty((*full, 3), np.uint8)
    for k, (h, e, b) in enumerate(STAINS.T):
        light = GLASS * np.exp(-np.log(10) * thickness * (blue * h + eosin * e + blood * b))
        light = ndimage.gaussian_filter(light, 0.7) + rng.normal(0, 1, full).astype(np.float32)
        rgb[..., k] = np.clip(np.rint(light), 0, 255)
    return rgb


def paper_label(rng: Random) -> Image:
    """Return a paper label with three lines of text and a square of random dots."""
    label = np.full((400, 368, 3), (246, 243, 232), np.uint8)
    label[:6] = label[-6:] = label[:, :6] = label[:, -6:] = (222, 216, 200)
    for text, top, scale in (
        ("H&E PHANTOM", 40, 5),
        ("napari-wsigpu", 110, 4),
        ("not a patient", 160, 4),
    ):
        rows = GLYPHS[[CHARACTERS.index(c) for c in text]].T
        ink = np.unpackbits(rows[..., None], axis=-1)[..., 2:].reshape(7, -1)
        ink = ink.repeat(scale, 0).repeat(scale, 1).astype(bool)
        left = (label.shape[1] - ink.shape[1] - scale) // 2
        label[top : top + ink.shape[0], left : left + ink.shape[1]][ink] = (32, 32, 40)
    dots = rng.random((18, 18)) < 0.5
    dots[:, 0] = dots[-1] = True
    label[232:376, 112:256][dots.repeat(8, 0).repeat(8, 1)] = (32, 32, 40)
    return label


def macro_photo(rng: Random, tissue: Image, label: Image) -> Image:
    """Return a picture of the whole glass: the label at one end, the tissue in the middle."""
    shape = (432, 1280)
    photo = np.full(shape, 168, np.float32)
    photo[14:-14, 14:-14] = 196  # ground edge of the glass
    photo[18:-18, 18:-18] = 228
    photo[26:-26, 440:1220] = 205  # rim of the cover slip
    photo[28:-28, 442:1218] = 231
    rgb = ndimage.gaussian_filter(photo, 0.8)[..., None] * np.ones(3, np.float32)
    tissue = tissue[:368, :760]
    top, left = (432 - tissue.shape[0]) // 2, 830 - tissue.shape[1] // 2
    rgb[top : top + tissue.shape[0], left : left + tissue.shape[1]] *= tissue / np.float32(GLASS)
    rgb[16:416, 18:386] = label * np.float32(0.93)
    shade = 1 + 0.02 * noise(rng, shape, 200) + 0.006 * noise(rng, shape, 0.6)
    picture: Image = np.clip(rgb * shade[..., None], 0, 255).astype(np.uint8)
    return picture


def split_tables(stream: bytes) -> tuple[bytes, bytes]:
    """Split a JPEG stream into its tables and the abbreviated stream that needs them."""
    tables = rest = b"\xff\xd8"
    at = 2
    while stream[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(stream[at + 2 : at + 4], "big")
        if stream[at + 1] in (0xDB, 0xC4):
            tables += stream[at:end]
        elif stream[at + 1] != 0xE0:
            rest += stream[at:end]
        at = end
    return tables + b"\xff\xd9", rest + stream[at:]


def write_jpeg(
    tif: tifffile.TiffWriter, image: Image, description: str, *, tiled: bool, kind: int = 0
) -> None:
    """Append a page of JPEG tiles or strips that share their tables, as scanners do."""
    height, width = image.shape[:2]
    rows, columns = (256, 256) if tiled else (16, width)
    tables, streams = b"", []
    for y in range(0, height, rows):
        for x in range(0, width, columns):
            part = image[y : y + rows, x : x + columns]
            if tiled:
                missing = ((0, rows - part.shape[0]), (0, columns - part.shape[1]), (0, 0))
                part = np.pad(part, missing, mode="edge")
            stream = imagecodecs.jpeg8_encode(
                part, QUALITY, colorspace="RGB", outcolorspace="YCBCR", subsampling="420"
            )
            tables, short = split_tables(bytes(stream))
            streams.append(short)
    tif.write(
        iter(streams),
        shape=image.shape,
        dtype=image.dtype,
        tile=(rows, columns) if tiled else None,
        rowsperstrip=None if tiled else rows,
        photometric="ycbcr",
        compression="jpeg",
        jpegtables=tables,
        subfiletype=kind,
        description=LIBRARY + description,
        metadata=None,
        software=False,
    )


def write_svs(path: Path, image: Image, rng: Random) -> None:
    """Write `image` and what belongs to it as an Aperio slide."""
    levels = [image]
    while len(levels) < LEVELS:
        levels.append(shrink(levels[-1], 2))
    thumbnail = shrink(levels[2], 3)
    label = paper_label(rng)
    macro = macro_photo(rng, shrink(levels[-1], 2), label)
    sizes = [f"{level.shape[1]}x{level.shape[0]}" for level in levels]
    scanner = (
        "|AppMag = 20|StripeWidth = 2048|ScanScope ID = PHANTOM|Filename = he_phantom"
        "|Title = H&E phantom|Date = 01/01/25|Time = 12:00:00|User = procedural generator"
        "|Left = 25.000000|Top = 12.000000|MPP = 0.4990|ImageID = 1|DisplayColor = 0"
        f"|OriginalWidth = {image.shape[1]}|OriginalHeight = {image.shape[0]}"
    )
    whole = f"{sizes[0]} [0,0 {sizes[0]}] (256x256)"
    jpeg = f"JPEG/RGB Q={QUALITY}"
    with tifffile.TiffWriter(path) as tif:
        write_jpeg(tif, image, f"{whole} {jpeg}{scanner}", tiled=True)
        small = f"{thumbnail.shape[1]}x{thumbnail.shape[0]}"
        write_jpeg(tif, thumbnail, f"{sizes[0]} -> {small} - {scanner}", tiled=False)
        for level, size in zip(levels[1:], sizes[1:], strict=True):
            write_jpeg(tif, level, f"{whole} -> {size} {jpeg}", tiled=True)
        tif.write(
            label,
            photometric="rgb",
            compression="lzw",
            predictor=True,
            rowsperstrip=label.shape[0],
            subfiletype=1,
            description=f"{LIBRARY}label {label.shape[1]}x{label.shape[0]}",
            metadata=None,
            software=False,
        )
        title = f"macro {macro.shape[1]}x{macro.shape[0]}"
        write_jpeg(tif, macro, title, tiled=False, kind=9)


def main() -> None:
    """Read the command line and write the slide."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.svs")
    parser.add_argument("--width", type=int, default=6144)
    parser.add_argument("--height", type=int, default=4608)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    write_svs(args.out, paint(rng, args.height // 16 * 16, args.width // 16 * 16), rng)


if __name__ == "__main__":
    main()
