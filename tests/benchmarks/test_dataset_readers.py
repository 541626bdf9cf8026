"""Processes that read for other libraries hand out the right patches; skipped without PyTorch."""

import numpy as np
import pytest

from tests.writers import slides

torch = pytest.importorskip("torch")

from benchmarks.dataset_readers import PART, Peer, Workers  # noqa: E402

SIDE, FACTOR, BATCH = 8, 2, 2 * PART
# As other libraries' handles are, it is there when the processes are forked.
PIXELS = slides.picture(200, 300)
PLACES = [(x, y) for y in range(0, 180, 11) for x in range(0, 280, 37)]

# What PyTorch and Python warn of when processes are forked beside threads.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class FromArray(Peer):
    package = "array"

    def open(self):
        def read(place, span):
            x, y = place
            if x < 0:
                raise ValueError("no such place")
            return PIXELS[y : y + span, x : x + span]

        return read


@pytest.fixture
def workers():
    made = Workers(FromArray("", SIDE, FACTOR), BATCH, 2)
    yield made
    made.close()


@pytest.mark.parametrize("there", [False, True])
def test_batches_are_those_of_the_places(workers, there):
    next(workers.batches(PLACES[::-1], "cpu", there=not there))  # and no more of them
    found = [batch.clone() for batch in workers.batches(PLACES, "cpu", there=there)]
    assert [len(batch) for batch in found[:-1]] == [BATCH] * (len(PLACES) // BATCH)
    for pixels, (x, y) in zip(torch.cat(found), PLACES, strict=True):
        stored = PIXELS[y : y + SIDE * FACTOR, x : x + SIDE * FACTOR]
        expected = slides.average(stored, FACTOR)
        np.testing.assert_array_equal(pixels.permute(1, 2, 0).numpy(), expected)


def test_errors_end_the_loop(workers):
    with pytest.raises(RuntimeError, match="no such place"):
        list(workers.batches([(-1, 0)] * BATCH + PLACES, "cpu", there=False))
    assert sum(map(len, workers.batches(PLACES, "cpu", there=False))) == len(PLACES)
