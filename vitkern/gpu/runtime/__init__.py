"""What launches on a user's GPU: the device's executor, binaries built ahead of time, plans."""
