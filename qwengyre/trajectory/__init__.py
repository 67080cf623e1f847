"""The trajectory processor: calls become a tree, a tree becomes a bounded choice of deduplicated trajectories. Pure."""
