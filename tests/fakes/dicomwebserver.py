"""A DICOMweb server of instances, as PS3.18 describes it: metadata, frames and bulk data.

It shares the counting of requests and the troubles with `rangeserver`.
"""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from pydicom import Dataset
from pydicom.encaps import generate_frames
from pydicom.uid import (
    HTJ2K,
    JPEG2000,
    ExplicitVRLittleEndian,
    HTJ2KLossless,
    HTJ2KLosslessRPCL,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLSLossless,
    RLELossless,
)
from wsidicom.uid import JPEGXL, JPEGXLJPEGRecompression, JPEGXLLossless

from tests.fakes.rangeserver import Handler, RangeServer, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

# PS3.18, section 8.7.3.3.2.
MEDIA_TYPES = {
    ExplicitVRLittleEndian: "application/octet-stream",
    JPEGBaseline8Bit: "image/jpeg",
    RLELossless: "image/dicom-rle",
    JPEGLSLossless: "image/jls",
    **dict.fromkeys((JPEG2000, JPEG2000Lossless), "image/jp2"),
    **dict.fromkeys((HTJ2K, HTJ2KLossless, HTJ2KLosslessRPCL), "image/jphc"),
    **dict.fromkeys((JPEGXL, JPEGXLJPEGRecompression, JPEGXLLossless), "image/jxl"),
}
BOUNDARY = "a boundary"
PREFIX = "/dicom-web"


class DicomWebServer(RangeServer):
    """Serves instances by DICOMweb.

    Attributes
    ----------
    strict : bool
        Whether compressed frames are sent only as their own media type.
    names_syntax : bool
        Whether frames name their transfer syntax.
    chunked : bool
        Whether it sends responses without stating their lengths.
    bulk : int
        Values longer than this are sent as a BulkDataURI.
    bulk_base : str or None
        What BulkDataURIs start with, instead of the URL of the instance.
    missing : set of int
        Frames of every instance that are lost.
    edit : callable
        Changes the JSON of an instance before it is sent.
    """

    def __init__(self, folder: Path, instances: Sequence[Dataset]) -> None:
        super().__init__(folder)
        self.RequestHandlerClass = DicomWebHandler
        self.instances = {each.SOPInstanceUID: each for each in instances}
        self.strict = False
        self.names_syntax = True
        self.chunked = False
        self.bulk = 1 << 20
        self.bulk_base: str | None = None
        self.missing: set[int] = set()
        self.edit: Callable[[dict[str, Any]], None] = lambda attributes: None

    @property
    def series(self) -> str:
        first = next(iter(self.instances.values()))
        return f"studies/{first.StudyInstanceUID}/series/{first.SeriesInstanceUID}"

    @property
    def root(self) -> str:
        return self.url(PREFIX[1:])

    @property
    def series_url(self) -> str:
        return f"{self.root}/{self.series}"

    @property
    def frame_requests(self) -> list[str]:
        return [each.path for each in self.requests if "/frames/" in each.path]

    def attributes(self, instance: Dataset) -> dict[str, Any]:
        """Return an instance as JSON, without its pixels."""
        base = self.bulk_base or f"{self.series_url}/instances/{instance.SOPInstanceUID}"
        kept = Dataset()
        kept.update({tag: instance[tag] for tag in [*instance.keys()] if tag != 0x7FE00010})
        found = kept.to_json_dict(
            bulk_data_threshold=self.bulk,
            bulk_data_element_handler=lambda element: f"{base}/bulkdata/{int(element.tag):08X}",
        )
        self.edit(found)
        return found


def frames_of(instance: Dataset) -> list[bytes]:
    count, data = int(instance.NumberOfFrames), instance.PixelData
    if instance.file_meta.TransferSyntaxUID == ExplicitVRLittleEndian:
        size = len(data) // count
        return [data[index * size : (index + 1) * size] for index in range(count)]
    return list(generate_frames(data, number_of_frames=count))


