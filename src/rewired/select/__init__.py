"""Which layers to rewire: measured layer by layer, and chosen within a budget."""

from .select import Candidate, Selection, SelectRequest, select

__all__ = ["Candidate", "SelectRequest", "Selection", "select"]
