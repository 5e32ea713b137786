"""The command line: one file per command, with its `arguments(parser)` and `run(given) -> status`.

The docstring is the command's help: its first line stands in the list of commands, and lines after
"Examples:" below the options. ALIASES, where a module has them, are names that a command also
answers to. A command imports torch inside `run`, so that help and argument errors answer at once.
"""

COMMANDS = (
    "demo",
    "doctor",
    "verify",
    "bench",
    "summary",
    "predict",
    "inspect",
    "embed",
    "search",
    "export",
    "serve",
    "train",
    "probe",
    "aot",
    "warmup",
    "completion",
)
