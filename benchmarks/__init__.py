"""Speed and memory, side by side with the tools people would otherwise use: `make bench`."""
