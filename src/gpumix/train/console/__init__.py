"""Pages and tables that commands print on a terminal: a plan, devices, errors, a spinner.

May use `schema`, `cost` and `hardware`.
"""
