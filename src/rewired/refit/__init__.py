"""Closed-form refit: a rewired checkpoint's weights, rewritten by least squares so that they fit what they now read."""
