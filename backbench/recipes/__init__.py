"""Recipes: how their files are read, and the facts that several programs ask of them.

config     finds and reads a recipe, checks its types, writes it out again
fast       what `pretrain --fast` changes in a recipe
own_probe  which linear probe belongs to a method
"""
