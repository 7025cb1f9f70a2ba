"""The papers' printed tables and figures: which grid makes each, and how far it is."""
