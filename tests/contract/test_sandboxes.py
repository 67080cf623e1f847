"""What every kind of sandbox keeps to: on the programs of this machine, and on an image."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from qwengyre.core.records import End, Outcome, Validity
from qwengyre.images.config import SandboxConfig
from qwengyre.images.image import Image
from qwengyre.images.store import ImageStore
from qwengyre.images.wanted import WantedImage
from qwengyre.rpc.server import RpcServer, Service
from qwengyre.runtime.hosts import LiveHost
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.harness import GatewayAddress
from qwengyre.sandbox.host_process import HarnessHost
from qwengyre.sandbox.host_wire import HostSpec
from qwengyre.sandbox.task import Task
from qwengyre.testing.harbor_kit import HarborKit
from qwengyre.testing.images import layer_of_folder, small_root, write_oci
from qwengyre.testing.sandbox_kit import SCORE_HELLO, Kit, processes_with, report, wait_for_the_end_of

KINDS = ("host", "image", "remote")
"""On the programs of this machine, on an image, and on this machine's programs by way of a harness host."""
EVERY_KIND = (*KINDS, "harbor")
"""With Harbor, whose environments have their own walls: what is asked of those is left out."""
FAKE_HARBOR = Path(__file__).parents[1] / "fake_harbor"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """A few programs and their libraries: no Python, no certificates, nothing else of this machine."""
    folder = tmp_path_factory.mktemp("image")
    root = small_root(folder / "root")
    (root / "app" / "part.txt").write_text("of the image")
    layers = [layer_of_folder(root)]
    environment = ["PATH=/usr/bin:/bin", "PYTHONHOME=/opt/other", "OF_IMAGE=1"]
    oci = write_oci(folder / "oci", layers, WorkingDir="/app", Env=environment)
    return ImageStore(SandboxConfig(store=str(folder / "store"))).get(WantedImage(f"oci:{oci}"))


class KitOnHost(Kit):
    """Runs what the tests run through the wire of a harness host, which is in this process."""

    @contextlib.asynccontextmanager
    async def runs(self, config: HarnessConfig, gateway: GatewayAddress) -> AsyncIterator[LiveHost]:
        socket = f"{gateway.socket}.host"
        async with super().runs(config, gateway) as launcher:
            harness_host = HarnessHost(launcher)
            server = RpcServer(None, lambda: Service(harness_host.handlers()))
            await server.listen(f"unix:{socket}")
            live = LiveHost("host-0", HostSpec(config, (), "", "", socket, ""))
            try:
                yield live
            finally:
                live.client.close()
                await server.close()
                await harness_host.close()


class Bench:
    """Runs Python of a test as a harness in one kind of sandbox."""

    def __init__(self, kit: Kit, image: Image | None):
        self.kit, self.image = kit, image
        self.workspace = image.workdir if image else "/workspace"

    def task(self, code: str, test_sh: str = SCORE_HELLO, **settings: str) -> Task:
        return msgspec.structs.replace(self.kit.task(code, test_sh, **settings), image=self.image)

    def run(self, code: str, test_sh: str = SCORE_HELLO, config: HarnessConfig | None = None, **settings: str) -> Outcome:
        return self.kit.run(self.task(code, test_sh, **settings), config)

    def found(self, code: str, config: HarnessConfig | None = None) -> dict:
        outcome = self.run(report(code), config=config)
        [place] = (self.kit.folder / "failed" / "e000001-0.0").rglob("found.json") or [None]
        assert place is not None, outcome.detail
        return msgspec.json.decode(place.read_bytes())


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return make_bench(request, tmp_path)


@pytest.fixture(params=EVERY_KIND)
def any_bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return make_bench(request, tmp_path)


def make_bench(request: pytest.FixtureRequest, folder: Path) -> Bench:
    match request.param:
        case "remote":
            return Bench(KitOnHost(folder), None)
        case "harbor":
            return Bench(HarborKit(folder, FAKE_HARBOR), None)
    return Bench(Kit(folder), request.getfixturevalue("image") if request.param == "image" else None)


