//! Random numbers, bit-compatible with llm.c and PyTorch.
