"""One scheduler for many ranks: rank 0 decides, and all launch the same work in the same order."""
