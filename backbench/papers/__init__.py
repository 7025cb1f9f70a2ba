"""The papers' printed numbers: which are judged and how, which grid measures them, and their tables."""
