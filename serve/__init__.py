"""Running rewired models: `rewired generate`."""
