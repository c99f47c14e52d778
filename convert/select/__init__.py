"""Which layers to rewire: measured layer by layer, and chosen within a budget."""

from .picker import Candidate
from .select import Selection, SelectRequest, select

__all__ = ["Candidate", "SelectRequest", "Selection", "select"]
