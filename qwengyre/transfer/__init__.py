"""Snapshots and KV blocks between processes: expose, read one-sidedly, confirm, release. See docs/transfer.md."""
