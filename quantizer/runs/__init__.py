"""``quantizer run`` and ``quantizer convert``: all stages on a task, timed, resumable, reported."""
