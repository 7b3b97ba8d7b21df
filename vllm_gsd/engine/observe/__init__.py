"""What is measured and reported: costs, statistics, metrics."""