def test_a_harness_starts_in_its_workspace_with_its_model(bench: Bench):
    found = bench.found("""
        import os, urllib.request
        answer = urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/echo", b"said").read().decode()
        found = {"cwd": os.getcwd(), "pwd": os.environ["PWD"], "data": open("data.txt").read(), "answer": answer, "pid": os.getppid()}
    """)
    assert found == {"cwd": bench.workspace, "pwd": bench.workspace, "data": "data\n", "answer": "said", "pid": 1}


def test_partial_work_has_its_score(any_bench: Bench):
    outcome = any_bench.run("open('hello', 'w').write('x')")
    assert (outcome.end, outcome.validity, outcome.score) == (End.EXITED, Validity.VALID, 0.75), outcome.detail


@pytest.mark.parametrize(
    ("code", "end", "exit_code"),
    [
        ("raise SystemExit(7)", End.CRASHED, 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", End.CRASHED, 137),
        ("import time; open('hello', 'w'); time.sleep(3600)", End.HARNESS_TIMEOUT, None),
    ],
)
def test_ends(any_bench: Bench, code: str, end: End, exit_code: int | None):
    outcome = any_bench.run(code, config=any_bench.kit.config(timeout_s=20.0 if end is End.HARNESS_TIMEOUT else None))
    assert (outcome.end, outcome.validity) == (end, Validity.VALID), outcome.detail
    if not isinstance(any_bench.kit, HarborKit):  # which says it in words only
        assert outcome.exit_code == exit_code
    assert outcome.score == (0.75 if end is End.HARNESS_TIMEOUT else 0.0)


def test_a_harness_that_calls_no_model_is_dropped(any_bench: Bench):
    outcome = any_bench.kit.run(any_bench.task("open('hello', 'w')"), num_calls=0)
    assert (outcome.end, outcome.validity) == (End.NEVER_CALLED, Validity.DROPPED)


def test_nothing_outlives_it(any_bench: Bench):
    sleep = any_bench.kit.sleep
    code = f"import subprocess; subprocess.Popen('{sleep}'.split(), start_new_session=True); open('hello', 'w')"
    assert any_bench.run(code).score == 0.75
    wait_for_the_end_of(sleep)
    assert processes_with(sleep) == []


def test_it_is_scored_by_programs_that_it_could_not_change_in_a_fresh_place(bench: Bench):
    code = """
open("hello", "w").write("x")
for path in ("/bin/cat", "/bin/bash", "/usr/bin/new", "/tmp/left", "/etc/profile"):
    try:
        with open(path, "w") as file:
            file.write("spoiled")
    except OSError:
        pass
"""
    test = """for left in /usr/bin/new /tmp/left /etc/profile; do
  if [ -e $left ]; then read -r text < $left; [ "$text" = spoiled ] && exit 1; fi
done
[ "$(cat hello)" = x ] && echo 0.5 > "$VERIFIER_DIR/reward.txt"
"""
    outcome = bench.run(code, test)
    assert (outcome.score, outcome.end) == (0.5, End.EXITED), outcome.detail


def test_nothing_of_the_tests_is_seen_by_the_harness(any_bench: Bench):
    found = any_bench.found("""
        import os
        names = ("/tests", "/logs/verifier", "/logs/verifier/reward.txt", "../tests")
        found = {name: os.path.exists(name) and os.listdir(name) for name in names if os.path.exists(name)}
    """)
    assert found == {}


def test_a_link_to_the_tests_is_not_scored(bench: Bench):
    test = 'if [ "$(cat hello)" = secret ]; then echo 1; else echo 0; fi > "$VERIFIER_DIR/reward.txt"\n'
    code = "import os\nos.symlink('/tests/expected', 'hello')\nos.symlink('/app/../tests/expected', 'other')"
    outcome = bench.run(code, test, files={"tests/expected": "secret"})
    assert (outcome.score, outcome.validity) == (0.0, Validity.VALID), outcome.detail


def test_no_network_but_the_gateway(bench: Bench):
    found = bench.found("""
        import os, socket
        def reaches(*address):
            with socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET) as one:
                one.settimeout(5)
                return one.connect_ex(address) == 0
        interfaces = [name for _, name in socket.if_nameindex()]
        others = [reaches("127.0.0.1", port) for port in (22, 80, 8080)] + [reaches("10.0.0.1", 80), reaches("1.1.1.1", 53)]
        found = {"interfaces": interfaces, "gateway": reaches("127.0.0.1", 8377), "others": others}
    """)
    assert found == {"interfaces": ["lo"], "gateway": True, "others": [False] * 5}


def test_no_power(bench: Bench):
    found = bench.found("""
        import os
        status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
        def refused(call, *arguments):
            try:
                call(*arguments)
            except OSError:
                return True
        found = {key: int(status[key], 16) for key in ("CapInh", "CapPrm", "CapEff", "CapAmb")}
        found |= {key: status[key] for key in ("NoNewPrivs", "Seccomp")}
        found["refused"] = [refused(os.mknod, "disk", 0o60600, 0), refused(os.chroot, "/"), refused(os.setuid, 12345)]
        found["refused"].append(refused(open, "/proc/sys/kernel/hostname", "w"))
    """)
    expected: dict = dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapAmb"), 0)
    assert found == expected | {"NoNewPrivs": "1", "Seccomp": "2", "refused": [True] * 4}


def test_memory_and_disk_are_bounded(bench: Bench):
    config = bench.kit.config(limits={"memory_mb": 64, "disk_mb": 8, "best_effort": True})
    outcome = bench.run("x = bytearray(200_000_000); x[::4096] = b'x' * len(x[::4096]); open('hello', 'w')", config=config)
    assert (outcome.end, outcome.validity, outcome.score) == (End.CRASHED, Validity.VALID, 0.0), outcome.detail
    outcome = bench.run("open('hello', 'w').write('x' * 20_000_000)", config=config)
    assert outcome.end is End.CRASHED, outcome.detail


def test_what_is_written_elsewhere_is_bounded_and_gone(bench: Bench):
    config = bench.kit.config(limits={"scratch_mb": 8, "best_effort": True})
    found = bench.found(
        """
        import os
        written = 0
        try:
            with open("/tmp/much", "wb", buffering=0) as file:
                while written < 64 << 20:
                    written += file.write(bytes(1 << 20))
        except OSError as error:
            found = {"errno": error.errno, "written": written}
        os.unlink("/tmp/much")
        """,
        config,
    )
    assert found["errno"] == 28
    assert 4 << 20 <= found["written"] <= 8 << 20


def test_the_evaluator_is_process_1_and_has_no_network(bench: Bench):
    test = f"""{bench.kit.sleep} &
kill -9 -1
[ $$ = 1 ] && [ "$(cat hello)" = x ] && ! (exec 3<>/dev/tcp/127.0.0.1/8377) 2>/dev/null && echo 0.5 > "$VERIFIER_DIR/reward.txt"
"""
    outcome = bench.run("open('hello', 'w').write('x')", test)
    assert outcome.score == 0.5, outcome.detail


def test_an_evaluator_that_does_not_end_is_ended(any_bench: Bench):
    sleep = any_bench.kit.sleep
    outcome = any_bench.run("pass", f"{sleep} & {sleep}", any_bench.kit.config(verifier_timeout_s=1.0, evaluator_tries=1))
    assert (outcome.end, outcome.validity) == (End.EVALUATOR_FAILED, Validity.DROPPED), outcome.detail
    assert "did not end within 1 s" in outcome.detail or "VerifierTimeoutError" in outcome.detail
    wait_for_the_end_of(sleep)


def test_nothing_is_left_on_this_machine(bench: Bench):
    before = Path("/proc/self/mountinfo").read_text()
    bench.run("open('hello', 'w')")
    assert Path("/proc/self/mountinfo").read_text() == before
    assert sorted(path.name for path in (bench.kit.folder / "work").iterdir()) == ["etc", "root"]
    assert list((bench.kit.folder / "work" / "root").iterdir()) == []


class TestOnAnImage:
    """What only an image has."""

    @pytest.fixture
    def bench(self, tmp_path: Path, image: Image) -> Bench:
        return Bench(Kit(tmp_path), image)

    def test_its_files_variables_and_user_are_there_and_no_others(self, bench: Bench):
        found = bench.found("""
            import os
            found = {"user": [os.getuid(), os.getgid()], "home": os.environ["HOME"], "path": os.environ["PATH"]}
            found |= {"variable": os.environ["OF_IMAGE"], "part": open("/app/part.txt").read(), "same": os.path.samefile("/app", "/workspace")}
            found["not there"] = [name for name in ("/usr/bin/python3", "/bin/grep", "/opt", "/home", "/var") if os.path.exists(name)]
            owners = {os.stat(name).st_uid for name in ("/", "/bin", "/bin/bash", "/root", "/app", "/app/part.txt")}
            found["owners"] = sorted(owners)
        """)
        assert found == {
            "user": [0, 0],
            "home": "/root",
            "path": "/usr/bin:/bin",
            "variable": "1",
            "part": "of the image",
            "same": True,
            "not there": [],
            "owners": [0],
        }

    def test_a_harness_may_change_its_system_and_the_image_stays(self, bench: Bench):
        def listed() -> dict[str, tuple[int, float]]:
            found = {}
            for path in Path(bench.image.root).rglob("*"):
                status = path.lstat()
                found[str(path)] = (status.st_mode, status.st_mtime)
            return found

        before = listed()
        found = bench.found("""
            import os, subprocess
            open("/usr/bin/mine", "w").write("#!/bin/bash\\necho made\\n")
            os.chmod("/usr/bin/mine", 0o755)
            os.remove("/bin/ls")
            os.rename("/etc/group", "/etc/group.old")
            os.chmod("/bin/cat", 0o700)
            os.mkdir("/opt")
            found = {"said": subprocess.run(["mine"], capture_output=True, text=True).stdout}
        """)
        assert found == {"said": "made\n"}
        assert listed() == before

    def test_another_user(self, bench: Bench):
        user = msgspec.structs.replace(bench.image.user, name="worker", uid=4711, gid=4712, home="/home/worker")
        bench.image = msgspec.structs.replace(bench.image, user=user)
        found = bench.found("""
            import os, subprocess
            said = subprocess.run(["id"], capture_output=True, text=True).stdout
            found = {"id": said.split(" groups")[0], "home": os.environ["HOME"], "user": os.environ["USER"], "there": os.path.isdir(os.environ["HOME"])}
        """)
        assert found == {"id": "uid=4711(worker) gid=4712(worker)", "home": "/home/worker", "user": "worker", "there": True}

    def test_a_link_to_its_programs_is_scored(self, bench: Bench):
        outcome = bench.run("import os; os.symlink('/bin/bash', 'hello')")
        assert outcome.score == 0.75, outcome.detail

    @pytest.mark.parametrize("name", ["tests", "logs", "run", "etc", "app", "proc"])
    def test_a_link_where_something_is_mounted_is_refused(self, tmp_path: Path, name: str):
        root = small_root(tmp_path / "r")
        place = root / name
        if place.exists():
            place.rename(root / f"{name}.real")
        place.symlink_to(tmp_path)
        oci = write_oci(tmp_path / "oci", [layer_of_folder(root)], WorkingDir="/app")
        image = ImageStore(SandboxConfig(store=str(tmp_path / "store"))).get(WantedImage(f"oci:{oci}"))
        before = sorted(os.listdir(tmp_path))
        outcome = Bench(Kit(tmp_path), image).run("open('hello', 'w')")
        assert outcome.validity is Validity.PLACEHOLDER, outcome
        assert f"/{name} is a link" in outcome.detail or "Not a directory" in outcome.detail
        assert set(os.listdir(tmp_path)) - set(before) <= {"modules", "tasks", "gateway", "work", "failed"}

    def test_an_image_without_bash_is_refused(self, tmp_path: Path):
        oci = write_oci(tmp_path / "oci", [layer_of_folder(small_root(tmp_path / "r", ["cat"]))])
        image = ImageStore(SandboxConfig(store=str(tmp_path / "store"))).get(WantedImage(f"oci:{oci}"))
        outcome = Bench(Kit(tmp_path), image).run("open('hello', 'w')")
        assert (outcome.end, outcome.validity) == (End.SETUP_FAILED, Validity.PLACEHOLDER)
        assert "has no /bin/bash" in outcome.detail
