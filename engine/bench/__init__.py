"""Measurements on the user's own machine: they return data, the app prints them.

`measure.py` times figures side by side, `weights.py` makes weights of a real model's size, and every other module is
one benchmark.
"""
