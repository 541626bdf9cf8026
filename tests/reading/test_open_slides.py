import pickle
import threading
from functools import partial

import pytest

from napari_wsigpu.reading.open_slides import OpenSlides, pack

closed = []


class Slide:
    def __init__(self, name):
        self.name = name

    def close(self):
        closed.append(self.name)


def refuse():
    raise FileNotFoundError("it is gone")


@pytest.fixture(autouse=True)
def nothing_closed():
    closed.clear()


def packed(name):
    return pack(partial(Slide, name))


def test_a_slide_is_opened_once():
    slides = OpenSlides()
    with slides.use(packed("a")) as first, slides.use(packed("a")) as second:
        assert first is second
    with slides.use(packed("a")) as third:
        assert third is first
    assert closed == []
    slides.close()
    assert closed == ["a"]
    assert len(slides) == 0


def test_the_one_used_least_recently_is_closed():
    slides = OpenSlides(max_idle=2)
    for name in "abacb":
        with slides.use(packed(name)):
            pass
    assert closed == ["b", "a"]
    assert len(slides) == 2


def test_one_that_is_used_stays_open():
    slides = OpenSlides(max_idle=1)
    with slides.use(packed("a")) as slide:
        for name in "bcd":
            with slides.use(packed(name)):
                pass
        slides.close()
        with slides.use(packed("a")) as again:
            assert again is slide
        assert "a" not in closed
        assert len(slides) == 1
    slides.close()
    assert sorted(closed) == ["a", "b", "c", "d"]


def test_one_that_cannot_be_opened_leaves_nothing():
    slides = OpenSlides()
    with pytest.raises(FileNotFoundError, match="gone"), slides.use(pack(refuse)):
        pass
    assert len(slides) == 0


def test_an_error_of_who_uses_it_closes_nothing():
    slides = OpenSlides()
    with pytest.raises(KeyError), slides.use(packed("a")):
        raise KeyError
    with slides.use(packed("a")):
        pass
    assert closed == []


def test_many_threads():
    slides = OpenSlides(max_idle=1)
    failures = []

    def work(names):
        for name in names * 50:
            with slides.use(packed(name)) as slide:
                if slide.name != name or slide in closed:
                    failures.append(name)

    threads = [threading.Thread(target=work, args=(names,)) for names in ("abc", "bca", "cab")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(slides) == 1


def test_what_is_packed_is_small():
    places = b"\1\0\0\0\0\0\0\0" * 10_000
    assert len(pack(partial(Slide, places))) < len(pickle.dumps(places)) / 10
