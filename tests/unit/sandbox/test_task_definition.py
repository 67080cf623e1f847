"""Which image a task is to run on, as its folder says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwengyre.core.errors import ConfigError
from qwengyre.images.config import SandboxConfig
from qwengyre.images.wanted import WantedImage
from qwengyre.sandbox.compose import read_compose
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.task import check_task, load_task
from qwengyre.sandbox.task_images import mistakes_with_images, with_images
from qwengyre.testing.images import layer, write_oci

TERMINAL_BENCH = """
services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [ "sh", "-c", "sleep infinity" ]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
      - MODE=strict
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
"""


def make(folder: Path, toml: str = "", **files: str) -> Path:
    contents = {"task.toml": toml, "instruction.md": "x", "tests/test.sh": "echo 1 > $VERIFIER_DIR/reward.txt\n"}
    contents |= {f"environment/{name.replace('_dot_', '.')}": text for name, text in files.items()}
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def wanted(folder: Path) -> WantedImage | None:
    return load_task(folder).wanted_image


def test_a_task_without_any_of_it_wants_none(tmp_path: Path):
    assert wanted(make(tmp_path / "t", data="x")) is None


def test_a_dockerfile_is_to_be_built(tmp_path: Path):
    folder = make(
        tmp_path / "t", "[environment]\nbuild_timeout_sec = 9.0\nworkdir = '/w'\n[agent]\nuser = 7\n", Dockerfile="FROM x\n"
    )
    found = wanted(folder)
    assert found is not None
    assert (found.reference, found.context, found.dockerfile) == ("", str(folder / "environment"), "Dockerfile")
    assert (found.build_timeout_s, found.workdir, found.user) == (9.0, "/w", "7")


def test_a_named_image_comes_first(tmp_path: Path):
    toml = '[environment]\ndocker_image = "example.org/a:1"\n'
    found = wanted(make(tmp_path / "t", toml, Dockerfile="FROM x\n"))
    assert found is not None
    assert found.reference == "example.org/a:1"
    assert found.context  # its environment/ is what that image was built of
    found = wanted(make(tmp_path / "u", toml, data="x"))
    assert found is not None
    assert not found.context


def test_the_compose_file_of_terminal_bench_is_its_dockerfile(tmp_path: Path):
    found = wanted(make(tmp_path / "t", **{"docker-compose_dot_yaml": TERMINAL_BENCH, "Dockerfile": "FROM x\n"}))
    assert found is not None
    assert (found.context, found.dockerfile, found.env) == (
        str(tmp_path / "t" / "environment"),
        "Dockerfile",
        (("MODE", "strict"),),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("services: {}", "names no services"),
        ("services: {a: 1}", "services.a: must be a table"),
        ("services: {a: {image: x}, b: {image: y}}", "several containers"),
        ("services: {a: {}}", "neither an image nor what to build"),
        ("services: {a: {image: x, privileged: true}}", "services.a.privileged: cannot be given"),
        ("services: {a: {image: x, ports: ['80:80']}}", "services.a.ports: cannot be given"),
        ("services: {a: {image: x, volumes: ['/etc:/host']}}", "services.a.volumes: cannot be given"),
        ("services: {a: {image: x, volumes: ['${HOME}:/host']}}", "services.a.volumes: cannot be given"),
        ("services: {a: {image: x, entrypoint: /run.sh}}", "services.a.entrypoint: cannot be given"),
        ("services: {a: {image: '${IMAGE}'}}", "quotes the environment"),
        ("services: {a: {build: ..}}", "only the task's own environment/"),
        ("services: {a: {build: {context: ., args: {A: 1}}}}", "services.a.build.args: is not known"),
        ("services: {a: {image: x, environment: {A: '${SECRET}'}}}", "quotes the environment"),
    ],
)
def test_what_cannot_be_given_is_refused_by_name(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        read_compose(text)


def test_an_image_that_cannot_be_had_is_an_error_unless_waived(tmp_path: Path):
    folder = make(tmp_path / "t", f'[environment]\ndocker_image = "oci:{tmp_path}/missing"\n')
    task, problems = check_task(folder)
    assert task is not None
    assert problems == []
    config = SandboxConfig(store=str(tmp_path / "store"))
    found, problems = with_images([task], config, lambda _: None)
    assert found == []
    assert [(one.file, one.severity) for one in problems] == [(str(folder / "task.toml"), "error")]
    assert "does not exist" in problems[0].message
    assert "--host-programs" in problems[0].message
    (waived,), problems = with_images([task], SandboxConfig(host_programs=True), lambda _: None)
    assert (waived.wanted_image, problems) == (None, [])


def test_one_image_for_all_tasks_that_name_none(tmp_path: Path):
    own, other = (write_oci(tmp_path / name, [layer((name, b""))]) for name in ("own", "other"))
    tasks = [
        load_task(make(tmp_path / "t", data="x")),
        load_task(make(tmp_path / "u", f'[environment]\ndocker_image = "oci:{own}"\n')),
    ]
    said: list[str] = []
    config = SandboxConfig(store=str(tmp_path / "store"), image=f"oci:{other}")
    found, problems = with_images([*tasks, *tasks], config, said.append)
    assert problems == []
    assert [task.image.name for task in found if task.image] == [f"oci:{other}", f"oci:{own}"] * 2
    assert len(said) == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"WorkingDir": "/tests/x"}, "WORKDIR is /tests/x, which is the sandbox's own"),
        ({"Entrypoint": ["/start.sh", "x"]}, r"ENTRYPOINT \(/start.sh x\) would not be run"),
        ({"User": "nobody"}, "not in its /etc/passwd"),
        ({"Env": ["A"]}, "is not a variable"),
    ],
)
def test_what_an_image_wants_and_cannot_have_is_named(tmp_path: Path, config: dict, message: str):
    import re

    oci = write_oci(tmp_path / "oci", [layer(("a", b""))], **config)
    task = load_task(make(tmp_path / "t"))
    _, (problem,) = with_images([task], SandboxConfig(store=str(tmp_path / "store"), image=f"oci:{oci}"), lambda _: None)
    assert re.search(message, problem.message)


@pytest.mark.parametrize(
    ("settings", "key"), [({"isolation": "none"}, "harness.isolation"), ({"warm_start": True}, "harness.warm_start")]
)
def test_a_harness_that_cannot_run_on_an_image_is_refused(tmp_path: Path, settings: dict, key: str):
    harness = HarnessConfig(command=("python", "-m", "x"), **settings)
    task = load_task(make(tmp_path / "t", Dockerfile="FROM x\n"))
    assert [mistake.key for mistake in mistakes_with_images([task], SandboxConfig(), harness)] == [key]
    assert list(mistakes_with_images([task], SandboxConfig(host_programs=True), harness)) == []
