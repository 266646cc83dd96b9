"""The state of the process that a call from Python leaves as it found it."""

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers.utils import logging as library


@contextmanager
def leave_as_found() -> Iterator[None]:
    """Silence transformers, and restore seeds, logging and threads at the end; training restores signal handlers."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    levels = {logger: logger.level for logger in loggers if isinstance(logger, logging.Logger)}
    states, threads = (random.getstate(), np.random.get_state()), torch.get_num_threads()
    has_bars = library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        if has_bars:
            library.enable_progress_bar()
        for logger, level in levels.items():
            logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads(threads)
