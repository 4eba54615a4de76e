"""The same step on several devices: the ranks' processes and their messages."""
