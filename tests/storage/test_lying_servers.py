"""A server that misbehaves in any order: reads return the right bytes or raise a clear error."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from napari_wsigpu.model.errors import SlideError
from tests.conftest import decoding_threads
from tests.fakes.rangeserver import (
    RangeServer,
    break_off,
    hang_up,
    redirect,
    send_all,
    send_half,
    send_nonsense,
    send_unnamed,
    status,
)

pytest.importorskip("obstore")

from napari_wsigpu.storage.remote import connection, http_store
from napari_wsigpu.storage.remote.disk_cache import disk_cache
from napari_wsigpu.storage.remote.remote_source import BLOCK, RemoteSource

SIZE = 40 * BLOCK + 123
CONTENTS = [np.random.default_rng(seed).bytes(SIZE) for seed in range(2)]
STATUSES = (301, 400, 401, 403, 404, 410, 416, 418, 429, 500, 503)
TROUBLES = st.one_of(
    st.sampled_from([break_off(0), break_off(), break_off(BLOCK), hang_up, send_nonsense]),
    st.sampled_from([send_half, send_all, send_unnamed, redirect("/elsewhere?x=SECRET")]),
    st.sampled_from(STATUSES).map(status),
)
RANGES = st.tuples(st.integers(0, SIZE - 1), st.integers(1, 3 * BLOCK)).map(
    lambda place: (place[0], min(place[1], SIZE - place[0]))
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Return two servers of the same file, and remove all waiting times."""
    folder = tmp_path_factory.mktemp("served")
    with (
        pytest.MonkeyPatch.context() as patch,
        RangeServer(folder) as server,
        RangeServer(folder) as other,
    ):
        patch.setattr(connection, "RETRIES", 0)
        patch.setattr(connection, "PAUSES", (0.001, 0.001))
        patch.setattr(http_store, "PAUSES", (0.001, None))
        yield server, other


class LyingServer(RuleBasedStateMachine):
    """Events that may happen between two reads."""

    server: RangeServer
    other: RangeServer

    @initialize(query=st.sampled_from(["", "?signature=SECRET"]))
    def connect(self, query):
        self.number = 0
        self.server.always, self.server.troubles = None, []
        self.server.ranges = True
        self.write()
        self.sound = True
        self.source = RemoteSource.connect(self.server.url("x.bin") + query)
        self.name = self.server.url("x.bin")
        self.other.requests.clear()

    def write(self):
        (self.server.folder / "x.bin").write_bytes(CONTENTS[self.number])
        self.server.etag = self.other.etag = f'"{self.number}"'

    @rule(ranges=st.lists(RANGES, min_size=1, max_size=4))
    def read(self, ranges):
        try:
            found = self.source.read(ranges)
        except SlideError as error:
            text = str(error)
            assert self.name in text
            assert text.endswith(".")
            assert "SECRET" not in text
            assert "\n" not in text
            assert not self.sound, text
        else:
            wanted = [CONTENTS[0][begin : begin + length] for begin, length in ranges]
            assert [bytes(part) for part in found] == wanted

    @rule(troubles=st.lists(TROUBLES, min_size=1, max_size=5))
    def misbehave_for_a_while(self, troubles):
        self.server.troubles += troubles
        self.sound = False

    @rule(trouble=TROUBLES)
    def misbehave(self, trouble):
        self.server.always = trouble
        self.sound = False

    @rule()
    def forget_ranges(self):
        self.server.ranges = False
        self.sound = False

    @precondition(lambda self: self.number == 0)
    @rule()
    def send_on(self):
        self.server.always = redirect(self.other.url("x.bin"))

    @rule()
    def recover(self):
        self.server.troubles, self.server.always, self.server.ranges = [], None, True
        self.sound = self.number == 0

    @rule()
    def replace(self):
        """Replace the file: its bytes must not be mixed with those of the first one."""
        self.number = 1
        self.write()
        self.sound = False

    @precondition(lambda self: self.number == 1)
    @rule()
    def restore(self):
        self.number = 0
        self.write()

    @rule()
    def release(self):
        self.source.release()

    @invariant()
    def tells_no_secret(self):
        for request in self.other.requests:
            assert "SECRET" not in str(request)

    def teardown(self):
        if hasattr(self, "source"):
            self.source.close()
        disk_cache().clear()
        assert not [name for name in decoding_threads() if "remote" in name]


def test_any_server_behaviour_is_handled(servers):
    LyingServer.server, LyingServer.other = servers
    LyingServer.TestCase.settings = settings(max_examples=20, stateful_step_count=12)
    LyingServer.TestCase("runTest").runTest()
