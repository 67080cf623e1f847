"""What processes of a run say to one another, and how a child is started and ends with its parent."""
