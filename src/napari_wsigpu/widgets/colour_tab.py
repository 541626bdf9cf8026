"""The inspector's tab "Colour": the ICC profile, and whether it is applied."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Literal

from PIL import ImageCms
from qtpy.QtCore import Signal
from qtpy.QtWidgets import QCheckBox, QLabel, QVBoxLayout, QWidget

from napari_wsigpu.codecs.color import profile_size
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.units import byte_size

if TYPE_CHECKING:
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.widgets.jobs import Jobs

NO_PROFILE = "The file holds no ICC profile: its colours are shown as they are stored."
EXPLANATION = (
    "The profile says which colours the scanner's numbers stand for. Applied, the slide is shown "
    "in sRGB; what scripts read stays as it is stored."
)


class ColourTab(QWidget):  # type: ignore[misc]
    """Says what ICC profile there is, and applies it.

    Attributes
    ----------
    changed : Signal
        The slide is shown in other colours from now on.
    """

    changed = Signal()

    def __init__(self, jobs: Jobs) -> None:
        super().__init__()
        self._jobs = jobs
        self._slide: Slide | None = None
        self._unread = False
        self.profile = QLabel()
        self.apply = QCheckBox("&Apply ICC profile")
        self.explanation = QLabel(EXPLANATION)
        layout = QVBoxLayout(self)
        for label in (self.profile, self.explanation):
            label.setWordWrap(True)
        layout.addWidget(self.profile)
        layout.addWidget(self.apply)
        layout.addWidget(self.explanation)
        layout.addStretch()
        self.apply.toggled.connect(self._apply)

    def show_slide(self, slide: Slide | None) -> None:
        """Show the profile of another slide, or none."""
        self._jobs.drop(self)
        self._slide = slide
        place = None if slide is None else slide.layout.icc
        self._unread = place is not None
        self.explanation.setVisible(place is not None)
        self.profile.setText(
            NO_PROFILE if place is None else f"ICC profile of {byte_size(profile_size(place))}"
        )
        self._check()
        if self.isVisible():
            self._read()

    def showEvent(self, event: Any) -> None:  # noqa: N802
        """Read the profile's description, now that it is looked at."""
        super().showEvent(event)
        self._read()

    def _read(self) -> None:
        slide = self._slide
        if slide is None or not self._unread:
            return
        self._unread = False
        self._jobs.start(
            "Reading the ICC profile",
            slide,
            lambda: describe_profile(slide),
            self.profile.setText,
            owner=self,
        )

    def _check(self) -> None:
        """Let the check box say in which colours the slide is shown."""
        has_profile = self._slide is not None and self._slide.layout.icc is not None
        self.apply.setEnabled(has_profile)
        self.apply.blockSignals(True)
        self.apply.setChecked(self._slide is not None and self._slide.display_color == "srgb")
        self.apply.blockSignals(False)

    def _apply(self, applied: bool) -> None:
        slide = self._slide
        if slide is None:
            return
        color: Literal["stored", "srgb"] = "srgb" if applied else "stored"
        self.apply.setEnabled(False)
        self._jobs.start(
            "Applying the ICC profile",
            slide,
            lambda: slide.read_region((0, 0), (1, 1), slide.level_count - 1, color=color),
            lambda _: self._show_color(slide, color),
            self._say,
            owner=self,
        )

    def _show_color(self, slide: Slide, color: Literal["stored", "srgb"]) -> None:
        slide.display_color = color
        self._check()
        self.changed.emit()

    def _say(self, sentence: str) -> None:
        self.profile.setText(sentence)
        self._check()


def describe_profile(slide: Slide) -> str:
    """Return the description that a slide's ICC profile gives of itself, or why there is none."""
    try:
        profile = slide.icc_profile or b""
        text = ImageCms.getProfileDescription(ImageCms.ImageCmsProfile(io.BytesIO(profile)))
    except SlideError as error:
        return str(error)
    except (OSError, ImageCms.PyCMSError) as error:
        return (
            f"The ICC profile of '{slide.path}' is damaged ({error}); its colours are shown as "
            "they are stored."
        )
    name = " ".join(text.split())[:200] or "without a description"
    return f"ICC profile: {name} ({byte_size(len(profile))})"
