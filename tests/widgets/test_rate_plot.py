"""The drawing of tiles a second."""

import numpy as np
import pytest
from napari._qt.utils import QImg2array
from qtpy.QtGui import QImage

from napari_wsigpu.slide.rates import Step, per_second
from napari_wsigpu.widgets.kit.rate_plot import NOTHING, RatePlot
from napari_wsigpu.widgets.kit.theme import accent


def step(begin, end, tiles):
    return Step(begin, end, tiles, 0, 0, 0, 0)


@pytest.fixture
def plot(display):
    made = RatePlot()
    display.addWidget(made)
    made.resize(600, made.sizeHint().height())
    made.show()
    return made


def bars(plot):
    """(columns, rows) that have the colour of bars."""
    pixels = QImg2array(plot.grab().toImage())[..., :3]
    rows, columns = np.nonzero((pixels == accent().getRgb()[:3]).all(axis=-1))
    return columns / pixels.shape[1], rows


def test_without_tiles_it_says_so(plot):
    plot.show_steps([step(0, 1, 0)], 1)
    assert plot.peak == 0
    assert plot.accessibleDescription() == NOTHING
    assert not bars(plot)[0].size


def test_a_bar_lies_where_its_time_was_and_as_high_as_its_rate(plot):
    plot.show_steps([step(100, 110, 30), step(130, 140, 60)], 160)
    columns, rows = bars(plot)
    older, newer = columns < 0.4, columns > 0.4
    assert plot.peak == 6
    assert plot.accessibleDescription() == "peak 6.0 tiles/s"
    assert columns[older].max() == pytest.approx(1 / 6, abs=0.02)
    assert columns[newer].min() == pytest.approx(1 / 2, abs=0.02)
    assert columns[newer].max() == pytest.approx(2 / 3, abs=0.02)
    assert np.ptp(rows[newer]) == pytest.approx(2 * np.ptp(rows[older]), rel=0.1)


def test_the_peaks_label_stays_within_the_plot(plot):
    drawn = []
    for now in (1, 60.9):
        plot.show_steps([step(0, 1, 12345)], now)
        picture = plot.grab().toImage().convertToFormat(QImage.Format_RGB32)
        assert picture.width() == 600
        top = [
            x
            for x in range(picture.width())
            for y in range(plot.fontMetrics().lineSpacing())
            if picture.pixel(x, y) != picture.pixel(300, 0)
        ]
        drawn.append((min(top), max(top)))
    assert 0 < drawn[1][0] < drawn[1][1] < 300 < drawn[0][0] < drawn[0][1] < 599


def test_grows_with_the_font_and_may_be_narrow(plot):
    before = plot.sizeHint().height()
    font = plot.font()
    font.setPointSizeF(font.pointSizeF() * 2)
    plot.setFont(font)
    assert plot.sizeHint().height() > 1.7 * before
    assert plot.minimumSizeHint().width() < 100


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0, "0 tiles/s"), (0.26, "0.3 tiles/s"), (12.4, "12 tiles/s"), (4321, "4,321 tiles/s")],
)
def test_rates_are_said_in_short(rate, text):
    assert per_second(rate) == text
