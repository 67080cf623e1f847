"""Engines turn token ids into token ids. `api` is the contract; every engine passes tests/contract/test_engines.py."""
