"""Least-squares problems and matrices of known difficulty, and the backward error of a solution."""

import numpy as np
import scipy.linalg


def orthonormal(rng, m, n):
    return np.linalg.qr(rng.standard_normal((m, n)))[0]


def problem(m, n, condition, residual, seed):
    """(A, b) with geometric singular values from 1 to 1/condition, the given residual norm, and a solution of norm 1.

    The test problems of Epperly, Meier and Nakatsukasa (2024), section 4.
    """
    rng = np.random.default_rng(seed)
    U = orthonormal(rng, m, n)
    A = U * np.geomspace(1, 1 / condition, n) @ orthonormal(rng, n, n).T
    x = rng.standard_normal(n)
    noise = rng.standard_normal(m)
    noise -= U @ (U.T @ noise)
    return A, A @ (x / np.linalg.norm(x)) + residual * noise / np.linalg.norm(noise)


def backward_error(A, b, x):
    """The Karlson-Walden estimate relative to ||A||_F, with t = ||A||_F / ||b|| and residuals in extended precision."""
    _, s, Vh = np.linalg.svd(A, full_matrices=False)
    norm = np.linalg.norm(A)
    theta = norm / np.linalg.norm(b)
    wide = A.astype(np.longdouble)
    residual = b.astype(np.longdouble) - wide @ x.astype(np.longdouble)
    gradient = (wide.T @ residual).astype(np.float64)
    root = np.sqrt(1 + theta**2 * (x @ x))
    eta = theta * float(np.linalg.norm(residual)) / root
    return theta / root * np.linalg.norm((Vh @ gradient) / np.sqrt(s**2 + eta**2)) / norm


def householder(A, b):
    """The solution by Householder QR, without forming Q."""
    n = A.shape[1]
    (reflectors, tau), R = scipy.linalg.qr(A, mode="raw")
    rotated, _, _ = scipy.linalg.lapack.dormqr("L", "T", reflectors, tau, b[:, None], lwork=64 * A.shape[0])
    return scipy.linalg.solve_triangular(R[:n], rotated[:n, 0])


def isolated_blocks(rng, m, n, width):
    """n columns in separate blocks of `width` dense rows, aligned to their width; all other rows are 0."""
    A = np.zeros((m, n))
    for c, r in enumerate(rng.choice(m // width, n // width, replace=False)):
        A[r * width : (r + 1) * width, c * width : (c + 1) * width] = rng.standard_normal((width, width))
    return A
