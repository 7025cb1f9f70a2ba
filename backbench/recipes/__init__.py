"""Recipes: how their files are read, and the facts that several programs ask of them."""
