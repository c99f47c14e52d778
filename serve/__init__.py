"""Running rewired models. Imports `rewired` only."""
