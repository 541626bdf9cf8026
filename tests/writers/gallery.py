"""A small slide of every format that tests can write, with one text wherever a person can write."""

from __future__ import annotations

import base64
import json
import struct
from functools import partial
from typing import TYPE_CHECKING, Any

import imagecodecs
import numcodecs
import numpy as np
import tifffile

from tests.writers import (
    czis,
    dicomslides,
    leica,
    micromanager,
    mirax,
    ndpi,
    philips,
    slides,
    tiffbytes,
    trestle,
    ventana,
    vsis,
    zarrs,
)
from tests.writers.tiffbytes import ASCII, RATIONAL, SHORT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

PIXELS = slides.picture(150, 210)
CHANNELS = np.moveaxis(slides.picture(100, 130, 2, "uint16"), -1, 0)


def write_all(folder: Path, text: str, formats: Collection[str] | None = None) -> dict[str, Path]:
    """Write a slide of each format to a folder of its own, and return their paths by format.

    Parameters
    ----------
    folder : Path
        An existing folder.
    text : str
        Stands in every field whose text a person chooses, and as the name of fields that nobody
        knows; without spaces, and nothing that XML, JSON or a file's name takes amiss.
    formats : collection of str, optional
        Those of `WRITERS` that are wanted; all by default.
    """
    found = {}
    for name in WRITERS if formats is None else formats:
        (folder / name).mkdir()
        found[name] = WRITERS[name](folder / name, text)
    return found


def _aperio(folder: Path, text: str) -> Path:
    known = ("Barcode", "User", "Title", "Filename", "Image Name", "Comment", "DSR ID", "ImageID")
    fields = ["AppMag = 20", "MPP = 0.4990", "Date = 12/29/09", f"{text} = {text}"]
    fields += [f"{key} = {text}" for key in known]
    path = folder / "slide.svs"
    slides.write_aperio(path, PIXELS, (2,), fields=fields)
    return path


def _jpeg_2000(folder: Path, text: str) -> Path:
    def encode(tile: Any) -> bytes:
        return imagecodecs.jpeg2k_encode(np.ascontiguousarray(tile), level=0, codecformat="j2k")

    path = folder / "slide.svs"
    fields = ("AppMag = 20", f"{text} = 7", f"User = {text}")
    slides.write_aperio(path, PIXELS, (2,), fields=fields, compression=33005, encode=encode)
    return path


def _tiff(folder: Path, text: str) -> Path:
    path = folder / "slide.tif"
    more: dict[int, tuple[int, Any]] = {
        code: (ASCII, f"{text} {code}") for code in (269, 285, 315, 316, 33432)
    }
    more |= {305: (ASCII, "Software 1.2"), 306: (ASCII, "2020:01:02 03:04:05")}
    more[700] = (tiffbytes.BYTE, f"<x:xmpmeta xmlns:x='adobe:ns:meta/'>{text}</x:xmpmeta>".encode())
    pages = [
        tiffbytes.page(
            np.ascontiguousarray(PIXELS[::step, ::step]),
            tiffbytes.deflate,
            compression=8,
            description=f"{text} on a slide",
            subfile_type=int(step > 1),
            more=more,
        )
        for step in (1, 2)
    ]
    return tiffbytes.write(path, pages)


def _compressed(compression: str, dtype: str, folder: Path, _: str) -> Path:
    options: dict[str, Any] = {"photometric": "rgb"} if dtype == "uint8" else {}
    pixels = slides.picture(150, 210, 3 if options else 1, dtype)
    if compression in ("lzw", "zstd"):
        options |= {"predictor": True}
    if compression == "packbits":
        options |= {"planarconfig": "separate"}
        pixels = np.moveaxis(pixels, -1, 0)
    tiled: dict[str, Any] = {"tile": (64, 64)} if compression != "lerc" else {"rowsperstrip": 40}
    path = folder / "slide.tif"
    tifffile.imwrite(path, pixels.squeeze(), compression=compression, **options, **tiled)
    return path


def _imagej(folder: Path, text: str) -> Path:
    path = folder / "slide.tif"
    metadata = {"axes": "CYX", "Info": text, "Labels": [text, text], "unit": "um", text: text}
    tifffile.imwrite(path, CHANNELS, imagej=True, metadata=metadata, resolution=(2, 2))
    return path


