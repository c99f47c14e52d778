"""How weights and gradients travel between the ranks of FSDP2: quantised, and across nodes as little as possible."""
