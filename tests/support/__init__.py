"""What several test modules share: makers of models, requests and faults, and the comparisons."""