class DicomWebHandler(Handler):
    server: DicomWebServer

    def do_GET(self) -> None:  # noqa: N802
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.part = 0, 0, 0
        trouble = self.server.note(Request(self.path, 0, 0, headers))
        time.sleep(self.server.latency)
        (trouble or DicomWebHandler.serve)(self)

    def serve(self) -> None:
        """Answer properly."""
        url = urlsplit(self.path)
        path = unquote(url.path).removeprefix(f"{PREFIX}/")
        if path == f"{self.server.series}/metadata":
            self.send_json(self.server.instances.values())
        elif re.fullmatch(r"studies/[0-9.]+/instances", path):
            self.search(parse_qs(url.query))
        elif found := re.fullmatch(f"{self.server.series}/instances/([0-9.]+)/(.*)", path):
            self.send_of(self.server.instances.get(found[1]), found[2])
        else:
            self.answer(404)

    def search(self, query: dict[str, list[str]]) -> None:
        """Answer a search for instances (QIDO-RS)."""
        wanted = query.get("SOPClassUID", query.get("00080016", [""]))
        self.send_json(
            [each for each in self.server.instances.values() if each.SOPClassUID in wanted]
        )

    def send_of(self, instance: Dataset | None, path: str) -> None:
        if instance is None:
            self.answer(404)
        elif path == "metadata":
            self.send_json([instance])
        elif path.startswith("frames/"):
            self.send_frames(instance, [int(text) for text in path[7:].split(",")])
        elif path == "bulkdata/00282000":
            profile = instance.OpticalPathSequence[0].ICCProfile
            self.send_multipart([profile], "application/octet-stream", "application/octet-stream")
        else:
            self.answer(404)

    def send_json(self, instances: Any) -> None:
        found = [self.server.attributes(each) for each in instances]
        self.send_body(json.dumps(found).encode(), "application/dicom+json")

    def send_frames(self, instance: Dataset, numbers: list[int]) -> None:
        syntax = instance.file_meta.TransferSyntaxUID
        kind = MEDIA_TYPES[syntax]
        accept = self.headers.get("Accept", "")
        accepted = {"image/*", kind} if self.server.strict else {"*/*", "image/*", kind}
        if not self.server.strict or not kind.startswith("image/"):
            accepted.add("application/octet-stream")
        for kind_range in re.findall(r'[^,"]*(?:"[^"]*"[^,"]*)*', accept):
            stated = dict(re.findall(r'([\w-]+)="?([^";]+)"?', kind_range))
            matches = kind_range.strip().startswith("multipart/related")
            if (
                matches
                and stated.get("type") in accepted
                and stated.get("transfer-syntax") in ("*", syntax)
            ):
                break
        else:
            self.answer(406)
            return
        frames = frames_of(instance)
        lost = self.server.missing | {number for number in numbers if number > len(frames)}
        if lost & set(numbers):
            self.answer(404)
            return
        part_type = f"{kind};transfer-syntax={syntax}" if self.server.names_syntax else kind
        self.send_multipart([frames[number - 1] for number in numbers], part_type, kind)

    def send_multipart(self, parts: list[bytes], part_type: str, kind: str) -> None:
        body = multipart(parts, part_type)
        self.send_body(body, f'multipart/related; type="{kind}"; boundary="{BOUNDARY}"')

    def send_body(self, body: bytes, media_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", media_type)
        if not self.server.chunked:
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(body), 5000):
            part = body[start : start + 5000]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")


def multipart(parts: list[bytes], part_type: str) -> bytes:
    """Join parts to the body of a response (RFC 2046, section 5.1)."""
    head = f"\r\n--{BOUNDARY}\r\nContent-Type: {part_type}\r\n\r\n".encode()
    return b"".join(head + part for part in parts) + f"\r\n--{BOUNDARY}--\r\n".encode()


def respond(body: bytes, media_type: str, path: str = "") -> Callable[[Handler], None]:
    """Answer all requests for paths that contain `path` with a body of a media type."""

    def trouble(handler: Any) -> None:
        if path in handler.path:
            handler.send_body(body, media_type)
        else:
            handler.serve()

    return trouble
