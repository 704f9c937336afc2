//! The single seam to GPU libraries. Nothing outside this folder names a driver call; ops see a device, tensors and launches.

#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "gpu")]
pub mod gpu;
