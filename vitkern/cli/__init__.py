"""The command line: one file per command, with its `arguments(parser)` and `run(given) -> status`.

ALIASES, where a module has them, are names that a command also answers to. A command imports
torch inside `run`, so that help and argument errors answer at once.
"""

COMMANDS = (
    "demo",
    "info",
    "summary",
    "bench",
    "predict",
    "inspect",
    "serve",
    "train",
    "probe",
    "aot",
    "warmup",
)
