"""`Opening`: the information needed to open a slide again."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from napari_wsigpu.formats.describe import describe_for_reading
from napari_wsigpu.gpu.device import driver
from napari_wsigpu.model.errors import UnsupportedSlideError, changed_error
from napari_wsigpu.model.layout import DIGEST, digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.model.layout import SlideLayout
    from napari_wsigpu.storage.source import ByteSource
    from napari_wsigpu.storage.stream import StreamSource


# Depth to which subfolders of the slide's folder are searched for its files.
DEEPEST = 5


@dataclass(frozen=True, eq=False)
class Opening:
    """How a slide was opened: everything that another process needs to open it again.

    Attributes
    ----------
    layout : SlideLayout
        The slide's layout. For a label image, its path is a title: see `label_image`.
    device, threads
        As in `open_slide`.
    keeps_whole : bool
        Whether caches keep tiles that a region covers completely.
    color : {"stored", "srgb"}
        The slide's `display_color`.
    stream : StreamSource or None
        The stream that the slide was opened from, instead of a path.
    label : tuple of (Opening, int) or None
        For a label image, the slide that it belongs to and its number there.
    """

    layout: SlideLayout
    device: str = "auto"
    threads: int | None = None
    keeps_whole: bool = True
    color: Color = "stored"
    stream: StreamSource | None = None
    label: tuple[Opening, int] | None = None

    def label_image(self, number: int) -> Opening:
        """Return the opening of a label image.

        Its path can identify a patient, so a title replaces it. The layout still has the paths of
        the files; `portable` removes them.
        """
        title = f"{self.layout.path} (label image {number + 1})"
        layout = replace(self.layout.labels[number].layout, path=title)
        label = self, number
        return replace(self, layout=layout, device="cpu", color="stored", label=label)

    @contextmanager
    def parse_again(
        self, z: int | None = None, t: int | None = None
    ) -> Iterator[tuple[Opening, ByteSource | None]]:
        """Parse the file again, optionally for another plane.

        Yields
        ------
        Opening
            This opening with the plane's layout, including everything that `portable` removes.
        ByteSource or None
            As in `formats.describe.describe_for_reading`.

        Raises
        ------
        SlideChangedError
            If the file has changed since it was opened.
        SlideError
            If the file cannot be read.
        """
        own = self.layout
        shown, remote = own.planes, own.remote
        if self.label is not None:
            parent, number = self.label
            # The label image may have fewer planes than the slide; each then covers several planes
            # of the slide.
            whole = parent.layout.planes
            if z is not None:
                z = -(-z * whole.size_z // shown.size_z)
            if t is not None:
                t = -(-t * whole.size_t // shown.size_t)
            with parent.parse_again(z, t) as (found, source):
                if number >= len(found.layout.labels):
                    raise changed_error(own.path)
                image = found.label_image(number)
                yield replace(self, layout=image.layout, label=image.label), source
            return
        if self.stream is not None:
            raise self._stream_error()
        address = own.path if remote is None else remote.url
        at = {"z": shown.z if z is None else z, "t": shown.t if t is None else t}
        with describe_for_reading(address, at if shown.names else None) as (layout, source):
            now, known = layout.without_private_data(), own.without_private_data()
            if now.files != known.files or layout.remote != remote:
                raise changed_error(own.path)
            yield replace(self, layout=layout), source

    def portable(self) -> Opening:
        """Return a copy for another process, without anything that can identify a patient.

        Raises
        ------
        UnsupportedSlideError
            If another process cannot open the slide.
        """
        if self.label is not None:
            parent = self.label[0].portable()
            return replace(self, layout=parent.layout, label=(parent, self.label[1]))
        if self.stream is not None:
            raise self._stream_error()
        return replace(self, layout=self.layout.without_private_data())

    def with_files(self) -> Opening:
        """Return a copy with the paths of the slide's other files, which `portable` hashed.

        Searches the slide's folder and its subfolders: every format stores its files there.

        Raises
        ------
        SlideChangedError
            If one of them is missing.
        """
        layout = self.layout
        missing = {file.path for file in layout.files if file.path.startswith(DIGEST)}
        if not missing:
            return self
        own = Path(layout.path)
        root = own if own.is_dir() else own.parent
        found: dict[str, str] = {}
        for folder, below, names in os.walk(root):
            # Search folders with the slide's name first; the others may be large.
            below.sort(key=lambda name: own.stem not in name)
            if len(Path(folder).relative_to(root).parts) == DEEPEST:
                below.clear()
            paths = (os.path.join(folder, name) for name in names)  # noqa: PTH118 - faster
            found |= {key: path for path in paths if (key := digest(path)) in missing}
            if len(found) == len(missing):
                files = (replace(f, path=found.get(f.path, f.path)) for f in layout.files)
                return replace(self, layout=replace(layout, files=tuple(files)))
        raise changed_error(layout.path)

    def in_child(self) -> Opening:
        """Return a copy for a forked process, which cannot use a GPU that its parent uses."""
        if self.device in ("auto", "cpu") or not driver.started_before_fork():
            return self
        driver.warn_of_fork()
        return replace(self, device="cpu")

    def _stream_error(self) -> UnsupportedSlideError:
        return UnsupportedSlideError(
            f"'{self.layout.path}' was opened from a stream, which can't be opened again in "
            "another process or for another plane; open the slide from a path."
        )
