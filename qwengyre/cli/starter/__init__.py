"""What `qwengyre init` copies: an agent to change, and tasks."""
