"""Selection of the layers to rewire: measured layer by layer, and chosen within a budget."""
