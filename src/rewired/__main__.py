"""`python -m rewired COMMAND`."""

from .cli import main

main()
