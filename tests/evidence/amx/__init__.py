"""An emulator of AMX's tile instructions."""
