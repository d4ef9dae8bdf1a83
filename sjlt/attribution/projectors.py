"""Projectors of per-example gradients with the constructors and methods that `traker` and `dattri` expect.

Neither package is imported: both accept any object with the methods of their abstract classes.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from ..inputs.checks import integer, seed_number
from ..laws.exact import VERSION
from ..sketch import Sketch

MODEL_STEP = 2**32  # difference between the seeds of models, so that projector seeds below it give distinct ones


class _Projector:
    """A family of sketches, one per model, for batches of gradients.

    Attributes
    ----------
    proj_dim, seed, device : as given
    proj_type : str
        The law of the entries and the seed. With the two dimensions, these identify the matrix.
    """

    _model_name = "model_id"

    def __init__(self, dim: int, proj_dim: int, seed: int, proj_type: str, device: Any, **law: Any) -> None:
        self.sketch = Sketch(dim, proj_dim, seed=seed, **law)
        self.proj_dim, self.seed = self.sketch.n_components, seed_number(seed)
        self.device = torch.device(device)
        self.proj_type = _description(self.sketch)
        if str(proj_type) not in ("sjlt", self.proj_type):
            raise ValueError(
                f"proj_type must be 'sjlt', got {str(proj_type)!r}: entries are determined by nnz, stacks and density "
                "(density=1 gives independent signs, known as 'rademacher')"
            )

    def _sketch_of(self, model: int) -> Sketch:
        """The sketch of a model, with seed ``seed + 2**32 * model`` mod 2^64."""
        seed = self.sketch.seed + MODEL_STEP * integer(self._model_name, model, 0, 2**31 - 1)
        return Sketch.from_dict({**self.sketch.to_dict(), "seed": seed % 2**64})

    def _project(self, gradients: Any, model: int, scale: float) -> Tensor:
        """The sketch of each example's gradients, times `scale`, in a new tensor of at least fp32."""
        sketch = self._sketch_of(model)
        tree = gradients if isinstance(gradients, Mapping) else {"gradients": gradients}
        if not tree or not all(isinstance(leaf, Tensor) for leaf in tree.values()):
            raise TypeError(
                f"gradients must be a tensor or a dict of tensors, got {type(gradients).__name__} of "
                f"{[type(leaf).__name__ for leaf in tree.values()]}"
            )
        if not isinstance(gradients, Mapping) and gradients.ndim != 2:
            raise ValueError(
                f"a tensor of gradients must have shape (batch, {sketch.n_features}), got {tuple(gradients.shape)}"
            )
        with torch.no_grad():
            leaves = [leaf.to(self.device) for leaf in tree.values()]
            dtype = reduce(torch.promote_types, (leaf.dtype for leaf in leaves), torch.float32)
            result = torch.empty((*leaves[0].shape[:1], self.proj_dim), dtype=dtype, device=self.device)
            return sketch.project_tree(leaves, batched=True, out=result).mul_(scale)

    def free_memory(self) -> None:
        """Do nothing: no matrix is stored."""


class TrakProjector(_Projector):
    """A projector for ``trak.TRAKer(projector=...)`` that stores no matrix.

    TRAK expects entries of variance 1, so results are sqrt(proj_dim) times those of `Sketch`. Each model has its own
    sketch, with seed ``seed + 2**32 * model_id`` mod 2^64.

    Parameters
    ----------
    grad_dim : int
        Number of parameters of the model (of those in `grad_wrt`, if it is passed to TRAK).
    proj_dim : int, 1 to 8,388,480
    seed : int, -2^63 to 2^64 - 1, default 0
    proj_type : "sjlt", default "sjlt"
        No other value is accepted. The attribute describes the law and the seed: TRAK stores it, and does not continue
        a folder that has another value.
    device : str or torch.device, default "cuda"
        Device of the results; gradients on other devices are copied to it.
    nnz, stacks, density : as in `Sketch`
        density=1 gives the distribution of TRAK's "rademacher".

    Raises
    ------
    TypeError, ValueError
        As in `Sketch`.

    References
    ----------
    Park, Georgiev, Ilyas, Leclerc, Madry, "TRAK: attributing model behavior at scale", ICML 2023.

    Examples
    --------
    >>> import torch
    >>> from sjlt.attribution import TrakProjector
    >>> projector = TrakProjector(grad_dim=33, proj_dim=16, seed=0, device="cpu")
    >>> gradients = {"weight": torch.ones(5, 4, 8), "bias": torch.ones(5)}  # of 5 examples
    >>> projector.project(gradients, model_id=0).shape
    torch.Size([5, 16])
    """

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int = 0,
        proj_type: str = "sjlt",
        device: str | torch.device = "cuda",
        *,
        nnz: int | Literal["auto"] | None = "auto",
        stacks: int = 1,
        density: float | Literal["auto"] | None = None,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, nnz=nnz, stacks=stacks, density=density)
        self.grad_dim = self.sketch.n_features

    def project(self, grads: Any, model_id: int) -> Tensor:
        """Project the gradients of a batch.

        Parameters
        ----------
        grads : dict of tensors of shape (batch, ...), or tensor of shape (batch, grad_dim)
            The gradients of a scalar parameter have shape (batch,). A dict is projected tensor by tensor, without a
            copy.
        model_id : int, 0 to 2^31 - 1

        Returns
        -------
        tensor of shape (batch, proj_dim)
            A new tensor, float32, or float64 if the gradients are.

        Raises
        ------
        TypeError, ValueError
            If `grads` has another type, or if an example does not have grad_dim elements.
        """
        return self._project(grads, model_id, sqrt(self.proj_dim))


