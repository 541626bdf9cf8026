"""A pipeline that is killed resumes from its last state, and neither repeats nor loses patches."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.datasets.epoch import lines_of, patches_of

MODULE, RANKS, FIRST = "tests.datasets.epoch", 2, 3


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="processes are not killed so here")
@pytest.mark.parametrize(
    ("kind", "needs"), [("arrays", "numpy"), ("stream", "torch"), ("workers", "torchdata")]
)
def test_killed(two_slides, tmp_path, kind, needs):
    if find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    logs = [tmp_path / f"{rank}.jsonl" for rank in range(RANKS)]

    def run():
        return [
            subprocess.Popen(
                [sys.executable, "-m", MODULE, kind, str(rank), str(RANKS), str(log), *two_slides],
                cwd=Path(__file__).parents[2],
                start_new_session=True,
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank, log in enumerate(logs)
        ]

    def noted():
        return [index for log in logs for line in lines_of(log) for index in line["indices"]]

    everything = list(range(len(patches_of(two_slides))))
    processes = run()
    try:
        until = time.monotonic() + 120
        while any(len(lines_of(log)) < FIRST for log in logs) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
    before = noted()
    assert RANKS * FIRST <= len(before) < len(everything)
    for process in run():
        assert process.wait(120) == 0
    assert sorted(noted()) == everything
