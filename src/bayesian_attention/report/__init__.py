"""Tables and the HTML report of a comparison."""

from bayesian_attention.report.html import write_report
from bayesian_attention.report.summary import COLUMNS, Cell, markdown, summarise

__all__ = ["COLUMNS", "Cell", "markdown", "summarise", "write_report"]
