"""Statistics on arrays of numbers: intervals, paired tests, ranks. Nothing here knows of vision."""
