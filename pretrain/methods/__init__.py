"""One file per method: the loss function above, the Method below, its Config beside it."""
