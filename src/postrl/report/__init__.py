"""A run, or several side by side, as one HTML file that opens offline."""

from postrl.report.page import write_report
from postrl.report.picture import write_picture

__all__ = ["write_picture", "write_report"]
