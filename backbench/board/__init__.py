"""The leaderboard: rows, columns and cells of what was measured, and every form it is written in."""
