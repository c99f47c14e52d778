"""Recipes: their keys (`keys`), reading them from files (`reading`), and what is refused early (`checks`)."""
