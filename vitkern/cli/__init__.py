"""The command line: one file per command, with its `arguments(parser)` and `run(given) -> status`.

A command imports torch inside `run`, so that help and argument errors answer at once.
"""

COMMANDS = ("demo", "info", "summary", "bench", "classify", "train", "probe", "aot", "warmup")
