"""vLLM's CPU build with asynchronous scheduling, as on GPUs; it is started by test_engine.py.

vLLM turns asynchronous scheduling off on a CPU. With it, the next step is scheduled before the
tokens of the last one have arrived. FAKE CUDA streams and events: on a CPU a copy is done at once.
"""

from unittest.mock import MagicMock

import torch
from vllm.entrypoints.launchers.api_server.entry import main
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.core import EngineCore

check = CpuPlatform.check_and_update_config


def asynchronous(platform, config):
    check(config)
    config.scheduler_config.async_scheduling = True


CpuPlatform.check_and_update_config = classmethod(asynchronous)
for name in ("Stream", "Event", "current_stream", "stream"):
    setattr(torch.cuda, name, MagicMock())
# EngineCore.step is the synchronous step: with None in its place a call of it would fail
EngineCore.step = None

if __name__ == "__main__":
    main()
