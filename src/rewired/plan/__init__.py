"""`rewired plan`: what each wiring of a model would win on a machine that is not at hand. See docs/plan.md."""
