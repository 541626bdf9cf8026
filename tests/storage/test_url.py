import pickle

import pytest

from napari_wsigpu.model.layout import RemoteFile
from napari_wsigpu.storage.remote.url import file_name, is_supported, is_url, public_url


@pytest.mark.parametrize(
    "path", ["https://h/x.svs", "s3://b/k", "HTTP://h", "ftp://h/x", "gs://b/k"]
)
def test_urls(path):
    assert is_url(path)


@pytest.mark.parametrize(
    "path", ["x.svs", "/a/b.svs", "C:\\slides\\x.svs", "C:/x", "a:b", "", "://x"]
)
def test_paths(path):
    assert not is_url(path)
    assert not is_supported(path)
    assert public_url(path) == path


def test_supported_urls():
    assert all(map(is_supported, ["https://h/x", "HTTP://h", "s3://b/k", "gs://b/k", "az://c/k"]))
    assert not any(map(is_supported, ["ftp://h/x", "file:///x", "memory://x"]))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a/x.svs", "https://host/a/x.svs"),
        ("https://host:8080/x.svs?key=SECRET&b=1", "https://host:8080/x.svs"),
        ("https://host/x.svs#SECRET", "https://host/x.svs"),
        ("https://user:SECRET@host/x.svs", "https://host/x.svs"),
        ("https://SECRET@host:1/x@2.svs", "https://host:1/x@2.svs"),
        ("https://user:SEC@RET@host/x.svs", "https://host/x.svs"),
        ("https://user:SEC/RET@host/x.svs", "https://…"),
        ("https://user:SEC?RET@host/x.svs", "https://…"),
        ("https://user:SEC#RET@host/x.svs", "https://…"),
        ("https://[::1]:80/x.svs?SECRET", "https://[::1]:80/x.svs"),
        ("s3://bucket/a b.svs?versionId=SECRET", "s3://bucket/a b.svs"),
        ("s3://key:SECRET@bucket/x.svs", "s3://bucket/x.svs"),
        (
            "abfss://box@account.dfs.core.windows.net/x",
            "abfss://box@account.dfs.core.windows.net/x",
        ),
        ("https://host?SECRET", "https://host"),
    ],
)
def test_secrets_are_not_shown(url, shown):
    assert public_url(url) == shown
    assert public_url(shown.replace("…", "host")) == shown.replace("…", "host")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/a/b%20c.svs", "b%20c.svs"),
        ("https://host/a/b%20c.svs?x=/y", "b c.svs"),
        ("s3://bucket/x.svs/", "x.svs"),
    ],
)
def test_names(path, name):
    assert file_name(path) == name


def test_remote_file_shows_no_secret():
    file = RemoteFile("https://user:SECRET@host/x.svs?SECRET", "ETag 1")
    assert "SECRET" not in repr(file)
    assert pickle.loads(pickle.dumps(file)) == file
