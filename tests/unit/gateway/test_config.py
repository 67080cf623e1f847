"""Where gateways are reached, and what of it contradicts itself."""

from __future__ import annotations

import pytest

from qwengyre.core.errors import ConfigError
from qwengyre.gateway.config import GatewayConfig, GatewayProcessConfig

PLACES = dict(model="m", journal="j", secret_file="s", control_socket="c", harness_socket="h")


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "http://127.0.0.1:8400"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:8400"),
        ({"host": "10.0.0.3"}, "http://10.0.0.3:8400"),
        ({"host": "fd00::3"}, "http://[fd00::3]:8400"),
        ({"tls_certificate": "c", "tls_key": "k"}, "https://127.0.0.1:8400"),
        ({"public_url": "https://g.example.org/qg/"}, "https://g.example.org/qg"),
        ({"public_url": "https://g.example.org:{port}", "processes": 2}, "https://g.example.org:8400"),
        ({"public_url": "https://g.example.org/{gateway}", "processes": 2}, "https://g.example.org/1"),
    ],
)
def test_an_execution_is_told_where_its_own_gateway_is(settings, url):
    assert GatewayConfig(**settings).url(1, 8400) == url


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"processes": 0}, "processes must be from 1 to 64"),
        ({"port": 65535, "processes": 2}, "room for one port of each"),
        ({"tls_key": "k"}, "tls_certificate and tls_key go together"),
        ({"public_url": "g.example.org"}, "public_url must be http"),
        ({"public_url": "https://g.example.org/{execution}"}, "no other places than {gateway} and {port}"),
        ({"public_url": "https://g.example.org", "processes": 2}, "public_url must name {gateway} or {port}"),
    ],
)
def test_what_contradicts_itself_is_refused(settings, wrong):
    with pytest.raises(ValueError, match=wrong):
        GatewayConfig(**settings)


def test_a_process_has_one_of_the_numbers_of_its_run():
    with pytest.raises(ValueError, match="number must be below"):
        GatewayProcessConfig(**PLACES, number=2, gateway=GatewayConfig(processes=2))


def test_a_gateway_without_a_port_has_no_address():
    assert GatewayConfig(public_url="https://g.example.org").url(0, None) == ""


@pytest.mark.parametrize("key", ["gateway.processes=2", "gateway.port=8400"])
def test_a_gateway_that_stands_alone_refuses_what_only_runs_have(key):
    from qwengyre.cli.gateway import read_settings

    with pytest.raises(ConfigError, match=key.partition("=")[0]):
        read_settings([key], "auto", 4096)
