"""The benchmark of the package: `python -m jaxflash.benchmark --help`.

cases    what is measured: shapes, FLOP counts, inputs
peers    who is measured, and how each is called
checks   that all of them compute the same before anything is timed
timing   burst and sustained seconds per call
session  one run: compile, check, time, within a budget
report   table, JSON, CSV and plots
machine  where it ran
"""