class DattriProjector(_Projector):
    """A projector for `dattri` (its AbstractProjector) that stores no matrix, with the scale of `Sketch`.

    Use `dattri_projections` to make dattri use it. Each ensemble has its own sketch, with seed
    ``seed + 2**32 * ensemble_id`` mod 2^64.

    Parameters
    ----------
    feature_dim : int
        Number of parameters of the model.
    proj_dim, seed, proj_type, device, nnz, stacks, density : as in `TrakProjector`

    Raises
    ------
    TypeError, ValueError
        As in `Sketch`.

    References
    ----------
    Deng et al., "dattri: a library for efficient data attribution", NeurIPS 2024.

    Examples
    --------
    >>> import torch
    >>> from sjlt.attribution import DattriProjector
    >>> projector = DattriProjector(feature_dim=33, proj_dim=16, seed=0, device="cpu")
    >>> projector.project(torch.ones(5, 33), ensemble_id=0).shape
    torch.Size([5, 16])
    """

    _model_name = "ensemble_id"

    def __init__(
        self,
        feature_dim: int,
        proj_dim: int,
        seed: int = 0,
        proj_type: str = "sjlt",
        device: str | torch.device = "cpu",
        *,
        nnz: int | Literal["auto"] | None = "auto",
        stacks: int = 1,
        density: float | Literal["auto"] | None = None,
    ) -> None:
        super().__init__(feature_dim, proj_dim, seed, proj_type, device, nnz=nnz, stacks=stacks, density=density)
        self.feature_dim = self.sketch.n_features

    def project(self, features: Any, ensemble_id: int = 0) -> Tensor:
        """Project a batch of features, such as gradients: like `TrakProjector.project`, without its scale."""
        return self._project(features, ensemble_id, 1.0)


@contextmanager
def dattri_projections(
    *,
    nnz: int | Literal["auto"] | None = "auto",
    stacks: int = 1,
    density: float | Literal["auto"] | None = None,
) -> Iterator[None]:
    """A context in which the random projections of `dattri` are sketches that are never stored.

    In the context, ``dattri.func.projection.random_project`` builds a `DattriProjector` for the types "normal",
    "rademacher" and "sjlt", also if it is called by dattri's attributors; other types ("identity", "random_mask",
    "grass") are unchanged. Functions built in the context keep their projector afterwards. The context patches dattri's
    module, so it affects every thread. Contexts may overlap, in one thread or several; of those that are active, the
    one entered last applies.

    Parameters
    ----------
    nnz, stacks, density : as in `Sketch`

    Raises
    ------
    ImportError
        If dattri is missing: install ``sjlt-triton[attribution]``.

    Examples
    --------
    >>> import torch, sjlt.attribution
    >>> gradients = torch.randn(8, 1000)
    >>> with sjlt.attribution.dattri_projections():  # doctest: +SKIP
    ...     project = dattri.func.projection.random_project(gradients, 8, proj_dim=64, proj_max_batch_size=32)
    ...     project(gradients, ensemble_id=0).shape
    torch.Size([8, 64])
    """
    try:
        from dattri.func import projection
    except ImportError as e:
        raise ImportError("dattri_projections needs dattri: pip install 'sjlt-triton[attribution]'") from e
    law = {"nnz": nnz, "stacks": stacks, "density": density}
    _enter(projection, law)
    try:
        yield
    finally:
        _leave(projection, law)


class _Replacement:
    """Replaces dattri's ``make_random_projector`` while contexts are active; `laws` has the law of each context."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.laws: list[dict[str, Any]] = []

    def __call__(self, param_shape_list: Any, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(self.original).bind(param_shape_list, *args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        laws = self.laws[-1:]  # read once: another thread may leave its context at any time
        if not laws or given["proj_type"] not in ("normal", "rademacher", "sjlt"):
            return self.original(param_shape_list, *args, **kwargs)
        dim = int(sum(param_shape_list))
        return DattriProjector(dim, given["proj_dim"], given["proj_seed"], device=given["device"], **laws[0])


_lock = threading.Lock()
_replacement: _Replacement | None = None  # while any context is active


def _enter(projection: Any, law: dict[str, Any]) -> None:
    global _replacement
    with _lock:
        if _replacement is None:
            _replacement = _Replacement(projection.make_random_projector)
            projection.make_random_projector = _replacement
        _replacement.laws.append(law)


def _leave(projection: Any, law: dict[str, Any]) -> None:
    global _replacement
    with _lock:
        assert _replacement is not None
        laws = _replacement.laws
        laws.pop(next(i for i, active in enumerate(laws) if active is law))
        if laws:
            return
        if projection.make_random_projector is _replacement:  # otherwise someone else has patched it since
            projection.make_random_projector = _replacement.original
        _replacement = None


def _description(sketch: Sketch) -> str:
    law = f"density {sketch.density}" if sketch.is_iid else f"nnz {sketch.nnz}"
    law += f", stacks {sketch.stacks}" if sketch.stacks > 1 else ""
    return f"sjlt law {VERSION}, {law}, seed {sketch.seed}"
