"""`rewired bench`: what a wiring wins, measured on the machine at hand."""
