"""The benchmark of the package: `python -m jaxflash.benchmark --help`.

cases     what is measured: shapes, FLOP counts, inputs
peers     who is measured, and how each is called
programs  one interface for compiled JAX functions and for torch
checks    that all of them compute the same before anything is timed
timing    burst and sustained seconds per call
session   one run: compile, check, time, within a budget
report    tables, JSON and CSV
plots     TFLOP/s over the length
machine   where it ran
progress  the bar that moves meanwhile
"""
