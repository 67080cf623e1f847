"""One cell: what it runs, its kinds of engine and trainer, and the ranks that it trains with."""
