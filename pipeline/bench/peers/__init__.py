"""Drivers of other engines. They run in those engines' own environments and import nothing of this package.

`serve.py` is started as a program with a driver's name and a task file; the driver is a module next to it. The
drivers' docstrings say whether they were ever run against the real thing.
"""
