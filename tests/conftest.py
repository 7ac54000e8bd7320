"""What the tests share: the repository on the path, the toy base model, and one real vLLM server for all of them."""
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ["PYTHONPATH"] = str(ROOT)
PORT = 8700  # the shared engine; end-to-end runs take ports from 8710 on


@pytest.fixture(scope="session")
def base_model():
    """Directory of the toy base model of seed 0 (made once, ~25 s)."""
    from tasks import _tiny
    path = ROOT / "out" / "models" / "toy-seed0"
    _tiny.make_model(["toy"], path, 0)
    return path


@pytest.fixture(scope="session")
def engine(base_model, tmp_path_factory):
    """A real vLLM server with the toy model; yields its Config."""
    import config as cfg
    import launch
    from evaluate import start_engines, stop_engines
    config = cfg.resolve(cfg.parse(["toy", "--run", "engine", "--out", str(tmp_path_factory.mktemp("engine")), "--port", str(PORT), "--concurrency", "64"], 0), 0)
    launch.write(config)
    engines = start_engines(config)
    yield config
    stop_engines(engines)
