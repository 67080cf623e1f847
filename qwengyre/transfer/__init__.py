"""One-sided transfers of weight snapshots and KV blocks. Every carrier passes tests/contract/test_transfer.py."""
