"""Live models of other libraries, recognised without importing these."""