def _ome(folder: Path, text: str) -> Path:
    path = folder / "slide.ome.tif"
    xml = f"""<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" Creator="{text}"
      UUID="urn:uuid:{text}"><Experimenter ID="Experimenter:0" FirstName="{text}" Email="{text}"/>
      <Instrument ID="Instrument:0"><Objective ID="Objective:0" NominalMagnification="20"/>
      </Instrument><Plate ID="Plate:0" Name="{text}"><Well ID="Well:0" Row="0" Column="0"
      ExternalIdentifier="{text}" Type="{text}"/></Plate><Image ID="Image:0" Name="{text}">
      <AcquisitionDate>2020-01-02T03:04:05</AcquisitionDate><Description>{text}</Description>
      <ObjectiveSettings ID="Objective:0"/><Pixels ID="Pixels:0" DimensionOrder="XYCZT"
      Type="uint16" SizeX="130" SizeY="100" SizeC="2" SizeZ="1" SizeT="1" PhysicalSizeX="0.5"
      PhysicalSizeY="0.5"><Channel ID="Channel:0:0" Name="DAPI" SamplesPerPixel="1"/>
      <Channel ID="Channel:0:1" Name="{text}" SamplesPerPixel="1"/>
      <TiffData IFD="0" PlaneCount="2"/></Pixels></Image>
      <StructuredAnnotations><MapAnnotation ID="Annotation:0" Namespace="{text}">
      <Value><M K="{text}">{text}</M></Value></MapAnnotation><XMLAnnotation ID="Annotation:1">
      <Value><{text} {text}="{text}"/></Value></XMLAnnotation></StructuredAnnotations>
      <ROI ID="ROI:0" Name="{text}"/></OME>"""
    tifffile.imwrite(path, CHANNELS, description=xml, metadata=None, tile=(64, 64))
    return path


