"""Drivers of other engines. They run in those engines' own environments and import nothing from this package.

`serve.py` runs as a script with the name of a driver, a module next to it, and a task file. Each driver's docstring
lists the versions of its engine that it ran with.
"""
