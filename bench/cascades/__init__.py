"""``python -m bench.cascades``: quality against cost of every target law, on tasks with a ground truth."""
