"""One module per side of a comparison; each runs in a process of its own (see channel.py)."""
