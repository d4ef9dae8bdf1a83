"""The iid law on the CPU: the interface that `sjlt.backends` calls."""

from __future__ import annotations

from .iid_dense import adjoint_iid, project_iid
from .iid_sparse import columns_iid, project_iid_sparse, project_iid_to_csr

project, adjoint, columns = project_iid, adjoint_iid, columns_iid
project_sparse, project_to_csr = project_iid_sparse, project_iid_to_csr

__all__ = ["adjoint", "columns", "project", "project_sparse", "project_to_csr"]
