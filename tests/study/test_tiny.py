"""Figures over a training; the rest of the module is tested through the studies that use it (test_rewriting)."""

import math

from postrl.study.tiny import course, mean_of

LINES = [{"step": 1, "clip": 0.1}, {"step": 2}, {"step": 3, "clip": 0.5}]


def test_steps_without_a_figure_count_for_nothing():
    assert mean_of(LINES, "clip") == 0.3
    assert math.isnan(mean_of(LINES, "spread")) and math.isnan(mean_of([], "clip"))
    found = course(LINES, "clip", "clipped")
    assert (found.name, found.x, found.y) == ("clipped", (1.0, 3.0), (0.1, 0.5))
