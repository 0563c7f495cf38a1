"""What the benchmarks on emulated devices share: the setting, the systems, the rounds."""
