"""User code with mistakes that type checkers report: one in each line that ends with a comment."""

import numpy as np

import sjlt

S = sjlt.Sketch(1000, 128)
sjlt.Sketch(1000, 128, nnz="all")  # error
sjlt.Sketch(1000.5, 128)  # error
S.project(np.ones((5, 1000)), out="Y.npy")  # error
sjlt.dropout("abc", 0.5, 1)  # error
print(sjlt.Scetch)  # error
