"""The leaderboard: what was measured as rows, columns and cells, and every form it takes."""
