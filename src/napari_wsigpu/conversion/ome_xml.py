"""OME-XML of an OME-TIFF: metadata that tifffile writes, and the instrument, added afterward."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from defusedxml import ElementTree as DefusedTree

from napari_wsigpu.formats.wsigpu import RECORD_NAMESPACE, first_pixel
from napari_wsigpu.model.appearance import WHITE, channel_colors
from napari_wsigpu.model.layout import Channel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from napari_wsigpu.conversion.conversion_plan import Plan

NAMESPACE = "http://www.openmicroscopy.org/Schemas/OME/2016-06"
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?([+-]\d\d:\d\d|Z)?")
OPAQUE = 0xFF


def image_metadata(plan: Plan, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `metadata` argument of `tifffile.TiffWriter.write` for the slide."""
    channels = record["channels"]
    plain = "CYX" if plan.channels > 1 else "YX"
    stack = "".join(plan.stack_axes).upper()
    metadata: dict[str, Any] = {
        "axes": stack + ("YXS" if plan.rgb else plain),
        "Name": "slide",
        "CommentAnnotation": {"Namespace": RECORD_NAMESPACE, "Value": json.dumps(record)},
    }
    if plan.mpp is not None:
        for axis, size in zip("XY", plan.mpp, strict=True):
            metadata |= {f"PhysicalSize{axis}": size, f"PhysicalSize{axis}Unit": "µm"}
    if plan.z_spacing is not None:
        metadata |= {"PhysicalSizeZ": plan.z_spacing, "PhysicalSizeZUnit": "µm"}
    if plan.time_step is not None:
        metadata |= {"TimeIncrement": plan.time_step, "TimeIncrementUnit": "s"}
    if "region" in record:
        whole = plan.levels[0].width, plan.levels[0].height
        _, first = first_pixel(record["region"], whole, plan.mpp)
        planes = len(plan.planes) * (1 if plan.rgb else plan.channels)
        unit = "pixel" if plan.mpp is None else "µm"
        metadata["Plane"] = {}
        for axis, position in zip("XY", first, strict=True):
            metadata["Plane"][f"Position{axis}"] = [position] * planes
            metadata["Plane"][f"Position{axis}Unit"] = [unit] * planes
    if channels:
        stated = [Channel(channel["name"], channel["color"]) for channel in channels]
        metadata["Channel"] = {
            "Name": [channel.name for channel in stated],
            "Color": [_ome_color(color or WHITE) for color in channel_colors(stated)],
        }
    if DATE.fullmatch(record.get("scan_date") or ""):
        metadata["AcquisitionDate"] = record["scan_date"]
    return metadata


def add_instrument(xml: str, record: Mapping[str, Any]) -> bytes:
    """Return OME-XML with the microscope and its objective added."""
    root = DefusedTree.fromstring(xml)
    [image, *_] = root.iter(_name("Image"))
    [pixels, *_] = image.iter(_name("Pixels"))
    scanner, objective = record.get("scanner"), record.get("objective")
    if scanner or objective:
        instrument = ElementTree.Element(_name("Instrument"), ID="Instrument:0")
        if scanner:
            ElementTree.SubElement(instrument, _name("Microscope"), Model=scanner)
        if objective:
            attributes = {"ID": "Objective:0:0", "NominalMagnification": f"{objective:g}"}
            ElementTree.SubElement(instrument, _name("Objective"), attributes)
        root.insert(list(root).index(image), instrument)
        # The OME schema requires InstrumentRef and ObjectiveSettings before Pixels.
        index = list(image).index(pixels)
        if objective:
            settings = ElementTree.Element(_name("ObjectiveSettings"), ID="Objective:0:0")
            image.insert(index, settings)
        image.insert(index, ElementTree.Element(_name("InstrumentRef"), ID="Instrument:0"))
    ElementTree.register_namespace("", NAMESPACE)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text


def _name(tag: str) -> str:
    return f"{{{NAMESPACE}}}{tag}"


def _ome_color(color: str) -> int:
    """Return a color "#rrggbb" as OME's signed 32-bit RGBA integer."""
    value = int(color[1:], 16) << 8 | OPAQUE
    return value - (1 << 32) if value >> 31 else value
