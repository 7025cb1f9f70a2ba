"""The methods, a file each: the loss as a function, then its Config, then the Method."""
