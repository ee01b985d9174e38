"""postrl: reinforcement-learning post-training methods for language models on one small, exact kernel."""

__version__ = "0.1.0"
