"""The inspector's "Color" page: shows and applies the ICC profile."""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING

from magicgui.widgets import CheckBox
from PIL import ImageCms

from napari_wsigpu.codecs.color import profile_size
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.widgets.kit.parts import PAGE_MARGIN, Panel, Text

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.widgets.dock.jobs import Jobs

NO_PROFILE = "The file contains no ICC profile: its colors are shown as stored."
EXPLANATION = (
    "The profile defines the colors of the scanner's values. If it is applied, the slide is shown "
    "in sRGB; scripts still read the stored values."
)


class ColorPage(Panel):
    """Shows a slide's ICC profile, and applies it.

    Parameters
    ----------
    jobs : Jobs
        The dock's slow jobs.
    recolored : callable
        Called when the colors in which the slide is shown have changed.
    """

    def __init__(self, jobs: Jobs, recolored: Callable[[], object]) -> None:
        self._jobs, self._recolored = jobs, recolored
        self._slide: Slide | None = None
        self._unread = False
        self.profile = Text("ICC profile")
        self.apply = CheckBox(text="&Apply ICC profile", tooltip="Show the slide in sRGB")
        self.explanation = Text("", EXPLANATION)
        super().__init__(self.profile, self.apply, self.explanation, margin=PAGE_MARGIN)
        self.stretch()
        self.apply.native.setAccessibleName("Apply ICC profile")
        self.apply.native.toggled.connect(self._apply)

    def show_slide(self, slide: Slide | None) -> None:
        """Show the profile of another slide, or none."""
        self._jobs.drop(self)
        self._slide = slide
        icc = None if slide is None else slide.layout.icc
        self._unread = icc is not None
        self.explanation.visible = icc is not None
        self.profile.value = (
            NO_PROFILE if icc is None else f"ICC profile of {byte_size(profile_size(icc))}"
        )
        self._check()
        if self.visible:
            self.on_shown()

    def on_shown(self, spontaneous: bool = False) -> None:
        """Read the profile's description when the page becomes visible."""
        slide = self._slide
        if slide is None or not self._unread:
            return
        self._unread = False
        work = partial(describe_profile, slide)
        self._jobs.start("Reading the ICC profile", slide, work, self.profile.say, owner=self)

    def _check(self) -> None:
        """Set the check box to the slide's current colors."""
        self.apply.enabled = self._slide is not None and self._slide.layout.icc is not None
        self.apply.native.blockSignals(True)
        self.apply.value = self._slide is not None and self._slide.display_color == "srgb"
        self.apply.native.blockSignals(False)

    def _apply(self, applied: bool) -> None:
        slide = self._slide
        if slide is None:
            return
        color: Color = "srgb" if applied else "stored"
        self.apply.enabled = False
        # Read a pixel first: this fails before the view changes if the profile cannot be applied.
        work = partial(slide.read_region, (0, 0), (1, 1), slide.level_count - 1, color=color)
        done = partial(self._show_color, slide, color)
        self._jobs.start("Applying the ICC profile", slide, work, done, self._fail, owner=self)

    def _show_color(self, slide: Slide, color: Color, pixel: Array) -> None:
        slide.display_color = color
        self._unread = True  # instead of an earlier failure
        self.on_shown()
        self._check()
        self._recolored()

    def _fail(self, sentence: str) -> None:
        self.profile.say(sentence)
        self._check()


def describe_profile(slide: Slide) -> str:
    """Return the description in a slide's ICC profile, or the reason why it cannot be read."""
    try:
        profile = slide.icc_profile or b""
        text = ImageCms.getProfileDescription(ImageCms.ImageCmsProfile(io.BytesIO(profile)))
    except SlideError as error:
        return str(error)
    except (OSError, ImageCms.PyCMSError) as error:
        return (
            f"The ICC profile of '{slide.path}' is damaged ({error}); the slide's colors are shown "
            "as stored."
        )
    name = " ".join(text.split())[:200] or "no description"
    return f"ICC profile: {name} ({byte_size(len(profile))})"
