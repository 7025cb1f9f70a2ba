"""From images to features: batches of views, frozen trunks, the cache."""
