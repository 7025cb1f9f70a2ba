"""Statistics of features: `backbench analyze`."""
