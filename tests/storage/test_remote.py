import gc
import socket
import ssl
import subprocess
import sys
import threading
import time
from base64 import b64encode
from concurrent.futures import CancelledError
from types import SimpleNamespace
from urllib.parse import quote

import numpy as np
import psutil
import pytest

from napari_wsigpu.model.errors import (
    NotASlideError,
    SlideChangedError,
    SlideClosedError,
    SlideNotFoundError,
    SlidePermissionError,
    SlideReadError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.storage.remote import connection, http_store
from napari_wsigpu.storage.remote.disk_cache import disk_cache
from napari_wsigpu.storage.remote.remote_source import (
    BLOCK,
    HEAD,
    LONGEST_REQUEST,
    MERGED_GAP,
    RemoteSource,
)
from tests.conftest import decoding_threads
from tests.fakes.rangeserver import (
    RangeServer,
    break_off,
    drip,
    drip_headers,
    hang_up,
    redirect,
    send_all,
    send_half,
    send_more,
    send_nonsense,
    send_unnamed,
    stall,
    status,
)

CONTENT = np.random.default_rng(0).bytes(150 * BLOCK + 1234)
SECRETS = "?X-Amz-Signature=SECRET&other=SECRET"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "slide x.bin").write_bytes(CONTENT)
    (folder / "empty.bin").write_bytes(b"")
    return folder


@pytest.fixture(autouse=True)
def empty_cache():
    yield
    disk_cache().clear()


@pytest.fixture
def leaves_no_thread():
    yield
    assert decoding_threads() == []


@pytest.fixture
def server(folder):
    with RangeServer(folder) as server:
        yield server


@pytest.fixture
def url(server):
    return server.url("slide%20x.bin")


@pytest.fixture
def source(url, leaves_no_thread):
    source = RemoteSource.connect(url)
    yield source
    source.close()


@pytest.fixture
def quick(monkeypatch):
    """Lower the time limits, so that failures are quick."""
    monkeypatch.setattr(connection, "RETRIES", 1)
    monkeypatch.setattr(connection, "PAUSES", (0.01, 0.01))
    monkeypatch.setattr(limits, "first_byte_seconds", 0.3)
    monkeypatch.setattr(connection, "RETRY_SECONDS", 1)
    monkeypatch.setattr(http_store, "PAUSES", (0.01, None))


def at(*ranges):
    return [CONTENT[offset : offset + length] for offset, length in ranges]


