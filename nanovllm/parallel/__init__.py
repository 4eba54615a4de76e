"""Processes that compute for this one: the ranks of one model, and replicas of it."""
