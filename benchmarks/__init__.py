"""Measuring: workloads, other engines, the roofline, where a step's time goes, and the results so far.

`bench.py` beside this package is the command. The other commands here say in their docstrings what they measure.
"""
