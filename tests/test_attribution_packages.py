"""The projectors inside the real `traker` and `dattri`, from gradients to scores."""

import logging
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from sjlt.attribution import DattriProjector, TrakProjector, dattri_projections

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writ"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TRAIN, TARGETS, CLASSES, WIDTH = 60, 12, 3, 10


class Net(nn.Module):
    """A small classifier with a scalar parameter."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x))) * self.temperature


def trained(seed=0):
    """Return a model fitted to TRAIN points of three Gaussian classes, those points, and TARGETS further points."""
    generator = torch.Generator().manual_seed(seed)
    centres = 1.5 * torch.randn(CLASSES, WIDTH, generator=generator)
    labels = torch.randint(CLASSES, (TRAIN + TARGETS,), generator=generator)
    points = centres[labels] + torch.randn(TRAIN + TARGETS, WIDTH, generator=generator)
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points[:TRAIN]), labels[:TRAIN]).backward()
        optimizer.step()
    return model.eval(), (points[:TRAIN], labels[:TRAIN]), (points[TRAIN:], labels[TRAIN:])


def size_of(model):
    return sum(p.numel() for p in model.parameters())


# ------------------------------------------------------------------------------------- TRAK


def tracer(folder, model, projector, half=False):
    from trak import TRAKer

    return TRAKer(
        model=model,
        task="image_classification",
        train_set_size=TRAIN,
        save_dir=folder,
        device="cpu",
        projector=projector,
        use_half_precision=half,
        logging_level=logging.ERROR,
        lambda_reg=1e-3,
    )


def part(batch, start, stop):
    return [t[start:stop] for t in batch]


def scores(folder, model, train, targets, projector, half=False):
    traker = tracer(folder, model, projector, half)
    for i in (0, 1):  # checkpoints
        traker.load_checkpoint(model.state_dict(), model_id=i)
        for start in range(0, TRAIN, 20):
            traker.featurize(part(train, start, start + 20), num_samples=20)
    traker.finalize_features()
    return scored(traker, model, targets)


def scored(traker, model, targets):
    for i in (0, 1):
        traker.start_scoring_checkpoint("test", model.state_dict(), model_id=i, num_targets=TARGETS)
        traker.score(targets, num_samples=TARGETS)
    return np.array(traker.finalize_scores("test"))


@pytest.mark.parametrize("half", [False, True])
def test_trak_resumes(tmp_path, half):
    """A resumed run gives the scores of an uninterrupted one, to the bit; another seed, law or dimension is refused."""
    model, train, targets = trained()
    make = lambda **law: TrakProjector(size_of(model), 64, device="cpu", **law)  # noqa: E731
    expected = scores(tmp_path / "whole", model, train, targets, make(), half)
    assert expected.shape == (TRAIN, TARGETS)
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 0

    folder = tmp_path / "resumed"
    first = tracer(folder, model, make(), half)
    first.load_checkpoint(model.state_dict(), model_id=0)
    first.featurize(part(train, 0, 20), num_samples=20)
    del first
    second = tracer(folder, model, make(), half)
    second.load_checkpoint(model.state_dict(), model_id=0)
    for start in (0, 20, 40):  # the first part is already done and skipped
        second.featurize(part(train, start, start + 20), num_samples=20)
    del second
    for other in (make(seed=1), make(nnz=2), make(density=0.5)):
        with pytest.raises(AssertionError, match="JL matrix"):
            tracer(folder, model, other, half)
    third = tracer(folder, model, make(), half)
    third.load_checkpoint(model.state_dict(), model_id=1)
    for start in (0, 20, 40):
        third.featurize(part(train, start, start + 20), num_samples=20)
    third.finalize_features()
    assert np.array_equal(scored(third, model, targets), expected)


def test_gradients_vectorized_by_trak(tmp_path):
    from trak.projectors import NoOpProjector

    model, train, _ = trained()
    projector = TrakProjector(size_of(model), 32, device="cpu")
    as_dict = tracer(tmp_path, model, projector).gradient_computer.compute_per_sample_grad(part(train, 0, 5))
    matrix = NoOpProjector(device="cpu").project(as_dict, 0)
    assert matrix.shape == (5, size_of(model))
    torch.testing.assert_close(projector.project(matrix, 0), projector.project(as_dict, 0))


def test_scores_match_traks_own_quality(tmp_path):
    """Correlation with unprojected scores over 20 seeds, compared with TRAK's Gaussian projection of equal width.

    The mean difference must be at least minus two of its standard errors: one run in 40 would fail by chance if
    both were
    equally good, but the seeds are fixed.
    """
    from trak.projectors import BasicProjector, NoOpProjector

    model, train, targets = trained()
    exact = scores(tmp_path / "exact", model, train, targets, NoOpProjector(device="cpu")).ravel()
    correlations = {"ours": [], "theirs": []}
    for seed in range(20):
        arguments = {"grad_dim": size_of(model), "proj_dim": 100, "seed": seed, "device": "cpu"}
        projectors = {
            "ours": TrakProjector(**arguments),
            "theirs": BasicProjector(proj_type="normal", block_size=50, **arguments),
        }
        for name, projector in projectors.items():
            found = scores(tmp_path / f"{name}{seed}", model, train, targets, projector).ravel()
            correlations[name].append(np.corrcoef(exact, found)[0, 1])
    ours, theirs = np.array(correlations["ours"]), np.array(correlations["theirs"])
    difference = ours - theirs
    print(f"correlation: sjlt {ours.mean():.4f}, BasicProjector {theirs.mean():.4f}")
    assert difference.mean() >= -2 * difference.std(ddof=1) / np.sqrt(20), (ours, theirs)
    assert ours.mean() > 0.5


# ------------------------------------------------------------------------------------- dattri


def dattri_task(model):
    from dattri.task import AttributionTask

    def loss(parameters, data):
        x, y = data
        logits = torch.func.functional_call(model, parameters, x.unsqueeze(0))
        return nn.functional.cross_entropy(logits, y.unsqueeze(0))

    return AttributionTask(loss_func=loss, model=model, checkpoints=model.state_dict()), loss


def loader(batch):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=20, shuffle=False)


def test_dattri_uses_the_sketch():
    from dattri.func import projection

    gradients = {"a": torch.randn(8, 30, 3), "b": torch.randn(8)}
    theirs = projection.make_random_projector
    arguments = {"feature_batch_size": 8, "proj_dim": 32, "proj_max_batch_size": 32, "proj_seed": 4}
    with dattri_projections(nnz=2):
        project = projection.random_project(gradients, proj_type="rademacher", **arguments)
        identity = projection.random_project(gradients["a"].flatten(1), proj_type="identity", **arguments)
        with pytest.raises(ValueError, match="proj_type"):
            projection.random_project(gradients, proj_type="unheard-of", **arguments)
    expected = DattriProjector(91, 32, 4, nnz=2)
    for i in (0, 3):  # works after the context has ended
        assert torch.equal(project(gradients, ensemble_id=i), expected.project(gradients, i))
    assert torch.equal(identity(gradients["a"].flatten(1)), gradients["a"].flatten(1))
    assert projection.make_random_projector is theirs
    with pytest.raises(RuntimeError, match="inside"), dattri_projections():
        raise RuntimeError("inside")
    assert projection.make_random_projector is theirs


def test_dattri_norms():
    """dattri's projections preserve norms, and so do these; 0.02 is four standard errors."""
    from dattri.func import projection

    x = torch.randn(50, 3000)
    for context in (dattri_projections(), nullcontext()):
        with context:
            project = projection.random_project(x, 50, proj_dim=1024, proj_max_batch_size=32)
        assert abs(float((project(x).norm(dim=1) / x.norm(dim=1)).mean()) - 1) < 0.02


