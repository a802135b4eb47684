"""What one decode step and whole answers cost on a CPU, beside llama.cpp and transformers: `make bench-cpu`."""
