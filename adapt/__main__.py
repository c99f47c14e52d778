"""For launchers: `torchrun -m rewired.adapt RECIPE`, `accelerate launch -m rewired.adapt RECIPE`."""

from .cli import main

main()