@pytest.mark.parametrize("attributor", ["trak", "tracin"])
def test_dattri_attributors(attributor):
    """Scores correlate with those of dattri's Gaussian projections, and repeat to the bit."""
    from dattri.algorithm.tracin import TracInAttributor
    from dattri.algorithm.trak import TRAKAttributor

    model, train, targets = trained()
    task, loss = dattri_task(model)

    def found():
        arguments = {"proj_dim": 128, "proj_max_batch_size": 32, "proj_seed": 0, "device": "cpu"}
        if attributor == "tracin":
            made = TracInAttributor(
                task=task,
                weight_list=torch.ones(1),
                normalized_grad=False,
                projector_kwargs=arguments,
                device="cpu",
            )
            with torch.no_grad():
                return made.attribute(loader(train), loader(targets)).ravel()
        probability = lambda parameters, data: torch.exp(-loss(parameters, data))  # noqa: E731
        made = TRAKAttributor(task, probability, projector_kwargs=arguments, regularization=1e-3)
        made.cache(loader(train))
        with torch.no_grad():
            return made.attribute(loader(targets)).ravel()

    theirs = found()
    with dattri_projections():
        ours, again = found(), found()
    assert torch.equal(ours, again)
    assert not torch.equal(ours, theirs)
    assert float(torch.corrcoef(torch.stack([ours, theirs]))[0, 1]) > 0.5
