"""Code that several test modules share: it makes models, requests and faults, and compares results."""
