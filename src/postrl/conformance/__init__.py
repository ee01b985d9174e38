"""The same answers through our loop and through other trainers: which methods fit, and whether the numbers agree."""
