"""For launchers: `torchrun -m rewired.adapt RECIPE`, `accelerate launch -m rewired.adapt RECIPE`."""

from rewired.scripts import adapt

adapt()
