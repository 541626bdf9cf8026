"""Stacks of planes along z and t that tests write: pixels, OME-TIFF, OME-Zarr."""

import numpy as np
import tifffile
import zarr

OME = "http://www.openmicroscopy.org/Schemas/OME/2016-06"
SIZES = {"t": 2, "z": 5}
CHANNELS, HEIGHT, WIDTH = 2, 96, 160


def stack(seed=0):
    """Return pixels of which each plane differs: shape (t, z, c, y, x)."""
    shape = (SIZES["t"], SIZES["z"], CHANNELS, HEIGHT, WIDTH)
    return np.random.default_rng(seed).integers(0, 60_000, shape, np.uint16)


def write_ome(path, pixels, order="TZCYX", side=32):
    """Save a pyramid of two levels; `order` is that of the pages."""
    axes = [order.index(axis) for axis in "TZCYX"]
    moved = np.transpose(pixels, np.argsort(axes))
    metadata = {
        "axes": order, "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5, "PhysicalSizeZ": 1500,
        "PhysicalSizeZUnit": "nm", "TimeIncrement": 250, "TimeIncrementUnit": "ms",
    }  # fmt: skip
    options = {"tile": (side, side), "photometric": "minisblack", "compression": "zlib"}
    with tifffile.TiffWriter(path, ome=True) as file:
        file.write(moved, subifds=1, metadata=metadata, **options)
        file.write(moved[..., ::2, ::2], subfiletype=1, **options)


def save(folder, kind, pixels):
    if kind == "zarr":
        path = folder / "a.zarr"
        levels = [np.moveaxis(each, 2, 1) for each in (pixels, pixels[..., ::2, ::2])]
        write_stack(path, levels)
        return path
    path = folder / "a.ome.tif"
    write_ome(path, pixels, kind)
    return path


def write_stack(path, levels, side=32):
    group = zarr.create_group(path, zarr_format=2)
    for number, level in enumerate(levels):
        chunks = (1, 1, 1, side, side)
        group.create_array(str(number), shape=level.shape, dtype=level.dtype, chunks=chunks)[
            ...
        ] = level
    units = {"t": "millisecond", "z": "nanometer", "y": "micrometer", "x": "micrometer"}
    kinds = {"t": "time", "c": "channel"}
    axes = [
        {"name": name, "type": kinds.get(name, "space")}
        | ({"unit": units[name]} if name in units else {})
        for name in "tczyx"
    ]
    datasets = [
        {
            "path": str(number),
            "coordinateTransformations": [
                {"type": "scale", "scale": [250, 1, 1500, 0.5 * 2**number, 0.5 * 2**number]}
            ],
        }
        for number in range(len(levels))
    ]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]


def of_plane(pixels, z, t):
    return np.moveaxis(pixels[t, z], 0, -1)


def write_ome_files(folder, pixels, companion=None):
    """Save each channel and time of (t, z, c, y, x) as an OME-TIFF, with a pyramid of two levels.

    The XML of each says what lies in all, or that of the file `companion`, which they name; returns
    their paths.
    """
    times, depths, channels, height, width = pixels.shape
    files = [(t, c) for t in range(times) for c in range(channels)]
    names = {(t, c): f"t{t}c{c}.ome.tif" for t, c in files}
    uuids = {at: f"urn:uuid:00000000-0000-0000-0000-{n:012}" for n, at in enumerate(files)}
    data = "".join(
        f'<TiffData FirstZ="{z}" FirstC="{c}" FirstT="{t}" IFD="{z}" PlaneCount="1">'
        f'<UUID FileName="{names[t, c]}">{uuids[t, c]}</UUID></TiffData>'
        for t, c in files
        for z in range(depths)
    )
    named = "".join(f'<Channel ID="Channel:0:{c}" Name="stain {c}"/>' for c in range(channels))
    whole = (
        f'<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" '
        f'SizeX="{width}" SizeY="{height}" SizeZ="{depths}" SizeC="{channels}" SizeT="{times}" '
        f'PhysicalSizeX="0.5" PhysicalSizeY="0.5">{named}{data}</Pixels></Image>'
    )
    of_companion = "urn:uuid:00000000-0000-0000-0000-999999999999"
    own = whole
    if companion is not None:
        xml = f'<?xml version="1.0" encoding="UTF-8"?>\n<OME xmlns="{OME}" UUID="{of_companion}">'
        (folder / companion).write_text(f"{xml}{whole}</OME>", "utf-8")
        own = f'<BinaryOnly MetadataFile="{companion}" UUID="{of_companion}"/>'
    for t, c in files:
        xml = f'<OME xmlns="{OME}" UUID="{uuids[t, c]}">{own}</OME>'
        options = {"metadata": None, "photometric": "minisblack", "contiguous": False}
        with tifffile.TiffWriter(folder / names[t, c]) as file:
            for z in range(depths):
                page = pixels[t, z, c]
                file.write(page, subifds=1, description=xml if z == 0 else None, **options)
                file.write(page[::2, ::2], subfiletype=1, **options)
    return [folder / names[at] for at in files]