def _stack(folder: Path, text: str) -> Path:
    path = folder / "slide.ome.tif"
    planes = np.stack([CHANNELS, CHANNELS[::-1], CHANNELS // 2])
    metadata = {"axes": "ZCYX", "Name": text, "Description": text}
    tifffile.imwrite(path, planes, metadata=metadata, ome=True, tile=(64, 64), photometric=1)
    return path


def _ome_zarr(folder: Path, text: str, version: str = "0.5", **options: Any) -> Path:
    path = folder / "slide.zarr"
    omero = {
        "name": text,
        "channels": [
            {"label": name, "color": "0000FF", "window": {"start": 0, "end": 9, "min": 0, "max": 9}}
            for name in ("DAPI", text)
        ],
        text: {text: text},
    }
    zarrs.write_image(
        path,
        zarrs.halved(CHANNELS, "cyx", 1),
        version=version,
        more={"omero": omero, text: text, "source": {"file": text}},
        **options,
    )
    label = {
        "source": {"image": "../../"},
        "properties": [{"label-value": 1, "class": text, text: text}],
        "colors": [{"label-value": 1, "rgba": [255, 0, 0, 255]}],
    }
    classes = (slides.picture(100, 130, 1)[..., 0] > 128).astype("uint8")
    zarrs.write_label(
        path, text, zarrs.halved(classes, "yx", 1), version=version, more={"image-label": label}
    )
    return path


def _old_ome_zarr(folder: Path, text: str) -> Path:
    return _ome_zarr(folder, text, version="0.4")


def _sharded_zarr(folder: Path, text: str) -> Path:
    return _ome_zarr(folder, text, chunks=(1, 32, 32), shards=(1, 128, 128))


def _blosc_zarr(folder: Path, text: str) -> Path:
    compressor = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=2)
    return _ome_zarr(folder, text, version="0.4", compressors=compressor, filters=[])


def _bare_zarr(folder: Path, text: str) -> Path:
    path = folder / "slide.zarr"
    zarrs.write_array(path, PIXELS, attributes={text: text, "name": text})
    return path


def _dicom(folder: Path, text: str) -> Path:
    specimen = dicomslides.item(SpecimenIdentifier=text, SpecimenShortDescription=text)
    keys = (
        "PatientName", "PatientID", "PatientComments", "ContainerIdentifier", "LabelText",
        "BarcodeValue", "ImageComments", "OperatorsName", "InstitutionName", "StationName",
        "StudyDescription", "SeriesDescription", "AccessionNumber", "DeviceSerialNumber",
    )  # fmt: skip
    private = dict.fromkeys(keys, text)
    for index, step in enumerate((1, 2)):
        dataset = dicomslides.instance(
            np.ascontiguousarray(PIXELS[::step, ::step]),
            spacing=(0.0005 * step, 0.0005 * step),
            SpecimenDescriptionSequence=[specimen],
            **private,
        )
        dataset.private_block(0x0011, text, create=True).add_new(1, "LO", text)
        dicomslides.save(folder / f"{index}.dcm", dataset)
    return folder / "0.dcm"


def _hamamatsu(folder: Path, text: str) -> Path:
    path = folder / "slide.ndpi"
    said = f"Product=C12000\r\n{text}={text}\r\nReference={text}\r\nOperator={text}\r\n"
    tags = {65427: (ndpi.ASCII, text), 65449: (ndpi.ASCII, said)}
    pixels = slides.picture(128, 192)
    pages = [ndpi.level(pixels, 4, tags=tags), ndpi.level(pixels[::2, ::2], 4, lens=10)]
    ndpi.write(path, [*pages, ndpi.level(slides.picture(32, 64), lens=-1)])
    return path


def _leica(folder: Path, text: str) -> Path:
    def edit(xml: str) -> str:
        xml = xml.replace('name="image"', f'name="{text}"').replace('name="c"', f'name="{text}"')
        return xml.replace("<scanSettings>", f"<{text}>{text}</{text}><scanSettings>")

    scans = [leica.scan(PIXELS, 1000, 1000)]
    return leica.write(folder / "slide.scn", scans, (200000, 200000), barcode=text, edit=edit)


def _philips(folder: Path, text: str) -> Path:
    path = folder / "slide.tiff"
    steps = (1, 2)
    sizes = [philips.padded_size((210 // step, 150 // step), 128) for step in steps]
    levels = philips.representations(philips.spacings(steps), [(210, 150), sizes[1]])
    more = "".join(
        philips.attribute(name, text)
        for name in ("PIIM_DP_SCANNER_OPERATOR_ID", "DICOM_DEVICE_SERIAL_NUMBER", text)
    )
    label = philips.picture_object("LABELIMAGE", philips.base64_jpeg(slides.picture(20, 30)))
    image = philips.whole_slide_image(philips.spacing(), levels)
    barcode = base64.b64encode(text.encode()).decode()
    xml = philips.description(image, label, barcode=barcode, more=more)
    philips.write(path, PIXELS, steps, xml=xml)
    return path


def _ventana(folder: Path, text: str) -> Path:
    keys = ("UserName", "Barcode1D", "Barcode2D", "SlideAnnotation", "JP2FileName", text)
    said = 'Magnification="20" ScanRes="0.46" ScannerModel="iScan" Z-layers="1" '
    said += " ".join(f'{key}="{text}"' for key in keys)
    path = folder / "slide.bif"
    ventana.write(path, [PIXELS, PIXELS[::2, ::2]], None, scan=ventana.scan_xml(said))
    return path


def _mirax(folder: Path, text: str) -> Path:
    path = folder / "slide.mrxs"
    mirax.write(path, mirax.Mirax(images=(4, 4), levels=3))
    ini = folder / "slide" / "Slidedat.ini"
    said = ini.read_text(encoding="utf-8-sig").replace("A patient", text)
    said = said.replace("SLIDE_VERSION", f"{text} = {text}\nPROJECT_NAME = {text}\nSLIDE_VERSION")
    ini.write_text(f"{said}\n[{text}]\n{text} = {text}\n", encoding="utf-8-sig")
    return path


def _czi(folder: Path, text: str) -> Path:
    path = folder / "slide.czi"
    xml = f"""<ImageDocument><Metadata><Information><User><DisplayName>{text}</DisplayName></User>
      <Document><Name>{text}</Name><Description>{text}</Description></Document><Image><SizeX>210
      </SizeX><{text}>{text}</{text}></Image></Information><Scaling><Items><Distance Id="X"><Value>
      5e-7</Value></Distance><Distance Id="Y"><Value>5e-7</Value></Distance></Items></Scaling>
      </Metadata></ImageDocument>"""
    small = np.ascontiguousarray(PIXELS[::2, ::2])
    czis.write(path, [czis.Block(PIXELS), czis.Block(small, scale=2)], xml)
    return path


def _czi_channels(folder: Path, text: str) -> Path:
    path = folder / "slide.czi"
    channels = f"<Channel Id='a' Name='DAPI'/><Channel Id='b' Name='{text}'/>"
    xml = f"""<ImageDocument><Metadata><Information><User><DisplayName>{text}</DisplayName></User>
      <Image><Dimensions><Channels>{channels}</Channels></Dimensions></Image></Information>
      <DisplaySetting><Channels>{channels}</Channels></DisplaySetting></Metadata></ImageDocument>"""
    czis.write(path, [czis.Block(plane, c=c) for c, plane in enumerate(CHANNELS)], xml)
    return path


def _vsi_channels(folder: Path, text: str) -> Path:
    path = folder / "slide.vsi"
    tile = imagecodecs.jpeg8_encode(np.ascontiguousarray(PIXELS[:64, :64, 0]), level=90)
    tiles = [vsis.Tile((0, 0, c, 0), tile) for c in range(2)]
    vsis.ets(folder / "_slide_" / "stack1" / "frame_t.ets", tiles, (64, 64), samples=1)
    document = vsis.tree(2, vsis.text(15, text))
    _write_vsi(path, document, vsis.image((64, 64), (4,), ("DAPI", text)))
    return path


def _vsi(folder: Path, text: str) -> Path:
    path = folder / "slide.vsi"
    tile = imagecodecs.jpeg8_encode(np.ascontiguousarray(PIXELS[:64, :64]), level=90)
    tiles = [vsis.Tile((x, y, 0), tile) for y in range(2) for x in range(2)]
    vsis.ets(folder / "_slide_" / "stack1" / "frame_t.ets", tiles, (64, 64))
    document = vsis.tree(2, *(vsis.text(code, text) for code in (11, 12, 13, 14, 15, 34, 35)))
    _write_vsi(path, document, vsis.image((128, 128)))
    return path


def _write_vsi(path: Path, document: Any, image: Any) -> None:
    """Write as `vsis.vsi` does, but another document."""
    vsis.vsi(path, image)
    tags = vsis.block([document, vsis.tree(2000, image, second=0)])
    old = path.read_bytes()
    page = struct.unpack_from("<I", old, 4)[0]
    path.write_bytes(struct.pack("<2sHI", b"II", 42, 8 + len(tags)) + tags + old[page:])


def _perkinelmer(folder: Path, text: str) -> Path:
    path = folder / "slide.qptiff"
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for step in (1, 2):
            for name, plane in zip(("DAPI", text), CHANNELS, strict=True):
                kind = "ReducedResolution" if step > 1 else "FullResolution"
                keys = ("SlideID", "Barcode", "ComputerName", "OperatorName", "StudyName", text)
                said = "".join(f"<{key}>{text}</{key}>" for key in keys)
                xml = (
                    f"<PerkinElmer-QPI-ImageDescription><ImageType>{kind}</ImageType>"
                    f"<Name>{name}</Name><Biomarker>{name}</Biomarker><Color>0,0,255</Color><Objective>20x</Objective>{said}"
                    "</PerkinElmer-QPI-ImageDescription>"
                )
                file.write(
                    np.ascontiguousarray(plane[::step, ::step]),
                    description=xml,
                    metadata=None,
                    software="PerkinElmer-QPI",
                    tile=(64, 64),
                    compression="zlib",
                    photometric="minisblack",
                    subfiletype=int(step > 1),
                )
    return path


def _trestle(folder: Path, text: str) -> Path:
    path = folder / "slide.tif"
    said = f"{trestle.TEXT};User={text};{text}={text}"
    return trestle.write(path, [PIXELS, np.ascontiguousarray(PIXELS[::2, ::2])], text=said)


def _argos(folder: Path, text: str) -> Path:
    xml = (
        f"<Argos.Scan.Metadata><MinZ>0</MinZ><MaxZ>0</MaxZ><Barcode>{text}</Barcode>"
        f"<ObjectiveMagnification>20</ObjectiveMagnification><{text}>{text}</{text}><Scan><Name>"
        f'{text}</Name><Tagged {text}="{text}">{text}</Tagged></Scan></Argos.Scan.Metadata>'
    )
    tags: dict[int, tuple[int, Any]] = {65000: (ASCII, xml), 272: (ASCII, "Argos 1")}
    tags |= {282: (RATIONAL, 40000), 283: (RATIONAL, 20000), 296: (SHORT, 3)}
    pages = [
        tiffbytes.page(
            np.ascontiguousarray(PIXELS[::step, ::step]), bytes, tile=(64, 64), more=tags
        )
        for step in (1, 2)
    ]
    pages += [tiffbytes.page(slides.picture(20, width), bytes, tile=None) for width in (30, 50)]
    return tiffbytes.write(folder / "slide.avs", pages)


def _huron(folder: Path, text: str) -> Path:
    said = f"Resolution = 0.25um\nObjective=20X\nUser={text}\n{text}={text}\n"
    tags: dict[int, tuple[int, Any]] = {271: (ASCII, "Huron Digital Pathology")}
    tags |= {272: (ASCII, "LE120"), 282: (RATIONAL, 40000), 283: (RATIONAL, 20000), 296: (SHORT, 3)}
    small = np.ascontiguousarray(PIXELS[::2, ::2])
    pages = [
        tiffbytes.page(PIXELS, bytes, more=tags, tile=(64, 64), description=said),
        tiffbytes.page(slides.picture(30, 40), bytes, tile=None, description=text),
        tiffbytes.page(small, bytes, tile=(64, 64)),
        tiffbytes.page(slides.picture(20, 30), bytes, tile=None, subfile_type=1),
    ]
    return tiffbytes.write(folder / "slide.tif", pages)


def _micromanager(folder: Path, text: str) -> Path:
    summary = {"Prefix": text, "UserName": text, "Comment": text, text: text, "Frames": 2}
    return micromanager.write_stack(folder, CHANNELS, summary)[0]


def _ndtiff(folder: Path, text: str) -> Path:
    return micromanager.write_ndtiff(folder, CHANNELS, ("a.tif", f"{text}.tif"))[0]


def _broken_levels(folder: Path, text: str) -> Path:
    """Write an OME-Zarr whose second level and second label image, by that name, are missing."""
    path = _ome_zarr(folder, text)
    document = json.loads((path / "zarr.json").read_text())
    image = document["attributes"]["ome"]["multiscales"][0]
    image["datasets"].append({**image["datasets"][1], "path": f"{text} level"})
    (path / "zarr.json").write_text(json.dumps(document))
    zarrs.write_group(path / "labels", {"labels": [text, f"{text} lost"]})
    return path


WRITERS: dict[str, Callable[[Path, str], Path]] = {
    "aperio": _aperio,
    "jpeg-2000": _jpeg_2000,
    "tiff": _tiff,
    "imagej": _imagej,
    "ome-tiff": _ome,
    "ome-stack": _stack,
    "ome-zarr": _ome_zarr,
    "old-ome-zarr": _old_ome_zarr,
    "bare-zarr": _bare_zarr,
    "sharded-zarr": _sharded_zarr,
    "blosc-zarr": _blosc_zarr,
    "broken-levels": _broken_levels,
    "dicom": _dicom,
    "hamamatsu": _hamamatsu,
    "leica": _leica,
    "philips": _philips,
    "ventana": _ventana,
    "mirax": _mirax,
    "czi": _czi,
    "czi-channels": _czi_channels,
    "vsi": _vsi,
    "vsi-channels": _vsi_channels,
    "perkinelmer": _perkinelmer,
    "trestle": _trestle,
    "argos": _argos,
    "huron": _huron,
    "micromanager": _micromanager,
    "ndtiff": _ndtiff,
    **{
        f"tiff-{name}": partial(_compressed, name, dtype)
        for name, dtype in (
            ("lzw", "uint16"),
            ("zstd", "uint8"),
            ("webp", "uint8"),
            ("jpeg", "uint8"),
            ("jpegxl", "uint8"),
            ("lerc", "float32"),
            ("packbits", "uint8"),
        )
    },
}
