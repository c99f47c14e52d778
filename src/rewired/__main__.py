"""`python -m rewired COMMAND`."""

from .scripts import rewired

rewired()
