"""Images: read from folders and archives, made into views, brought to what a trunk expects."""
