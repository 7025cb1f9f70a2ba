"""A lab's own additions to backbench."""
