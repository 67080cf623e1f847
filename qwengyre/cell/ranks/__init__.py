"""The ranks of a cell: processes that train on one shard each, and their rendezvous."""
