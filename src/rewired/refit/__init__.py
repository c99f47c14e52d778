"""Closed-form refit: a rewired checkpoint's weights, rewritten by least squares so that they fit what they now read."""

from .fitting import Errors, Fit
from .run import Outcome, refit

__all__ = ["Errors", "Fit", "Outcome", "refit"]
