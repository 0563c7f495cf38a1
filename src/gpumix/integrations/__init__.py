"""gpumix underneath training programs of other libraries, a file per library.

`import gpumix` imports nothing here: each file needs the library of its name, which is an extra.
"""
