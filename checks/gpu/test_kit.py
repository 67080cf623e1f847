"""The kit in a bare box: unpacked, installed without a network, and one of its checks run there on the processor.

`QWENGYRE_BOX_PYTHON` is a Python that has torch, transformers, pip and what these need, and nothing else; `QWENGYRE_GPU_KIT` is what
`make gpu-kit` packed. Without them there is no box to try.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from checks.gpu.kit import MOST_BYTES, NAME

BOX, KIT = os.environ.get("QWENGYRE_BOX_PYTHON", ""), os.environ.get("QWENGYRE_GPU_KIT", "")
CHECKS = os.environ.get("QWENGYRE_BOX_CHECKS", "checks/gpu/test_cells.py").split()
OFFLINE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
"""No network but the loopback interface."""


@pytest.mark.skipif(not (BOX and KIT), reason="QWENGYRE_BOX_PYTHON and QWENGYRE_GPU_KIT name a bare box and a kit")
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can take the network away")
def test_the_kit_installs_without_a_network_and_runs_in_a_bare_box(tmp_path: Path):
    assert Path(KIT).stat().st_size <= MOST_BYTES
    with tarfile.open(KIT) as archive:
        archive.extractall(tmp_path, filter="data")
    run = [BOX, "-m", "checks.gpu.run", "--device", "cpu", "--out", str(tmp_path / "out"), *CHECKS]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*OFFLINE, *run], cwd=tmp_path / NAME, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    if any(check != "bench" for check in CHECKS):
        report = json.loads((tmp_path / "out" / "gpu-report.json").read_text())
        assert report["device"] == "processor" and len(report) > 2, "figures of a check"
