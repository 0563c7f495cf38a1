"""gpumix underneath other people's programs, one file each.

Nothing here is imported by `import gpumix`: each file needs the library that it is named after,
which is an extra.
"""