def asked(server):
    """Return the requests since the last call, as (first block, number of blocks)."""
    found = sorted(
        (r.begin // BLOCK, -(-r.end // BLOCK) - r.begin // BLOCK) for r in server.requests
    )
    server.requests.clear()
    return found


def test_forgotten_sources_are_closed_at_exit(url):
    code = (
        "from napari_wsigpu.storage.remote.remote_source import RemoteSource\n"
        f"source = RemoteSource.connect({url!r})\nsource.read([(5, 100)])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert done.stderr == b""


def test_dropped_sources_leave_nothing_open(url, leaves_no_thread):
    before = len(psutil.Process().open_files()), len(psutil.Process().net_connections())
    for _ in range(5):
        RemoteSource.connect(url).read([(5, 100)])
    gc.collect()
    wait_for(lambda: len(psutil.Process().net_connections()) <= before[1])
    assert len(psutil.Process().open_files()) == before[0]


@pytest.mark.skipif(sys.platform != "linux", reason="this system does not fork")
@pytest.mark.parametrize("last", ["pass", "source.close()", "del source"])
def test_forked_process_leaves_quietly(url, last):
    code = f"""
import os, sys
from napari_wsigpu.storage.remote.remote_source import RemoteSource
source = RemoteSource.connect({url!r})
source.read([(5, 100)])
child = os.fork()
if child == 0:
    {last}
    sys.exit()
os.waitpid(child, 0)
source.read([({40 * BLOCK}, 5)])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert done.stderr == b""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is counted here as on Linux")
@pytest.mark.parametrize("spare", [0, 1, 2, 3])
def test_too_many_open_files_are_named(url, spare):
    code = f"""
import os, resource
from napari_wsigpu.errors import SlideReadError
from napari_wsigpu.storage.remote.remote_source import RemoteSource
held = [RemoteSource.connect({url!r})]
most = len(os.listdir("/proc/self/fd")) + 8 + {spare}
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
try:
    while True:
        held.append(RemoteSource.connect({url!r}))
except SlideReadError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert b"too many files are open" in done.stdout


def test_reads_ranges(source):
    size = len(CONTENT)
    ranges = [
        (0, 10),
        (BLOCK - 5, 10),
        (7 * BLOCK, 3 * BLOCK + 1),
        (size - 3, 3),
        (100, 0),
    ]
    assert [bytes(view) for view in source.read(ranges)] == at(*ranges)
    assert (source.size, source.version) == (size, 'ETag "one"')


def test_range_ends_at_end_of_file(source):
    size = len(CONTENT)
    ranges = [(size - 3, 10), (size, 10), (size + BLOCK, 1), (-5, 10), (5, -1), (1 << 62, 1 << 62)]
    assert [bytes(view) for view in source.read(ranges)] == [CONTENT[-3:], *[b""] * 5]


def test_joins_ranges(source):
    rng = np.random.default_rng(1)
    offsets = rng.integers(0, len(CONTENT) + 1000, 60)
    lengths = rng.integers(0, 2 * BLOCK, 60)
    room = bytearray(8 << 20)
    joined = source.read_joined(offsets, lengths, lambda size: room)
    assert joined.buffer is room
    places = zip(offsets, lengths, joined.starts, joined.lengths, strict=True)
    for offset, length, start, count in places:
        assert room[start : start + count] == CONTENT[offset : offset + length]


def test_neighbours_share_a_request(source, server):
    assert asked(server) == [(0, HEAD // BLOCK)]
    source.read([(0, HEAD)])
    assert asked(server) == []
    near, far = 10, 10 + 3 * MERGED_GAP
    source.read([(near * BLOCK, 5), (far * BLOCK, 5), ((near + MERGED_GAP) * BLOCK, 5)])
    assert asked(server) == [(near, MERGED_GAP + 1), (far, 1)]
    source.read([((near + 1) * BLOCK, BLOCK)])
    assert asked(server) == []


def test_long_ranges_are_split(source, server):
    asked(server)
    source.read([(10 * BLOCK, 100 * BLOCK)])
    assert asked(server) == [(10, LONGEST_REQUEST), (10 + LONGEST_REQUEST, 100 - LONGEST_REQUEST)]


def test_requests_are_concurrent(source, server):
    server.latency = 0.4
    places = [(block * BLOCK, 10) for block in range(10, 140, 10)]
    begin = time.perf_counter()
    assert [bytes(view) for view in source.read(places)] == at(*places)
    assert time.perf_counter() - begin < 10 * server.latency < len(places) * server.latency
    assert len(asked(server)) == 1 + len(places)


def test_threads_share_pending_requests(source, server):
    asked(server)
    server.latency = 0.3
    threads = [threading.Thread(target=source.read, args=([(20 * BLOCK, 5)],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked(server) == [(20, 1)]


def test_blocks_are_cached_on_disk(source, url, server):
    source.read([(20 * BLOCK, 5 * BLOCK)])
    asked(server)
    with_disk = RemoteSource(url, source.size, source.version)
    assert bytes(with_disk.read([(20 * BLOCK, 5 * BLOCK)])[0]) == at((20 * BLOCK, 5 * BLOCK))[0]
    assert asked(server) == []
    disk_cache().clear()
    without = RemoteSource(url, source.size, source.version)
    without.read([(20 * BLOCK, 5)])
    assert asked(server) == [(20, 1)]
    for other in (with_disk, without):
        other.close()


def test_other_versions_are_not_read_from_disk(source, url, server):
    source.read([(20 * BLOCK, 5)])
    server.etag = '"two"'
    asked(server)
    changed = RemoteSource.connect(url)
    changed.read([(20 * BLOCK, 5)])
    assert asked(server) == [(0, 2), (20, 1)]
    changed.close()


@pytest.mark.parametrize("modified", [None, "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_ambiguous_files_are_not_cached_on_disk(url, server, modified):
    """Without an entity tag, the query may be all that distinguishes two files."""
    server.etag, server.modified = None, modified
    for _ in range(2):
        source = RemoteSource.connect(url + "?id=7")
        source.read([(20 * BLOCK, 5)])
        assert asked(server) == [(0, 2), (20, 1)]
        source.read([(20 * BLOCK, 5)])
        assert asked(server) == []
        source.close()


def test_cache_keys_contain_no_secrets(url, server):
    source = RemoteSource.connect(url.replace("//", "//user:SECRET@") + SECRETS)
    source.read([(0, 10)])
    names = [str(path) for path in disk_cache().folder.rglob("*")]
    source.close()
    assert len(names) > 2
    assert not any("SECRET" in name or "slide" in name for name in names)
    assert {request.headers["authorization"] for request in server.requests} == {
        f"Basic {b64encode(b'user:SECRET').decode()}"
    }


@pytest.mark.parametrize("change", ["etag", "size", "gone"])
def test_a_file_that_changes_is_noticed(source, server, change, folder, tmp_path):
    if change == "etag":
        server.etag = '"two"'
    elif change == "size":
        (tmp_path / "slide x.bin").write_bytes(CONTENT + b"x")
        server.folder = tmp_path
    else:
        server.etag = None
    for _ in range(2):
        with pytest.raises(SlideChangedError, match="has changed since it was opened"):
            source.read([(20 * BLOCK, 5)])
    assert bytes(source.read([(0, 5)])[0]) == CONTENT[:5]


def test_a_change_of_date_is_noticed(url, server):
    server.etag, server.modified = None, "Wed, 21 Oct 2015 07:28:00 GMT"
    source = RemoteSource.connect(url)
    server.modified = "Wed, 21 Oct 2015 07:28:01 GMT"
    with pytest.raises(SlideChangedError):
        source.read([(20 * BLOCK, 5)])
    source.close()


class TestTroubles:
    @pytest.mark.parametrize("etag", ['"one"', None])
    @pytest.mark.parametrize(
        "trouble", [break_off(1000), break_off(0), hang_up, status(503), status(500), status(429)]
    )
    def test_are_survived(self, server, source, url, trouble, etag):
        server.etag = etag
        source = RemoteSource.connect(url)
        server.troubles = [trouble] * 2
        wanted = (30 * BLOCK, 20 * BLOCK)
        assert bytes(source.read([wanted])[0]) == at(wanted)[0]
        assert server.troubles == []
        source.close()

    def test_silent_server_gets_a_second_request(self, quick, server, source):
        server.troubles = [stall(2)]
        assert bytes(source.read([(30 * BLOCK, 5)])[0]) == at((30 * BLOCK, 5))[0]

    @pytest.mark.parametrize(
        ("trouble", "kind", "words"),
        [
            (break_off(), SlideReadError, "keeps closing the connection"),
            (hang_up, SlideReadError, "keeps closing the connection"),
            (send_half, UnsupportedSlideError, "range requests"),
            (send_all, UnsupportedSlideError, "range requests"),
            (send_unnamed, UnsupportedSlideError, "range requests"),
            (send_nonsense, SlideReadError, "can't be read|keeps closing"),
            (stall(1), SlideReadError, "did not respond in time"),
            (status(503), SlideReadError, "is too busy"),
            (status(429), SlideReadError, "is too busy"),
            (status(500), SlideReadError, "internal error"),
            (status(418), SlideReadError, "can't be read from its server"),
            (status(404), SlideNotFoundError, "There is no file at"),
            (status(403), SlidePermissionError, "permission to read"),
            (status(401), SlidePermissionError, "permission to read"),
            (status(301), SlideReadError, "configured region"),
        ],
    )
    def test_that_last_are_one_sentence(self, quick, server, url, trouble, kind, words):
        server.always = trouble
        server.etag = None
        url = url.replace("//", "//user:SECRET@") + SECRETS
        begin = time.monotonic()
        with pytest.raises(kind, match=words) as caught:
            RemoteSource.connect(url)
        assert time.monotonic() - begin < 5
        check_sentence(caught.value, f"http://127.0.0.1:{server.server_port}/slide%20x.bin")

    def test_slow_bytes_are_given_up(self, quick, server, url):
        server.always = drip(0.1)
        begin = time.monotonic()
        with pytest.raises(SlideReadError, match="sends data too slowly"):
            RemoteSource.connect(url)
        assert time.monotonic() - begin < 5

    def test_bytes_that_become_slow_are_given_up(self, quick, server, source):
        server.always = drip(0.1)
        begin = time.monotonic()
        with pytest.raises(SlideReadError, match="sends data too slowly"):
            source.read([(30 * BLOCK, 5 * BLOCK)])
        assert time.monotonic() - begin < 5

    def test_bytes_that_become_slower_are_waited_for(self, quick, server, source):
        server.bandwidth = 16 * BLOCK  # per second
        assert bytes(source.read([(30 * BLOCK, 5 * BLOCK)])[0]) == at((30 * BLOCK, 5 * BLOCK))[0]

    def test_slow_headers_are_given_up(self, quick, server, url):
        server.always = drip_headers(0.1)
        for end in ("", SECRETS):
            begin = time.monotonic()
            with pytest.raises(SlideReadError, match="did not respond in time"):
                RemoteSource.connect(url + end)
            assert time.monotonic() - begin < 5

    def test_excess_bytes_are_not_cached(self, quick, server, url):
        server.always = send_more
        with pytest.raises(SlideReadError, match="keeps closing"):
            RemoteSource.connect(url)
        assert server.sent < 64 << 20

    def test_do_not_outlast_themselves(self, quick, server, source):
        server.always = status(500)
        wanted = [(20 * BLOCK, 5), (60 * BLOCK, 5), (100 * BLOCK, 5)]
        with pytest.raises(SlideReadError, match="internal error"):
            source.read(wanted)
        server.always = None
        for place in wanted:
            assert bytes(source.read([place])[0]) == at(place)[0]

    def test_of_a_server_without_ranges(self, server, url):
        server.ranges = False
        with pytest.raises(
            UnsupportedSlideError, match="does not support range requests"
        ) as caught:
            RemoteSource.connect(url + SECRETS)
        check_sentence(caught.value, url)
        assert server.sent < len(CONTENT) / 2

    def test_of_an_empty_file(self, server):
        with pytest.raises(NotASlideError, match="is empty"):
            RemoteSource.connect(server.url("empty.bin"))

    def test_of_no_server(self, quick):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}/x.svs"
            with pytest.raises(SlideReadError, match="refused the connection") as caught:
                RemoteSource.connect(url + SECRETS)
        check_sentence(caught.value, url)

    def test_of_an_unknown_host(self, quick):
        url = "https://no-such-host.invalid/certificate/x.svs"
        with pytest.raises(SlideReadError, match="can't be found") as caught:
            RemoteSource.connect(url + SECRETS)
        check_sentence(caught.value, url)

    @pytest.mark.parametrize(
        "url",
        ["http://", "https://user:SE/CRET@h/x", "http://[::1/x", "s3://", "s3:///SECRET?SECRET"],
    )
    def test_of_an_invalid_url(self, url):
        with pytest.raises(SlideNotFoundError, match="is not the URL of an object"):
            RemoteSource.connect(url)

    @pytest.mark.parametrize("url", ["ftp://user:SECRET@h/x.svs", "file:///x.svs", "memory://x"])
    def test_of_an_unknown_kind_of_url(self, url):
        with pytest.raises(UnsupportedSlideError, match="use https, s3") as caught:
            RemoteSource.connect(url)
        assert "SECRET" not in str(caught.value)

    def test_of_a_missing_package(self, monkeypatch, url):
        monkeypatch.setitem(sys.modules, "obstore.store", None)
        with pytest.raises(UnsupportedSlideError, match=r'pip install "napari-wsigpu\[remote\]"'):
            RemoteSource.connect(url)

    def test_of_a_bad_certificate(self, quick, folder, tmp_path):
        key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key,
                   "-out", certificate, "-days", "1", "-subj", "/CN=localhost"]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("openssl is not installed")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server = RangeServer(folder)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        with server, pytest.raises(SlideReadError, match="invalid certificate; contact") as caught:
            RemoteSource.connect(f"https://localhost:{server.server_port}/x.svs{SECRETS}")
        check_sentence(caught.value, f"https://localhost:{server.server_port}/x.svs")


def check_sentence(error, shown):
    """Check that an error is one sentence that names the file, and its chain contains no secret."""
    text = str(error)
    assert f"'{shown}'" in text
    assert text.endswith(".")
    assert "\n" not in text
    while error is not None:
        assert "SECRET" not in f"{error} {error!r}" or error.__suppress_context__
        assert error.__cause__ is None
        error = None if error.__suppress_context__ else error.__context__


class TestRedirects:
    """Redirects to another server, like those of links that expire after some minutes."""

    PLACE = (30 * BLOCK, 20 * BLOCK)

    @pytest.fixture
    def front(self, folder, url):
        with RangeServer(folder) as front:
            front.always = redirect(f"{url}?signature=one")
            yield front

    @pytest.mark.parametrize("query", ["", SECRETS])
    def test_tell_no_secret_to_the_other_server(self, server, front, query, leaves_no_thread):
        url = front.url("a é.svs").replace("//", "//user:SECRET@") + query
        source = RemoteSource.connect(url)
        assert bytes(source.read([self.PLACE])[0]) == at(self.PLACE)[0]
        source.close()
        assert server.requests
        assert {request.path for request in server.requests} == {"/slide%20x.bin?signature=one"}
        for request in server.requests:
            assert "SECRET" not in str(request)
            assert b64encode(b"user:SECRET").decode() not in str(request)
        for request in front.requests:
            assert request.headers["authorization"]

    @pytest.mark.parametrize("after", [1, 2, 4])
    def test_that_come_late_tell_no_secret(self, server, front, after, leaves_no_thread):
        sends_on, front.always = front.always, None
        (front.folder / "x.svs").write_bytes(CONTENT)
        url = front.url("x.svs").replace("//", "//user:SECRET@") + SECRETS
        source = RemoteSource.connect(url)
        places = [(block * BLOCK, 5) for block in range(10, 140, 30)]
        for number, place in enumerate(places):
            front.always = sends_on if number >= after else None
            assert bytes(source.read([place])[0]) == at(place)[0]
        source.close()
        assert server.requests
        for request in server.requests:
            assert "SECRET" not in str(request)
            assert "referer" not in request.headers
            assert b64encode(b"user:SECRET").decode() not in str(request)

    def test_expired_targets_are_requested_again(self, server, front, leaves_no_thread):
        source = RemoteSource.connect(front.url("x.svs") + SECRETS)
        server.troubles = [status(403)]
        assert bytes(source.read([self.PLACE])[0]) == at(self.PLACE)[0]
        assert len(front.requests) == 2
        server.always = status(403)
        with pytest.raises(SlidePermissionError) as caught:
            source.read([(100 * BLOCK, 5)])
        check_sentence(caught.value, front.url("x.svs"))
        source.close()

    @pytest.mark.parametrize(
        "target", ["/loop?x=1", "file:///etc/passwd", "http://[::1/x", "s3://b/k"]
    )
    def test_that_lead_nowhere(self, quick, front, target):
        front.always = redirect(target)
        with pytest.raises((SlideReadError, SlideNotFoundError)) as caught:
            RemoteSource.connect(front.url("x.svs") + SECRETS)
        check_sentence(caught.value, front.url("x.svs"))


@pytest.mark.parametrize("name", ["a é%41+&;=?#.bin", "%.bin", "ünï/ö.bin"])
def test_names_are_sent_as_they_are(server, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(CONTENT)
    server.folder = tmp_path
    for url in (server.url(quote(name)), server.url(quote(name, safe="/ é+&;=üïö"))):
        for query in ("", SECRETS):
            source = RemoteSource.connect(url + query)
            assert bytes(source.read([(30 * BLOCK, 9)])[0]) == at((30 * BLOCK, 9))[0]
            source.close()


def test_a_proxy_of_the_environment_is_used(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url(""))
    monkeypatch.setenv("HTTP_PROXY", server.url(""))
    for query in ("", SECRETS):
        source = RemoteSource.connect(f"http://slides.invalid/slide%20x.bin{query}")
        assert bytes(source.read([(30 * BLOCK, 9)])[0]) == at((30 * BLOCK, 9))[0]
        source.close()
    assert {request.headers["host"] for request in server.requests} == {"slides.invalid"}


class TestLifetime:
    def test_nothing_is_open_after_close(self, url, server, leaves_no_thread):
        before = len(psutil.Process().net_connections())
        source = RemoteSource.connect(url)
        source.read([(block * BLOCK, 5) for block in range(10, 140, 10)])
        assert server.sockets > 0
        source.close()
        source.close()
        wait_for(lambda: server.sockets == 0)
        wait_for(lambda: len(psutil.Process().net_connections()) <= before)
        with pytest.raises(SlideClosedError, match="was closed"):
            source.read([(0, 5)])

    def test_release_ends_with_the_next_read(self, url, server, leaves_no_thread):
        source = RemoteSource.connect(url)
        source.release()
        wait_for(lambda: server.sockets == 0)
        assert bytes(source.read([(30 * BLOCK, 5)])[0]) == at((30 * BLOCK, 5))[0]
        source.close()

    def test_close_cancels_reads(self, url, server, leaves_no_thread):
        source = RemoteSource.connect(url)
        server.latency = 3
        errors = []

        def read():
            try:
                source.read([(block * BLOCK, 5) for block in range(10, 140, 10)])
            except SlideClosedError as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        wait_for(lambda: len(server.requests) > 5)
        begin = time.monotonic()
        source.close()
        thread.join()
        assert time.monotonic() - begin < 2.5
        assert len(errors) == 1

    def test_release_cancels_new_requests(self, url, server, leaves_no_thread):
        server.latency = 1
        asking = connection.Connection(url)
        for _ in range(30):
            answers = [asking.get(0, 10) for _ in range(5)]
            asking.release()
            for answer in answers:
                with pytest.raises(CancelledError):
                    answer.result()
        asking.close()

    def test_a_failed_connect_leaves_no_thread(self, server, leaves_no_thread):
        with pytest.raises(SlideNotFoundError):
            RemoteSource.connect(server.url("missing.bin"))
        wait_for(lambda: server.sockets == 0)

    @pytest.mark.skipif(sys.platform != "linux", reason="this system does not fork")
    def test_forked_process_gets_an_error(self, source, url):
        code = f"""
import os, sys
from napari_wsigpu.errors import SlideReadError
from napari_wsigpu.storage.remote.remote_source import RemoteSource
source = RemoteSource.connect({url!r})
if os.fork() == 0:
    try:
        source.read([({40 * BLOCK}, 5)])
    except SlideReadError as error:
        os._exit(7 if "forked" in str(error) else 8)
    os._exit(9)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
        done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
        assert done.returncode == 7


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("address", "location", "expected"),
    [
        ("https://a.org/x?key=1", "https://b.org/y", "https://b.org/y"),
        ("http://a.org/x?key=1", "http://b.org/y", "http://b.org/y"),
        ("http://a.org/x?key=1", "https://b.org/y", "https://b.org/y"),
        ("https://a.org/x?key=1", "http://b.org/y", None),
        ("HTTPS://a.org/x?key=1", "http://b.org/y", None),
        ("https://a.org/x?key=1", "ftp://b.org/y", None),
    ],
)
def test_no_redirect_leaves_encryption(address, location, expected):
    answer = SimpleNamespace(status=302, headers={"Location": location})
    assert http_store._target(address, answer) == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("a.localhost", True),
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("0.0.0.0", True),
        ("169.254.169.254", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("fe80::1%eth0", True),
        ("10.1.2.3", False),
        ("93.184.216.34", False),
        ("host.org", False),
    ],
)
def test_local_addresses(address, expected):
    assert http_store.is_local_name(address) == expected


class TestLocalRedirects:
    """Redirects from another computer into this one."""

    @pytest.fixture
    def outside(self, server, monkeypatch):
        """The server inside; all names lead to it, but `outside.test` seems to be elsewhere."""
        aiohttp = pytest.importorskip("aiohttp")
        names = {"outside.test": "93.184.216.34", "inside.test": "127.0.0.1"}

        async def resolve(self, host, port=0, family=0):
            return [
                {
                    "hostname": host,
                    "host": "127.0.0.1" if host in names else host,
                    "port": port,
                    "family": socket.AF_INET,
                    "proto": 0,
                    "flags": 0,
                }
            ]

        check = http_store.HttpStore.check_address
        monkeypatch.setattr(
            http_store.HttpStore,
            "check_address",
            lambda self, host, address: check(self, host, names[host]),
        )
        monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
        return server

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "inside.test"])
    @pytest.mark.parametrize("query", ["", SECRETS])
    def test_are_refused(self, folder, url, outside, host, query, quick):
        with RangeServer(folder) as front:
            front.always = redirect(url.replace("127.0.0.1", host))
            asked = f"http://outside.test:{front.server_port}/x.svs"
            with pytest.raises(SlideReadError, match="to limits") as caught:
                RemoteSource.connect(asked + query)
            check_sentence(caught.value, asked)
        assert not outside.requests

    def test_are_followed_if_the_host_is_allowed(self, folder, url, outside, monkeypatch):
        monkeypatch.setattr(limits, "allow_hosts", frozenset({"inside.test"}))
        with RangeServer(folder) as front:
            front.always = redirect(url.replace("127.0.0.1", "inside.test"))
            RemoteSource.connect(f"http://outside.test:{front.server_port}/x.svs").close()
        assert outside.requests
