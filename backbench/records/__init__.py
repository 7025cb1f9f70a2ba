"""What a run has measured: lines of results, predictions and scores, keys of columns."""
