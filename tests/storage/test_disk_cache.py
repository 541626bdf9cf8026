import multiprocessing
import os
import threading

import pytest

from napari_wsigpu.storage.remote import disk_cache as module
from napari_wsigpu.storage.remote.disk_cache import HEAD, SECRET, DiskCache, disk_cache

BLOCK = 1000
ENTRY = BLOCK + HEAD.size


def content(number):
    return number.to_bytes(4, "little") * (BLOCK // 4)


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "blocks", 10 * ENTRY)


def files(cache):
    found = (path for path in cache.folder.rglob("*") if path.is_file())
    return sorted(path for path in found if path.name != SECRET)


def used(cache):
    return sum(path.stat().st_size for path in files(cache))


def age(cache, *numbers):
    """Set the times of last use to the distant past, oldest first."""
    for second, number in enumerate(numbers):
        os.utime(cache.folder / "key" / str(number), (second, second))


def test_put_and_get(cache):
    cache.put("key", 3, content(3))
    cache.put("key", 4, memoryview(content(4)))
    assert (cache.get("key", 3), cache.get("key", 4)) == (content(3), content(4))
    assert cache.get("key", 5) is None
    assert cache.get("other", 3) is None
    again = DiskCache(cache.folder, cache.budget)
    assert again.get("key", 3) == content(3)


def test_is_the_owners_only(cache):
    cache.put("key", 0, content(0))
    assert (cache.folder / "key").stat().st_mode & 0o77 == 0


def test_blocks_are_bound_to_name_number_and_owner(cache, tmp_path):
    cache.put("key", 0, content(0))
    sealed = (cache.folder / "key" / "0").read_bytes()
    cache.put("other", 0, content(1))
    for key, block in (("key", 1), ("other", 0)):
        path = cache.folder / key / str(block)
        path.unlink(missing_ok=True)
        path.write_bytes(sealed)
        assert cache.get(key, block) is None
    strange = DiskCache(tmp_path / "strange", cache.budget)
    strange.put("key", 0, content(2))
    (strange.folder / "key" / "0").replace(cache.folder / "key" / "0")
    assert cache.get("key", 0) is None


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links are followed on this system")
def test_links_and_pipes_are_not_followed(cache, tmp_path):
    cache.put("key", 0, content(0))
    path = cache.folder / "key" / "0"
    path.replace(tmp_path / "0")
    path.symlink_to(tmp_path / "0")
    assert cache.get("key", 0) is None
    cache.put("key", 0, content(0))
    assert cache.get("key", 0) == content(0)
    path.unlink()
    os.mkfifo(path)
    assert cache.get("key", 0) is None
    (tmp_path / "elsewhere").mkdir()
    (cache.folder / "link").symlink_to(tmp_path / "elsewhere")
    cache.put("link", 0, content(0))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_least_recently_used_blocks_are_evicted(cache):
    for number in range(10):
        cache.put("key", number, content(number))
    age(cache, *range(10))
    assert cache.get("key", 0) == content(0)  # now the most recently used
    cache.put("key", 10, content(10))
    assert used(cache) <= cache.budget
    assert cache.get("key", 1) is None
    assert [cache.get("key", number) for number in (0, 9, 10)] == [
        content(0),
        content(9),
        content(10),
    ]


def test_budget_includes_blocks_of_other_processes(cache):
    other = DiskCache(cache.folder, cache.budget)
    for number in range(40):
        cache.put("key", number, content(number))
        other.put("other", number, content(number))
    # Each measures the files of the other after writing a sixteenth of the budget.
    assert used(cache) <= cache.budget + 2 * ENTRY


def test_a_smaller_budget_counts_from_the_next_block_on(cache):
    for number in range(8):
        cache.put("key", number, content(number))
    cache.budget = 3 * ENTRY
    cache.put("key", 8, content(8))
    assert used(cache) <= cache.budget
    assert cache.get("key", 8) == content(8)


def test_budget_of_zero_disables_the_cache(tmp_path):
    cache = DiskCache(tmp_path / "blocks", 0)
    cache.put("key", 0, content(0))
    assert cache.get("key", 0) is None
    assert not cache.folder.exists()


def test_block_beyond_the_budget_is_not_cached(cache):
    cache.put("key", 0, bytes(cache.budget))
    assert files(cache) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"),
    ],
)
def test_damaged_block_counts_as_missing(cache, damage):
    cache.put("key", 0, content(1))
    [path] = files(cache)
    damage(path)
    assert cache.get("key", 0) is None
    assert files(cache) == []
    cache.put("key", 0, content(1))
    assert cache.get("key", 0) == content(1)


def test_read_only_folder_is_reported_once(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    cache = DiskCache(tmp_path / "file" / "blocks", 1 << 20)
    for number in range(3):
        cache.put("key", number, content(number))
        assert cache.get("key", number) is None
    assert len(caplog.records) == 1
    assert "can't be cached" in caplog.text


def test_clear(cache):
    for number in range(3):
        cache.put("key", number, content(number))
    cache.clear()
    assert files(cache) == []
    cache.put("key", 1, content(1))
    assert cache.get("key", 1) == content(1)


def hammer(folder, seed, rounds=300):
    cache = DiskCache(folder, 10 * ENTRY)
    for i in range(rounds):
        number = (i * 7 + seed) % 25
        found = cache.get("key", number)
        assert found in (None, content(number))
        cache.put("key", number, content(number))


def test_many_processes_and_threads(cache):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=hammer, args=(cache.folder, seed)) for seed in range(2)]
    threads = [threading.Thread(target=hammer, args=(cache.folder, 10 + i)) for i in range(3)]
    for worker in (*processes, *threads):
        worker.start()
    for worker in (*processes, *threads):
        worker.join()
    assert [process.exitcode for process in processes] == [0, 0]
    cache.put("key", 99, content(99))
    assert all(path.suffix == "" for path in files(cache))


@pytest.mark.parametrize(
    ("given", "budget", "warnings"),
    [
        (None, module.DEFAULT_BUDGET, 0),
        ("1e9", 10**9, 0),
        ("0", 0, 0),
        ("plenty", module.DEFAULT_BUDGET, 1),
        ("2GB", module.DEFAULT_BUDGET, 1),
        ("-5", module.DEFAULT_BUDGET, 1),
        ("", module.DEFAULT_BUDGET, 0),
        ("inf", module.DEFAULT_BUDGET, 1),
        ("nan", module.DEFAULT_BUDGET, 1),
    ],
)
def test_the_environment_sets_budget_and_folder(
    monkeypatch, tmp_path, caplog, given, budget, warnings
):
    if given is None:
        monkeypatch.delenv(module.BUDGET, raising=False)
    else:
        monkeypatch.setenv(module.BUDGET, given)
    monkeypatch.setenv(module.FOLDER, str(tmp_path))
    disk_cache.cache_clear()
    try:
        assert (disk_cache().folder, disk_cache().budget) == (tmp_path, budget)
        assert disk_cache() is disk_cache()
        said = [
            f"WSIGPU_DISK_CACHE_BYTES is '{given}', but must be a number of bytes such as 2e9; "
            "the disk cache is limited to 2.147 GB."
        ]
        assert caplog.messages == said * warnings
        monkeypatch.delenv(module.FOLDER)
        disk_cache.cache_clear()
        assert "napari-wsigpu" in str(disk_cache().folder)
    finally:
        disk_cache.cache_clear()
