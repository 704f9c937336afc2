//! `--device`: where the work runs.

use std::str::FromStr;

use tilewright_core::{Error, Result};
use tilewright_ops::Device;

/// A device by name, not opened yet.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum DeviceName {
    /// This computer's processor.
    #[default]
    Cpu,
    /// An NVIDIA GPU by its number.
    Cuda(usize),
    /// A GPU through Vulkan, by its number in `doctor`'s list.
    Vulkan(usize),
    /// A GPU through Metal, likewise.
    Metal(usize),
    /// A GPU through whichever of both this system has.
    Gpu(usize),
}

impl FromStr for DeviceName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refused = || {
            let hint = "use cpu, cuda, vulkan, metal or gpu, or cuda:1 for the second GPU";
            Error::config(format!("there is no device `{text}`"), hint)
        };
        let (name, number) = match text.split_once(':') {
            Some((name, number)) => (name, number.parse().map_err(|_| refused())?),
            None => (text, 0),
        };
        match name {
            "cpu" if name == text => Ok(DeviceName::Cpu),
            "cuda" => Ok(DeviceName::Cuda(number)),
            "vulkan" => Ok(DeviceName::Vulkan(number)),
            "metal" => Ok(DeviceName::Metal(number)),
            "gpu" => Ok(DeviceName::Gpu(number)),
            _ => Err(refused()),
        }
    }
}

impl std::fmt::Display for DeviceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceName::Cpu => f.write_str("cpu"),
            DeviceName::Cuda(n) => write!(f, "cuda:{n}"),
            DeviceName::Vulkan(n) => write!(f, "vulkan:{n}"),
            DeviceName::Metal(n) => write!(f, "metal:{n}"),
            DeviceName::Gpu(n) => write!(f, "gpu:{n}"),
        }
    }
}

impl DeviceName {
    /// Opens it. One that may draw windows too is measured, so that no launch stops them for long.
    ///
    /// # Errors
    /// What a GPU lacks, and how to get it.
    pub fn open(self) -> Result<Device> {
        let device = match self {
            DeviceName::Cpu => Ok(Device::cpu()),
            DeviceName::Cuda(n) => Device::cuda(n),
            DeviceName::Vulkan(n) => Device::vulkan(n),
            DeviceName::Metal(n) => Device::metal(n),
            DeviceName::Gpu(n) => Device::gpu(n),
        }?;
        device.calibrate()?;
        Ok(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for (text, name) in [
            ("cpu", DeviceName::Cpu),
            ("cuda:0", DeviceName::Cuda(0)),
            ("cuda:3", DeviceName::Cuda(3)),
            ("vulkan:1", DeviceName::Vulkan(1)),
            ("metal:0", DeviceName::Metal(0)),
            ("gpu:2", DeviceName::Gpu(2)),
        ] {
            assert_eq!(text.parse::<DeviceName>().unwrap(), name);
            assert_eq!(name.to_string(), text);
        }
        assert_eq!("cuda".parse::<DeviceName>().unwrap(), DeviceName::Cuda(0));
        assert_eq!("vulkan".parse::<DeviceName>().unwrap(), DeviceName::Vulkan(0));
        assert_eq!("gpu".parse::<DeviceName>().unwrap(), DeviceName::Gpu(0));
    }

    #[test]
    fn other_names_are_refused_with_the_right_ones() {
        for text in ["", "opencl", "cuda:", "cuda:x", "CPU", "cpu:0", "gpu:-1"] {
            let message = text.parse::<DeviceName>().unwrap_err().to_string();
            assert!(message.contains("use cpu, cuda"), "{message}");
        }
    }

    #[cfg(not(any(feature = "vulkan", feature = "metal")))]
    #[test]
    fn a_build_without_vulkan_or_metal_says_how_to_get_them() {
        for (name, feature) in [(DeviceName::Vulkan(0), "vulkan"), (DeviceName::Metal(0), "metal")] {
            let message = name.open().unwrap_err().to_string();
            assert!(message.contains(&format!("--features {feature}")), "{message}");
        }
        assert!(DeviceName::Gpu(0).open().unwrap_err().to_string().contains("--features"));
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_build_without_cuda_says_how_to_get_it() {
        let message = DeviceName::Cuda(0).open().unwrap_err().to_string();
        assert!(message.contains("--features cuda"), "{message}");
    }
}
