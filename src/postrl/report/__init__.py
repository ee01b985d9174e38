"""A run, or several side by side, as one HTML file that opens offline."""

from postrl.report.page import write_report

__all__ = ["write_report"]
