"""The trainer, its callbacks, its checkpoints, and the manifest that says with what a run may be resumed."""
