"""Names of environments. Neither is one of Harbor's that this Harbor has."""

from enum import StrEnum


class EnvironmentType(StrEnum):
    DOCKER = "docker"
    PODMAN = "podman"
