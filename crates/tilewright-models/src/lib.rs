//! Models with explicit forward and backward over the op library.
