"""The trainer, its callbacks, schedule and checkpoints, and the manifest that says with what a run may be resumed."""
