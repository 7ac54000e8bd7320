"""vLLM's CPU build with asynchronous scheduling, which it turns off and GPUs have: for test_engine.py.

The next step is scheduled before the last one's tokens are here. What copies them on a GPU is done at once on a CPU.
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
# how it steps otherwise
EngineCore.step = None

if __name__ == "__main__":
    main()
