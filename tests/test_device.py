"""The device of ``sjlt project``: the one requested, the ones available and the ones the file allows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

import sjlt
from sjlt.cli import app as cli
from sjlt.files import device as devices
from sjlt.files import projection
from sjlt.files.errors import UserError
from sjlt.files.projection import project_file

N, D, K = 50, 30, 16
NOT_FOR_A_GPU = {
    "int8": (lambda: np.save("x.npy", np.ones((N, D), np.int8)), "x.npy: holds int8, and a GPU needs float16, "),
    "bool": (lambda: np.save("x.npy", np.ones((N, D), bool)), "x.npy: holds bool, and a GPU needs float16, "),
    "big-endian": (lambda: np.save("x.npy", np.ones((N, D), ">f4")), "x.npy: holds >f4, and a GPU needs float16, "),
    "sparse": (
        lambda: scipy.sparse.save_npz("x.npz", scipy.sparse.csr_array(np.ones((N, D)))),
        "x.npz: sparse, and a GPU needs dense rows",
    ),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["no driver", "a driver alone", "a GPU"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Simulate such a machine; work for its GPU runs on the CPU instead."""
    monkeypatch.setattr(devices, "has_driver", lambda: request.param != "no driver")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param == "a GPU")
    monkeypatch.setattr(devices, "device_name", lambda gpu: "A GPU" if gpu else "cpu")
    monkeypatch.setattr(projection, "_on_gpu", projection._on_cpu)
    return request.param


def project(device: Any, source: str = "x.npy") -> tuple[str, list[str]]:
    """The device recorded with the result, and the notes shown to the user."""
    notes: list[str] = []
    project_file(Path(source), Path("y.npy"), K, device=device, note=notes.append)
    return json.loads(Path("y.npy.json").read_text())["device"], notes


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_auto_uses_an_available_gpu(machine: str, dtype: str, order: Any) -> None:
    np.save("x.npy", np.ones((N, D), dtype, order=order))
    assert project("auto") == ("A GPU" if machine == "a GPU" else "cpu", [])


@pytest.mark.usefixtures("machine")
def test_cpu_stays_on_the_cpu() -> None:
    np.save("x.npy", np.ones((N, D), np.float32))
    assert project("cpu") == ("cpu", [])


@pytest.mark.parametrize("case", NOT_FOR_A_GPU)
def test_data_unsuited_to_a_gpu(machine: str, case: str) -> None:
    save, reason = NOT_FOR_A_GPU[case]
    save()
    (source,) = (path.name for path in Path().iterdir())
    on, notes = project("auto", source)
    notes = [note for note in notes if "loaded whole" not in note and "more than the" not in note]
    assert on == "cpu"
    assert len(notes) == (machine == "a GPU")  # only a machine with a GPU has something to explain
    assert all(note.startswith(reason) and note.endswith("it is projected on the CPU") for note in notes)
    Path("y.npy").unlink()
    with pytest.raises(UserError, match=f"^{reason}.*; it cannot be projected on the device cuda$"):
        project("cuda", source)


def test_cuda_requires_a_gpu(machine: str) -> None:
    np.save("x.npy", np.ones((N, D), np.float32))
    if machine == "a GPU":
        assert project("cuda") == ("A GPU", [])
        return
    with pytest.raises(UserError, match=r"^no device cuda: torch .* finds no usable GPU$"):
        project("cuda")
    assert [path.name for path in Path().iterdir()] == ["x.npy"]


def test_unknown_devices_are_refused() -> None:
    np.save("x.npy", np.ones((N, D), np.float32))
    with pytest.raises(UserError, match=r"^device must be auto, cpu or cuda, got 'tpu'$"):
        project("tpu")
    assert [path.name for path in Path().iterdir()] == ["x.npy"]


def test_without_a_driver_torch_is_not_imported() -> None:
    """Importing it takes seconds; a small file takes tenths of a second."""
    np.save("x.npy", np.ones((N, D), np.float32))
    program = (
        "import sys; from pathlib import Path; from sjlt.files import device, projection\n"
        "device.has_driver = lambda: False\n"
        f"projection.project_file(Path('x.npy'), Path('y.npy'), {K}, device='auto')\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_driver_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.has_driver() or not torch.cuda.is_available()

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(devices.ctypes, "CDLL", missing)
    assert not devices.has_driver()


@pytest.mark.usefixtures("machine")
def test_info_shows_the_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("x.npy", np.ones((N, D), np.float32))
    on, _ = project("auto")
    monkeypatch.setattr(sys, "argv", ["sjlt", "info", "y.npy"])
    with pytest.raises(SystemExit):
        cli.main()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("device"))
    assert line.split(maxsplit=1)[1].strip() == on


@pytest.mark.parametrize("device", ["cuda", pytest.param("auto", marks=pytest.mark.gpu)])
@pytest.mark.exhaustive
def test_as_a_program(device: str) -> None:
    x = np.arange(N * D, dtype=np.float32).reshape(N, D)
    np.save("x.npy", x)
    command = [sys.executable, "-m", "sjlt", "project", "x.npy", "y.npy", "-k", str(K), "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if torch.cuda.is_available():
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        np.testing.assert_array_equal(np.load("y.npy"), sjlt.Sketch(D, K).project(x))
        assert json.loads(Path("y.npy.json").read_text())["device"] == torch.cuda.get_device_name()
    else:
        message = f"Error: no device cuda: torch {torch.__version__} finds no usable GPU\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
