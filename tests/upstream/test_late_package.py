"""A package put off: its ``__init__`` does not run for a submodule, and whatever is asked of it is answered as Python does."""

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_hybrid_prefix.upstream.rebinding import Applied

FILES = {
    "__init__": "__version__ = '2.3'\nfrom late import models\nfrom late.ops import scan\nfrom late.models import Model\n"
    "with open(__file__ + '.runs', 'a') as file:\n    file.write('.')\n",
    "ops/__init__": "",
    "ops/kernels": "def kernel():\n    return 7\n",
    "ops/scan": "import time\ntime.sleep(0.05)\n",
    "models": "class Model:\n    width = 3\n",
}
WITHOUT = {
    "version": "out = late.__version__, hasattr(late, '__version__')",
    "kernel": "import pickle; from late.ops.kernels import kernel; out = pickle.loads(pickle.dumps(kernel))()",
    "another submodule": "import late.models; out = sys.modules['late.models'].Model.width",
    "spec": "from importlib.util import find_spec; out = find_spec('late').origin, find_spec('late').loader.name, repr(late)",
    "inspected": "import inspect; out = inspect.getmodule(inspect.currentframe()), inspect.getsourcefile(late)",
}
LOOKS = WITHOUT | {
    "name": "from late import Model; out = Model.width, Model.__module__",
    "star": "from late import *; out = Model.width",
    "what the init imports": "out = late.ops.scan.__name__",
    "everything": "out = sorted(dir(late)), isinstance(late, type(sys))",
    "missing": "out = late.missing",
    "missing name": "from late import missing",
    "set": "late.Model = 5; from late import Model; out = Model",
    "pickled": "import pickle; out = pickle.loads(pickle.dumps(late.Model())).width",
    "reloaded": "import importlib; old = late.Model; out = importlib.reload(late) is late, late.Model is old",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        file = tmp_path / "late" / f"{name}.py"
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(text)
    (tmp_path / "late" / "__init__.py.runs").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "late"
    forget()


def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "late"]:
        del sys.modules[name]


def import_kernels(times):
    """The package, anew and put off so many times, after one of its submodules was imported."""
    forget()
    put_off = [Applied() for _ in range(times)]
    for applied in put_off:
        applied.put_off("late")
    assert importlib.import_module("late.ops.kernels").kernel() == 7
    for applied in put_off:
        applied.undo()
    return sys.modules["late"]


def runs(folder):
    return len((folder / "__init__.py.runs").read_text())


@pytest.mark.parametrize("look", LOOKS)
def test_it_answers_as_python_does(folder, look):
    outcomes = []
    for times in range(3):
        before, names = runs(folder), {"late": import_kernels(times), "sys": sys}
        assert runs(folder) == before + (times == 0)
        try:
            exec(LOOKS[look], names)
            outcomes.append(names["out"])
        except Exception as error:
            outcomes.append((type(error), str(error)))
        assert runs(folder) == before + (times == 0 or look not in WITHOUT) + (look == "reloaded")
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_threads_that_look_at_once_run_it_once(folder):
    late = import_kernels(1)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda _: late.Model.width, range(8))) == [3] * 8
    assert runs(folder) == 1


def test_one_that_fails_is_not_imported_and_its_kernels_stay(folder):
    (folder / "models.py").write_text("raise ImportError('undefined symbol')\n")
    late = import_kernels(1)
    for look in (lambda: late.Model, lambda: importlib.import_module("late"), lambda: late.Model):
        with pytest.raises(ImportError, match="undefined symbol"):
            look()
        assert "late" not in sys.modules and "late.ops.kernels" in sys.modules


def test_one_that_was_imported_before_is_left_alone(folder):
    late = import_kernels(0)
    finders, applied = list(sys.meta_path), Applied()
    applied.put_off("late")
    assert sys.modules["late"] is late and type(late) is type(sys) and sys.meta_path == finders
