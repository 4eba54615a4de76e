"""Measurements: workloads, other engines, the roofline, the parts of a step's time, and the results so far.

`bench.py` beside this package is the command. The docstrings of the other commands here describe their measurements.
"""
